"""What can be asked of recently tapped tokens: which drafts would have been right, and what the target's states are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choice, Choices
from rayspec.planning.knapsack import Expansion, follow, solve

_SUBLAYERS = 2  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """Which drafts are most similar to the target: `knapsack.solve`'s arguments. also: drafts that are tried in any
    case. Answered by Found."""

    num_tokens: int
    savings: Sequence[Mapping[Choice, int]]
    max_saved: int
    min_similarity: float
    max_states: int
    also: Sequence[Choices] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKnapsack:
    """For each number of whole layers up to `num_skipped`, the most similar draft that skips so many: the recurrence of
    CLaSp, exactly. Answered by Found, from the draft that skips nothing on."""

    num_tokens: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How drafts by these choices of the sublayers would have done. Answered by Found, in the order of `patterns`."""

    num_tokens: int
    patterns: Sequence[Choices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """The cosine of the target's states before and after each sublayer. Answered by Cosines."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What the tokens are about: the mean of the target's last states. Answered by Features."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft of one token after each tapped one. similarity: mean cosine of its last states to the target's.
    num_agreed: tokens after which its most likely token is the target's; confidence: its mean top-1 probability where
    it is, missed_confidence: where it is not; None if there are no such tokens."""

    choices: tuple[Choice, ...]
    similarity: float
    num_agreed: int
    confidence: float | None = None
    missed_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Drafts over `num_tokens` tokens, and the seconds it took to find out."""

    drafts: Sequence[FoundDraft]
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cosines:
    """cosines: of the target's states before and after each sublayer, the mean over the tokens."""

    cosines: Sequence[float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Features:
    """vector: [hidden_size], the mean over the tokens of the target's last states, after the final norm."""

    vector: Sequence[float]
    seconds: float


Question: TypeAlias = Knapsack | LayerKnapsack | Trial | Cosine | Feature
Answer: TypeAlias = Found | Cosines | Features


@dataclass(frozen=True, slots=True)
class Agreement:
    """After how many of the `num_tokens` tapped tokens a state's most likely next one is the target's, and the sums of
    its top-1 probabilities after those, and after the others; [num_states] each."""

    num_tokens: int
    num_agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    missed_confidence: NDArray[np.float64]


class TappedStates(Expansion, Protocol):
    """Tapped tokens that can be asked, wherever their states are. One state is the hidden states of them all."""

    def agreement(self, states: Any) -> Agreement:
        """Of each terminal state, [num_states]."""

    def cosines(self) -> Sequence[float]:
        """Of each sublayer, the mean cosine of the target's states before and after it."""

    def feature(self) -> Sequence[float]:
        """[hidden_size]: mean of the target's states after the final norm."""


def answer(question: Question, tapped: TappedStates, *, num_sublayers: int, started: float) -> Answer:
    """tapped: the states of `question.num_tokens` tokens. started: when the asking began, by `time.perf_counter`.

    Raises ValueError for a question about other sublayers than the model's.
    """
    match question:
        case Cosine():
            return Cosines(tapped.cosines(), time.perf_counter() - started)
        case Feature():
            return Features(tapped.feature(), time.perf_counter() - started)
        case Trial():
            drafts = _tried(question, tapped, num_sublayers)
        case LayerKnapsack():
            drafts = _found_by_layers(question, tapped, num_sublayers)
        case Knapsack():
            drafts = _found(question, tapped)
    return Found(drafts, question.num_tokens, time.perf_counter() - started)


def _found(question: Knapsack, tapped: TappedStates) -> list[FoundDraft]:
    solution = solve(
        question.savings,
        tapped,
        max_saved=question.max_saved,
        min_similarity=question.min_similarity,
        max_states=question.max_states,
    )
    patterns = [one.choices for one in solution.candidates]
    found = _judged(patterns, [one.similarity for one in solution.candidates], tapped.agreement(solution.states))
    others = [choices for choices in question.also if choices not in patterns]
    return [*found, *(_followed(others, tapped) if others else ())]


def _followed(patterns: Sequence[Choices], tapped: TappedStates) -> list[FoundDraft]:
    states = follow(patterns, tapped)
    similarity = tapped.similarity(len(patterns[0]) - 1, states)
    return _judged(patterns, similarity.tolist(), tapped.agreement(states))


def _found_by_layers(question: LayerKnapsack, tapped: TappedStates, num_sublayers: int) -> list[FoundDraft]:
    solution = solve(
        [{SKIP: 1}] * (num_sublayers // _SUBLAYERS),
        _Layers(tapped),
        max_saved=question.num_skipped,
        min_similarity=-np.inf,
        max_states=question.num_skipped + 1,
        band=None,
        drop_dominated=False,
    )
    patterns = [tuple(choice for choice in one.choices for _ in range(_SUBLAYERS)) for one in solution.candidates]
    return _judged(patterns, [one.similarity for one in solution.candidates], tapped.agreement(solution.states))


def _tried(question: Trial, tapped: TappedStates, num_sublayers: int) -> list[FoundDraft]:
    if any(len(pattern) != num_sublayers for pattern in question.patterns):
        raise ValueError(f"each of the patterns on trial needs {num_sublayers} choices, one for each sublayer")
    return _followed(question.patterns, tapped)


def _judged(patterns: Sequence[Choices], similarity: Sequence[float], agreement: Agreement) -> list[FoundDraft]:
    """Of terminal states, by index: all as many as `patterns`."""
    num_others = agreement.num_tokens - agreement.num_agreed
    return [
        FoundDraft(
            choices=tuple(pattern),
            similarity=similarity[index],
            num_agreed=int(agreement.num_agreed[index]),
            confidence=_mean(agreement.confidence[index], agreement.num_agreed[index]),
            missed_confidence=_mean(agreement.missed_confidence[index], num_others[index]),
        )
        for index, pattern in enumerate(patterns)
    ]


def _mean(total: float, count: int) -> float | None:
    return float(total / count) if count else None


class _Layers:
    """`Expansion` whose items are whole layers."""

    def __init__(self, tapped: TappedStates) -> None:
        self._tapped = tapped

    def start(self) -> Any:
        return self._tapped.start()

    def run(self, layer: int, choice: Choice, states: Any) -> Any:
        for sublayer in range(_SUBLAYERS * layer, _SUBLAYERS * (layer + 1)):
            states = self._tapped.run(sublayer, choice, states)
        return states

    def vary(self, layer: int, choice: Choice, states: Any) -> Any:
        raise NotImplementedError("whole layers run in full or not at all")

    def similarity(self, layer: int, states: Any) -> NDArray[np.float64]:
        return self._tapped.similarity(_SUBLAYERS * (layer + 1) - 1, states)

    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Any:
        return self._tapped.gather(batches, index)
