"""Self-SD (Draft & Verify): a plan found offline, and drafts that end below a confidence which follows the acceptance
(Zhang et al., 2024). The plan is a saved plan; see `strategies.tuning`.
"""

from __future__ import annotations

from typing_extensions import Self

from rayspec.config import SpeculationOptions
from rayspec.decode.selection.base import BatchState, Search
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.stopping import DraftWhileSure
from rayspec.strategies.saved_plans import SavedPlan
from rayspec.strategies.tested_tokens import Tested
from rayspec.types import Plan, PlanRecord

# Values of the published code and runs.
FIRST_THRESHOLD = 0.6
TARGET_ACCEPTANCE = 0.9
_MATCHED_MEMORY = 0.5
_THRESHOLD_MEMORY = 0.9
_STEP = 0.01


class DraftThreshold:
    """The confidence below which a draft ends. It rises while the accepted share of the drafted tokens is below
    `target`. Otherwise it falls, or stays if drafts reach their length. It changes by at most 0.001 per verify.
    """

    def __init__(self, value: float, *, target: float, adaptive: bool = True) -> None:
        self.value = value
        self._target = target
        self._adaptive = adaptive
        self._matched = 0.0  # accepted share of the drafted tokens, moving average over verifies

    def observe(self, *, num_accepted: int, num_drafted: int, reached_length: bool) -> None:
        """Adapt the threshold after a verify. num_accepted, num_drafted: tokens over the batch. reached_length: all
        drafts had the length of the plan."""
        if not self._adaptive or num_drafted == 0:
            return
        self._matched = _MATCHED_MEMORY * self._matched + (1 - _MATCHED_MEMORY) * num_accepted / num_drafted
        if self._matched < self._target:
            wanted = self.value + _STEP
        else:
            wanted = self.value if reached_length else self.value - _STEP
        self.value = min(max(_THRESHOLD_MEMORY * self.value + (1 - _THRESHOLD_MEMORY) * wanted, 0.0), 1.0)


class SelfSD:
    """Selector of one plan. The threshold of its drafts is kept for the engine's lifetime, across requests.

    expected_tpt, plain_tpt: tokens per second of one sequence with the plan and without it, when the plan was chosen.
    reason: why the plan was chosen, for the record.
    """

    wants_taps = False
    gate_reason = "the strategy has no gate"

    def __init__(
        self,
        plan: Plan,
        threshold: DraftThreshold,
        *,
        acceptance: float,
        expected_tpt: float,
        plain_tpt: float,
        reason: str = "a saved plan",
    ) -> None:
        self.threshold = threshold
        self.record: PlanRecord | None = None
        self._plan = plan
        self._acceptance = acceptance
        self._expected_tpt = expected_tpt
        self._plain_tpt = plain_tpt
        self._reason = reason
        self._told = False

    @classmethod
    def of(cls, saved: SavedPlan, options: SpeculationOptions, num_sublayers: int) -> Self:
        """Return the selector of a saved plan. It starts from the option's threshold, or else from the plan's."""
        first = saved.threshold if options.draft_threshold is None else options.draft_threshold
        return cls(
            saved.plan(max_draft_tokens=options.max_draft_tokens, source="self-sd"),
            DraftThreshold(FIRST_THRESHOLD if first is None else first, target=TARGET_ACCEPTANCE),
            acceptance=saved.acceptance,
            expected_tpt=saved.tokens_per_s,
            plain_tpt=saved.plain_tokens_per_s,
        )

    def plan(self, state: BatchState) -> Plan:
        return self._plan

    def keep_drafting(self, state: BatchState) -> KeepDrafting | None:
        return DraftWhileSure(threshold=self.threshold.value)

    def observe(self, state: BatchState, plan: Plan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        if self.record is None:
            self.record = self._new_record(state)
        if plan is self._plan:
            tested = Tested.of(plan, result)
            tested.add_to(self.record, num_tokens, seconds * state.batch)
            self.threshold.observe(
                num_accepted=tested.num_accepted, num_drafted=tested.num_drafted, reached_length=tested.reached_length
            )

    def improve(self, state: BatchState, search: Search) -> PlanRecord | None:
        """Return the plan's record once, after the first observed round; otherwise None."""
        if self._told:
            return None
        self._told = self.record is not None
        return self.record

    def _new_record(self, state: BatchState) -> PlanRecord:
        return PlanRecord(
            elapsed_s=state.elapsed_s,
            context=state.context,
            batch=state.batch,
            plan=self._plan,
            reason=self._reason,
            estimated_acceptance=self._acceptance,
            predicted_tpt=self._expected_tpt,
            plain_tpt=self._plain_tpt,
            optimise_s=0.0,
        )
