"""The gate (`planning.gate`) over an engine's rounds: by which plan a round goes, and what is told of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from rayspec.decode.selection.base import BatchState
from rayspec.planning.gate import Gate
from rayspec.planning.latency import LatencyModel
from rayspec.types import Plan, no_draft

# Rounds, one of each cohort, whose plan may be asked for.
_MOST_UNDER_WAY = 64


class PlanLimiter:
    """The gate's limits on plans: they pass, or no draft does. While drafts are on trial they are no longer than a
    trial may cost: with nothing of it accepted, one long draft would cost a short answer several per cent of its time.

    source: of the plan not to draft.
    """

    def __init__(self, latency: LatencyModel, source: str) -> None:
        self.no_draft = no_draft(len(latency.sublayers), source)
        self._latency = latency
        self.gate = Gate()
        self._shortened: deque[tuple[Plan, Plan]] = deque(maxlen=_MOST_UNDER_WAY)  # each with the one it was made of

    @property
    def drafts(self) -> bool:
        """Whether the next round may draft."""
        return self.gate.choose() == "draft"

    def pass_on(self, state: BatchState, plan: Plan) -> Plan:
        """What the next round goes by where the strategy would go by `plan`."""
        if not self.drafts:
            return self.no_draft
        spare = self.gate.spare_tokens
        if spare is None or not plan.num_draft_tokens:
            return plan
        context, batch = state.context, state.batch
        draft_s = self._latency.draft_step_s(plan.choices, context=context, batch=batch)
        longest = max(1, int(spare / batch * self._plain_s(state) / draft_s))
        if plan.num_draft_tokens <= longest:
            return plan
        self._shortened.append((replace(plan, num_draft_tokens=longest), plan))
        return self._shortened[-1][0]

    def before_passing(self, plan: Plan) -> Plan:
        """The strategy's own plan, of which `pass_on` made this one."""
        return next((own for short, own in self._shortened if short is plan), plan)

    def observe(self, state: BatchState, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """A round that told drafting from not drafting."""
        self.gate.observe(
            "draft" if drafted else "plain",
            num_tokens,
            seconds,
            reference_rate=state.batch / self._plain_s(state),
            num_outstanding_tokens=state.num_outstanding_tokens - num_tokens,
        )

    def pass_over(self, state: BatchState, num_tokens: int, seconds: float) -> None:
        """Another round, which tells nothing of either."""
        self.gate.pass_over(
            seconds,
            reference_rate=state.batch / self._plain_s(state),
            num_outstanding_tokens=state.num_outstanding_tokens - num_tokens,
        )

    def _plain_s(self, state: BatchState) -> float:
        return self._latency.decode_step_s(context=state.context, batch=state.batch)
