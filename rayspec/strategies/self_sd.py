"""Self-SD (Draft & Verify): a plan found offline, and drafts that end below a confidence which follows the acceptance
(Zhang et al., 2024). The plan is a saved plan; see `strategies.tuning`.
"""

from __future__ import annotations

from typing_extensions import Self

from rayspec.config import SpeculationOptions
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.strategies.periodic import PlanStrategy
from rayspec.strategies.saved_plans import SavedPlan
from rayspec.types import PlanRecord

FIRST_THRESHOLD = 0.6  # of the published code and runs


class SelfSD(PlanStrategy):
    """One plan in all rounds. The threshold of its drafts is kept across requests. record: of the plan, to which its
    rounds are added; its context and batch become those of the first observed round."""

    source = "self-sd"
    record: PlanRecord

    def __init__(self, record: PlanRecord, threshold: float, *, adapts: bool = True) -> None:
        super().__init__(record.plan, threshold=threshold, adapts=adapts)
        self.record = record
        self._has_begun = self._was_reported = False

    @classmethod
    def of(cls, saved: SavedPlan, options: SpeculationOptions) -> Self:
        """Draft by a saved plan. The threshold starts from the option's, or else from the plan's own."""
        first = saved.threshold if options.draft_threshold is None else options.draft_threshold
        record = saved.record(options.max_draft_tokens, source="self-sd", reason="a saved plan")
        return cls(record, FIRST_THRESHOLD if first is None else first)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.record.elapsed_s, self.record.context, self.record.batch = state.elapsed_s, state.context, state.batch
        super().observe(state, chosen, result, num_tokens, seconds)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        """Return the plan's record once, after the first observed round; otherwise None."""
        if self._was_reported or not self._has_begun:
            return None
        self._was_reported = True
        return self.record
