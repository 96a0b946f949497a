"""The gate of KnapSpec before any strategy: no draft where drafting is measured not to pay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rayspec.decode.drafting.skip_draft import KeepDrafting
from rayspec.decode.rounds import RoundResult
from rayspec.decode.selection.base import BatchState, Search, Selector
from rayspec.decode.selection.plan_limiter import PlanLimiter
from rayspec.planning.latency import LatencyModel
from rayspec.types import Plan, PlanRecord

# What the gate is told a plan gains that was predicted to gain nothing: it is to be measured all the same.
_LEAST_GAIN = math.nextafter(1.0, 2.0)


class OnlyIfFaster:
    """Selector. The strategy's rounds, where they are measured to be faster than plain decoding, else plain ones.

    The gate judges the strategy and not each of its plans, which may be another every round, and not to draft one of
    them; it gets its trial whatever it was predicted to gain. What choosing takes counts as time of its rounds. While
    plain decoding is what pays, the strategy chooses nothing but in the rounds that try it again.

    clock: seconds, any origin.
    """

    def __init__(
        self, strategy: Selector, latency: LatencyModel, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._strategy = strategy
        self._clock = clock
        self._limiter = PlanLimiter(latency, "the gate: no draft")
        self._on_trial = False
        self._choosing_s = 0.0  # that no round was charged with yet

    @property
    def wants_taps(self) -> bool:
        return self._active and self._strategy.wants_taps

    @property
    def gate_reason(self) -> str:
        return self._limiter.gate.reason

    def plan(self, state: BatchState) -> Plan:
        if not self._limiter.drafts:
            return self._limiter.no_draft
        return self._limiter.pass_on(state, self._strategy.plan(state))

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        return self._strategy.keep_drafting(state)

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        own = self._limiter.before_passing(plan)
        self._strategy.observe(state, own, result, num_tokens, seconds)
        if plan.drafts and not any(one.token_ids for one in result.drafts) and not any(result.probed):
            return  # of sequences that may have one more token only
        drafted = plan is not self._limiter.no_draft
        if drafted:
            seconds, self._choosing_s = seconds + self._choosing_s, 0.0
        self._limiter.observe(state, num_tokens, seconds, drafted=drafted)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        if not self._active:
            return None
        started = self._clock()
        record = self._strategy.improve(state, search)
        if not self._on_trial and self._strategy.plan(state).drafts:
            self._on_trial = True
            self._limiter.gate.new_plan(max(_gain(record), _LEAST_GAIN))
        self._choosing_s += self._clock() - started
        return record

    @property
    def _active(self) -> bool:
        """Whether the strategy may choose: it drafts, or has never had a plan to draft by."""
        return not self._on_trial or self._limiter.drafts


def _gain(record: PlanRecord | None) -> float:
    """Of the plan over plain decoding, as predicted."""
    return record.predicted_tpt / record.plain_tpt if record is not None and record.plain_tpt > 0 else 0.0
