"""The gate: the arbiter of `auto` in front of any strategy. Rounds do not draft if that is measured as slower."""

from __future__ import annotations

import time
from collections.abc import Callable

from rayspec.decode.selection.base import BatchState, Search, Selector
from rayspec.decode.selection.trials import Proposed, Trials
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.types import Plan, PlanRecord, no_draft

_PLAIN, _STRATEGY = "plain decoding", "the strategy"


class OnlyIfFaster:
    """Selector that uses the strategy's plans where they are measured to be faster than plain decoding, else no draft.

    The arbiter judges the strategy as a whole, because its plan may change every round, and may be not to draft. The
    strategy gets its trial regardless of its predicted gain. The time to choose plans counts as time of its rounds.
    While plain decoding is faster, the strategy may choose plans only after the rounds that try it again.

    clock: seconds, any origin.
    """

    def __init__(
        self, strategy: Selector, latency: LatencyModel, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._strategy = strategy
        self._clock = clock
        self._latency = latency
        self._no_draft = no_draft(len(latency.sublayers), "not faster: no draft")
        self._trials = Trials(latency, _PLAIN)
        self._has_drafted = False
        self._is_taken = True  # whether the last round took the strategy
        self._gain = 1.0  # the last gain that the strategy predicted
        self._choosing_s = 0.0  # seconds of choosing that no round was charged with yet

    @property
    def wants_taps(self) -> bool:
        return self._active and self._strategy.wants_taps

    @property
    def gate_reason(self) -> str:
        return self._trials.reason(_STRATEGY if self._has_drafted else None)

    def plan(self, state: BatchState) -> Plan:
        plain_rate = state.batch / self._latency.decode_step_s(context=state.context, batch=state.batch)
        ways = {_PLAIN: Proposed(self._no_draft, plain_rate)}
        own = self._strategy.plan(state)
        self._has_drafted = self._has_drafted or own.drafts
        if self._has_drafted:
            ways[_STRATEGY] = Proposed(own, plain_rate * max(self._gain, 1.0))
        return self._trials.take(state, ways)

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        return self._strategy.keep_drafting(state)

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        taken = self._trials.taken(state)
        self._strategy.observe(state, plan if taken is None else taken.plan, result, num_tokens, seconds)
        self._is_taken = taken is not None and taken.way == _STRATEGY
        # A round may draft nothing though its plan drafts: sequences have one token left. It says nothing of drafting.
        tells = not plan.drafts or any(one.token_ids for one in result.drafts) or any(result.probed)
        if self._is_taken and tells:
            seconds, self._choosing_s = seconds + self._choosing_s, 0.0
        self._trials.observe(state, num_tokens, seconds, tells=tells)

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        if not self._active:
            return None
        started = self._clock()
        record = self._strategy.improve(state, search)
        if record is not None and record.plain_tpt > 0:
            self._gain = record.predicted_tpt / record.plain_tpt
        self._choosing_s += self._clock() - started
        return record

    @property
    def _active(self) -> bool:
        """Whether the strategy may choose a plan: the last round took it, or it never had a plan that drafts."""
        return self._is_taken or not self._has_drafted
