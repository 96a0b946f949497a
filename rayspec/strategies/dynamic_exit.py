"""DEL: the exit layer and length of drafts, chosen by how well recent tokens are predicted at each layer (Zarch et al.,
2025).

As published: every round compares one-token drafts that exit at each layer with the target. Matches and confidences
fade with a memory. A draft ends below the midpoint between the mean confidences of its layer's matches and misses.

Ours: layer and length maximise the tokens per second by measured times, where the paper counts layers. Only the newest
token of each sequence is compared with the target, because its states are kept. Before the first draft several tokens
are collected, where the paper uses the end of the prompt. While a layer has no matches or no misses, drafts end at
their length only. A round whose tokens are compared verifies all rows through all layers, where the paper's verify
continues from the exit. With a `search_interval` above 1, most rounds also continue from the exit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import Choices, choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, FoundDraft, Trial
from rayspec.decode.strategy import BatchState
from rayspec.planning.acceptance import DraftRates
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.periodic import PeriodicStrategy
from rayspec.types import ConfigError, PlanRecord


class ExitRecord:
    """Acceptance and confidences of one-token drafts at each exit. Each observation scales old ones by `memory`."""

    def __init__(self, num_exits: int, *, memory: float) -> None:
        self._memory = memory
        self._num_tokens = 0.0
        # Of matches and of misses, by exit: their number, and the sum of their confidences.
        self._matched, self._missed = (np.zeros((2, num_exits)) for _ in range(2))

    def observe(self, drafts: Sequence[FoundDraft], num_tokens: int) -> None:
        """Record a comparison over `num_tokens` tokens. drafts: one for each exit."""
        agreed = np.asarray([one.num_agreed for one in drafts])
        confidence = np.asarray([[one.confidence or 0.0, one.missed_confidence or 0.0] for one in drafts]).T
        self._num_tokens = self._num_tokens * self._memory + num_tokens
        self._matched = self._matched * self._memory + np.stack([agreed, agreed * confidence[0]])
        missed = num_tokens - agreed
        self._missed = self._missed * self._memory + np.stack([missed, missed * confidence[1]])

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """Acceptance at each exit, [num_exits]; valid only after the first `observe`."""
        return np.asarray(self._matched[0] / self._num_tokens)

    def threshold(self, index: int) -> float | None:
        """Return the confidence that separates the matches of an exit from its misses; None before there are both."""
        matched, missed = self._matched[:, index], self._missed[:, index]
        has_both = matched[0] > 0 and missed[0] > 0
        return float(matched[1] / matched[0] + missed[1] / missed[0]) / 2 if has_both else None


class DEL(PeriodicStrategy):
    """It does not draft while no exit is predicted to be faster. Raises ConfigError for a model of one layer."""

    source = "del"

    def __init__(self, options: SpeculationOptions, latency: LatencyModel) -> None:
        interval = options.search_interval or 1  # every round, as published
        super().__init__(latency, interval=interval)
        num_sublayers = len(latency.sublayers)
        self._exits = early_exits(num_sublayers)
        if not self._exits:
            raise ConfigError("strategy 'del' needs a model of 2 layers or more: choose another strategy")
        self._num_first_tokens = options.num_tap_tokens
        self._max_draft_tokens = options.max_draft_tokens
        self._reuse_prefix = interval > 1  # rounds that capture run all rows through all sublayers
        # weight of what was known before, at each comparison; the published value
        self._exit_record = ExitRecord(len(self._exits), memory=0.95)
        self._num_looks = 0

    def _question(self, state: BatchState) -> Trial:
        most = self._num_first_tokens
        num_tokens = min(state.batch, most) if self._num_looks else most
        return Trial(num_tokens=num_tokens, patterns=self._exits)

    def _decide(self, state: BatchState, answer: Answer) -> PlanRecord | None:
        assert isinstance(answer, Found)
        self._num_looks += 1
        self._exit_record.observe(answer.drafts, answer.num_tokens)
        rates = DraftRates(
            latency=self._latency,
            context=state.context,
            batch=state.batch,
            max_draft_tokens=self._max_draft_tokens,
            reuse_prefix=self._reuse_prefix,
        )
        best = rates.best_choice(self._exits, self._exit_record.acceptance)
        index, length = (0, 0) if best.candidate is None else (best.candidate, best.num_draft_tokens)
        self.threshold = self._exit_record.threshold(index) if length else None
        choices, current = self._exits[index], self._plan
        if length == current.num_draft_tokens and (length == 0 or choices == current.choices):
            return None
        return self.take(
            state,
            self._latency,
            choices,
            length,
            acceptance=float(self._exit_record.acceptance[index]),
            reason=f"{length} tokens from layer {index + 1} are predicted fastest"
            if length
            else "no exit is predicted to pay",
            optimise_s=answer.seconds,
            reuse_prefix=self._reuse_prefix,
        )


def early_exits(num_sublayers: int) -> list[Choices]:
    """Return the drafts that exit after layer 1, 2, ... up to the last layer but one."""
    return [choices_of([index < end for index in range(num_sublayers)]) for end in range(2, num_sublayers, 2)]
