"""Questions about recently tapped tokens: which drafts would have been right, and what the target's states are.

A tap is a token's hidden states at all sublayer boundaries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choice, Choices
from rayspec.planning.knapsack import Expansion, follow, solve

_SUBLAYERS = 2  # sublayers per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Knapsack:
    """Asks which drafts are most similar to the target. The fields are arguments of `knapsack.solve`. also: further
    drafts to try in any case. Answered by Found."""

    num_tokens: int
    savings: Sequence[Mapping[Choice, int]]
    max_saved: int
    min_similarity: float
    max_states: int
    also: Sequence[Choices] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKnapsack:
    """Asks for the most similar draft that skips n whole layers, for each n up to `num_skipped`: exactly the recurrence
    of CLaSp. Answered by Found, whose first draft skips nothing."""

    num_tokens: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Asks how drafts with these sublayer choices would have done. Answered by Found, in the order of `patterns`."""

    num_tokens: int
    patterns: Sequence[Choices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Asks for the cosine between the target's states before and after each sublayer. Answered by Cosines."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Asks for a vector that describes the text: the mean of the target's last states. Answered by Features."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft of one token after each tapped token. similarity: mean cosine between its last states and the target's.
    num_agreed: number of tapped tokens after which its most likely token equals the target's. confidence: its mean
    top-1 probability after these tokens; missed_confidence: after the other tokens; None if there are no such
    tokens."""

    choices: tuple[Choice, ...]
    similarity: float
    num_agreed: int
    confidence: float | None = None
    missed_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Drafts judged on `num_tokens` tapped tokens. seconds: time that the answer took."""

    drafts: Sequence[FoundDraft]
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cosines:
    """cosines: for each sublayer, the cosine between the target's states before and after it, a mean over the
    tokens."""

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
    """Agreement of draft states with the target, [num_states] each. num_agreed: number of the `num_tokens` tapped
    tokens after which the most likely next token equals the target's. confidence, missed_confidence: sum of the state's
    top-1 probabilities after these tokens, and after the others."""

    num_tokens: int
    num_agreed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    missed_confidence: NDArray[np.float64]


class TappedStates(Expansion, Protocol):
    """The states of tapped tokens, on one process or on several. One state is the hidden states of all tokens."""

    def agreement(self, states: Any) -> Agreement:
        """Return the agreement of each terminal state with the target, [num_states]."""

    def cosines(self) -> Sequence[float]:
        """Return, for each sublayer, the mean cosine between the target's states before and after it."""

    def feature(self) -> Sequence[float]:
        """Return the mean of the target's states after the final norm, [hidden_size]."""


def answer(question: Question, tapped: TappedStates, *, num_sublayers: int, started: float) -> Answer:
    """Answer a question. tapped: the states of `question.num_tokens` tokens. started: start time by
    `time.perf_counter`.

    Raises ValueError if the question does not match the model's sublayers.
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
    """Return a FoundDraft for each terminal state. All arguments have one item per pattern."""
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
    """An `Expansion` with whole layers as its items, instead of sublayers."""

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

    def keep(self, batches: Sequence[Any]) -> None:
        self._tapped.keep(batches)
