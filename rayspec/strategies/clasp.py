"""CLaSp: skip whole layers, chosen at a fixed interval of tokens to change the newest token least (Chen et al.).

As published: the exact recurrence over layers and numbers of skipped layers; the draft that skips a fixed
number; searches at a fixed interval; drafts that end below a fixed confidence. Ours: in a batch, the newest token of
one sequence decides for all; the search time is recorded, but not limited by `optimise_share`.
"""

from __future__ import annotations

from rayspec.choices import FULL
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, LayerKnapsack
from rayspec.decode.strategy import BatchState
from rayspec.planning.acceptance import estimated_acceptance
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.periodic import PeriodicStrategy
from rayspec.types import PlanRecord

# Published values.
_INTERVAL = 128  # tokens of a sequence between two searches


class CLaSp(PeriodicStrategy):
    source = "clasp"

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        threshold = 0.7 if options.draft_threshold is None else options.draft_threshold
        super().__init__(latency, interval=options.search_interval or _INTERVAL, threshold=threshold)
        self._num_skipped = max(1, len(latency.sublayers) // 2 // 2)  # layers, of the published 40 to 60 %
        self._max_draft_tokens = options.max_draft_tokens

    def _question(self, state: BatchState) -> LayerKnapsack:
        return LayerKnapsack(num_tokens=1, num_skipped=self._num_skipped)

    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        assert isinstance(answer, Found)
        chosen = min(answer.drafts, key=lambda draft: draft.choices.count(FULL))
        return self.take(
            state,
            self._latency,
            chosen.choices,
            self._max_draft_tokens,
            acceptance=estimated_acceptance(chosen.similarity, chosen.num_agreed, answer.num_tokens),
            reason="its interval is over",
            optimise_s=answer.seconds,
        )
