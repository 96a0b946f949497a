"""Self-SD (Draft & Verify): a plan found offline, and drafts that end below a confidence which follows the acceptance
(Zhang et al., 2024). The plan is a saved plan; see `strategies.tuning`.
"""

from __future__ import annotations

from typing_extensions import Self

from rayspec.config import SpeculationOptions
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.periodic import ALWAYS_DRAFTS, Tested
from rayspec.strategies.saved_plans import SavedPlan
from rayspec.types import PlanRecord

# Values of the published code and runs.
FIRST_THRESHOLD = 0.6
TARGET_ACCEPTANCE = 0.9
_MATCHED_MEMORY = 0.5
_THRESHOLD_MEMORY = 0.9
_STEP = 0.01


class DraftThreshold:
    """The confidence below which a draft ends. It rises while the accepted share of the drafted tokens is below
    TARGET_ACCEPTANCE; else it falls, or stays if drafts reach their length. It changes by at most 0.001 per verify."""

    def __init__(self, value: float, *, adaptive: bool = True) -> None:
        self.value = value
        self._adaptive = adaptive
        self._matched = 0.0  # accepted share of the drafted tokens, moving average over verifies

    def observe(self, tested: Tested) -> None:
        """Adapt the threshold after a verify."""
        if not self._adaptive or tested.num_drafted == 0:
            return
        share = tested.num_accepted / tested.num_drafted
        self._matched = _MATCHED_MEMORY * self._matched + (1 - _MATCHED_MEMORY) * share
        if self._matched < TARGET_ACCEPTANCE:
            wanted = self.value + _STEP
        else:
            wanted = self.value if tested.reached_length else self.value - _STEP
        self.value = min(max(_THRESHOLD_MEMORY * self.value + (1 - _THRESHOLD_MEMORY) * wanted, 0.0), 1.0)


class SelfSD:
    """One plan in all rounds. The threshold of its drafts is kept across requests. record: of the plan, to which its
    rounds are added; its context and batch become those of the first observed round."""

    status = ALWAYS_DRAFTS

    def __init__(self, record: PlanRecord, threshold: DraftThreshold) -> None:
        self.record, self.threshold = record, threshold
        self._has_begun = self._was_reported = False

    @classmethod
    def of(cls, saved: SavedPlan, options: SpeculationOptions) -> Self:
        """Draft by a saved plan. The threshold starts from the option's, or else from the plan's own."""
        first = saved.threshold if options.draft_threshold is None else options.draft_threshold
        record = saved.record(options.max_draft_tokens, source="self-sd", reason="a saved plan")
        return cls(record, DraftThreshold(FIRST_THRESHOLD if first is None else first))

    def choose(self, state: BatchState) -> RoundPlan:
        return RoundPlan(plan=self.record.plan, keep_drafting=DraftWhileSure(threshold=self.threshold.value))

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.record.elapsed_s, self.record.context, self.record.batch = state.elapsed_s, state.context, state.batch
        if chosen.plan is self.record.plan:
            tested = Tested.of(chosen.plan, result)
            tested.add_to(self.record, num_tokens, seconds * state.batch)
            self.threshold.observe(tested)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Return the plan's record once, after the first observed round; otherwise None."""
        if self._was_reported or not self._has_begun:
            return None
        self._was_reported = True
        return self.record
