"""ASD: drafts without the attention sublayers that change the hidden states little (Draft on the fly, 2024).

As published: only attention sublayers are skipped. A sublayer is skipped if the cosine of the hidden states before and
after it exceeds a threshold. Drafts end below a confidence that follows the acceptance, as in Self-SD, and the draft is
derived from the text being generated. The authors name two further rules without details; they are not implemented.
Ours: the threshold; the cosine is the mean over the newest captured tokens and is measured again at an interval.
"""

from __future__ import annotations

from rayspec.choices import SKIP, choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Cosine, Values
from rayspec.decode.strategy import BatchState
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.periodic import TARGET_ACCEPTANCE, PeriodicStrategy
from rayspec.strategies.self_sd import FIRST_THRESHOLD
from rayspec.types import PlanRecord

_INTERVAL = 64  # tokens of a sequence between two searches: our value
_SIMILAR = 0.95  # cosine of the hidden states before and after an attention sublayer that is skipped: our value


class ASD(PeriodicStrategy):
    """It does not draft while no attention exceeds the threshold."""

    source = "asd"

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        first = FIRST_THRESHOLD if options.draft_threshold is None else options.draft_threshold
        super().__init__(latency, interval=options.search_interval or _INTERVAL, threshold=first, adapts=True)
        self._options = options
        self._is_attention = [name.startswith("attention") for name in latency.sublayers]

    def _question(self, state: BatchState) -> Cosine:
        return Cosine(num_tokens=self._options.num_tap_tokens)

    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        assert isinstance(answer, Values)
        cosines = zip(self._is_attention, answer.values, strict=True)
        choices = choices_of([not (attention and cosine > _SIMILAR) for attention, cosine in cosines])
        if choices == self._plan.choices:
            return None
        return self.take(
            state,
            self._latency,
            choices,
            self._options.max_draft_tokens,
            acceptance=TARGET_ACCEPTANCE,
            reason=f"{choices.count(SKIP)} attention sublayers change the states little",
            optimise_s=answer.seconds,
        )
