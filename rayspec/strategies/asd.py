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
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import KeepDrafting, RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.periodic import PeriodicStrategy, Tested
from rayspec.strategies.self_sd import TARGET_ACCEPTANCE, DraftThreshold
from rayspec.types import PlanRecord

_INTERVAL = 64  # tokens of a sequence between two searches: our value
_SIMILAR = 0.95  # cosine of the hidden states before and after an attention sublayer that is skipped: our value


class ASD(PeriodicStrategy):
    """It does not draft while no attention exceeds the threshold."""

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        super().__init__("asd", latency, interval=options.search_interval or _INTERVAL)
        self._options = options
        self._max_draft_tokens = options.max_draft_tokens
        self._is_attention = [name.startswith("attention") for name in latency.sublayers]
        first = 0.6 if options.draft_threshold is None else options.draft_threshold
        self._draft_threshold = DraftThreshold(first)

    def _rule(self) -> KeepDrafting:
        return DraftWhileSure(threshold=self._draft_threshold.value)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        super().observe(state, chosen, result, num_tokens, seconds)
        self._draft_threshold.observe(Tested.of(chosen.plan, result))

    def _question(self, state: BatchState) -> Cosine:
        return Cosine(num_tokens=self._options.num_tap_tokens)

    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        assert isinstance(answer, Values)
        cosines = zip(self._is_attention, answer.values, strict=True)
        choices = choices_of([not (attention and cosine > _SIMILAR) for attention, cosine in cosines])
        if choices == self._current.plan.choices:
            return None
        return self._current.take(
            state,
            choices,
            self._max_draft_tokens,
            acceptance=TARGET_ACCEPTANCE,
            reason=f"{choices.count(SKIP)} attention sublayers change the states little",
            optimise_s=answer.seconds,
        )
