"""The value of looked-up tokens: how often they are right, and how many of them to verify."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import itemgetter, mul

import msgspec
import numpy as np
from numpy.typing import NDArray

from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.learning import TEXT_HALF_LIFE, Discounted

# Support of a looked-up token by other places in the text that follow the same tokens: some of these continue with
# another token, there are no such places, or all continue with this token.
AMBIGUOUS, SINGLE, UNANIMOUS = range(3)
# Numbers of matched tokens at which a class begins; and the prior acceptance of each class, here with SINGLE support.
_LENGTHS = (0, 2, 3, 4, 5, 6, 8, 11, 16, 24)
_LENGTH_CLASSES = tuple(bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1))
_SINGLE = tuple(max(length, 1) / (max(length, 1) + 2) for length in _LENGTHS)
_COPIED = (*(right / 2 for right in _SINGLE), *_SINGLE, *((1 + right) / 2 for right in _SINGLE))
# Where a copied token comes from: the sequence's own text, or a corpus of other texts, which are less often alike.
OWN_TEXT, CORPUS = range(2)
_NUM_COPIED = 2 * len(_COPIED)
# Probabilities of a recycled token at which a class begins; and the prior acceptance of each class: after a token, and
# after a pair of tokens, where the target's probabilities say more.
_PROBABILITIES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_RECYCLED = (*(0.02 + 0.3 * one for one in _PROBABILITIES), *(0.02 + 0.6 * one for one in _PROBABILITIES))
UNVERIFIED = _NUM_COPIED + len(_RECYCLED)  # the class of a successor in a prompt
FORCED = UNVERIFIED + 1  # the class of a token that the form of the output forces
_PRIORS = (*_COPIED, *(right / 2 for right in _COPIED), *_RECYCLED, 0.15, 0.95)


def match_classes(num_matched: int, supports: Sequence[int], source: int = OWN_TEXT) -> tuple[int, ...]:
    """Return the class of each looked-up token of a copy, by the number of matching tokens before it, its support
    (AMBIGUOUS, SINGLE or UNANIMOUS) and the copy's source (OWN_TEXT or CORPUS). num_matched: before the first token."""
    lengths = itertools.chain(_LENGTH_CLASSES[num_matched:], itertools.repeat(len(_LENGTHS) - 1))
    first = source * len(_COPIED)
    return tuple(first + support * len(_LENGTHS) + length for support, length in zip(supports, lengths, strict=False))


def recycled_classes(probabilities: NDArray[np.float64], *, is_pair: bool) -> NDArray[np.int64]:
    """Return the classes of recycled tokens, by their probabilities when their place was last verified. is_pair:
    whether that place followed the same two tokens, or only the same token."""
    first = _NUM_COPIED + (len(_PROBABILITIES) if is_pair else 0)
    return first - 1 + np.searchsorted(_PROBABILITIES, probabilities, side="right")


def source_of(match_class: int) -> str:
    """Return the name of a class's source."""
    if match_class == FORCED:
        return "form"
    return ("own text", "corpus")[match_class // len(_COPIED)] if match_class < _NUM_COPIED else "recycled"


class LookupRecord:
    """Acceptance of a looked-up token by its class: how many tokens match before it, and whether other places in the
    text continue differently (as suffix decoding counts, Oliaro et al. 2024). Each accepted token adds one match, so a
    proposal passes through the classes. The classes separate text copied by the word from text copied by the page.

    Every round compares the proposal with the committed tokens, even if the proposal was not the draft. So acceptance
    is learned without trials.
    """

    def __init__(self) -> None:
        self._classes = [Discounted(TEXT_HALF_LIFE, prior=prior, strength=1) for prior in _PRIORS]
        self._by_class: tuple[float, ...] = ()  # empty since the last observation

    @property
    def by_class(self) -> tuple[float, ...]:
        """Acceptance of each class."""
        if not self._by_class:
            self._by_class = tuple(one.value for one in self._classes)
        return self._by_class

    def observe_one(self, match_class: int, is_right: bool) -> None:
        self._classes[match_class].observe(is_right)
        self._by_class = ()

    def observe(self, match_classes: Sequence[int], proposed: Sequence[int], committed: Sequence[int]) -> None:
        """Compare a proposal with the committed tokens, up to the first difference or the end of the shorter.

        match_classes: class of each proposed token.
        """
        for at, one, other in zip(match_classes, proposed, committed, strict=False):
            self.observe_one(at, one == other)
            if one != other:
                return


def survival(by_class: Sequence[float], match_classes: Sequence[int]) -> list[float]:
    """Return for each looked-up token the probability that it and all looked-up tokens before it are right."""
    return list(accumulate((by_class[one] for one in match_classes), mul))


def best_lookup(
    survivals: Sequence[Sequence[float]], seconds: Callable[[Sequence[int]], float], *, committed_without: float = 1.0
) -> tuple[tuple[int, ...], float]:
    """Return how many looked-up tokens of each sequence to verify for the most tokens per second, and that rate: the
    likeliest tokens of the batch, a power of two of them or all. As survival falls, these are the first of a sequence.

    survivals: `survival` of each sequence's looked-up tokens; at least one is not empty. seconds: function from the
    number of verified tokens of each sequence to the seconds of the round. committed_without: expected tokens of a
    sequence without verified tokens.
    """
    batch, chances = len(survivals), np.array(list(itertools.chain(*survivals)))
    order = np.argsort(-chances, kind="stable")
    likeliest, owners = chances[order], np.repeat(np.arange(batch), [len(one) for one in survivals])[order]
    sums, most = likeliest.cumsum(), len(chances)
    rounds = []
    for number in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        last = int((-likeliest).searchsorted(-likeliest[number - 1], side="right"))  # with all that are as likely
        lengths = tuple(np.bincount(owners[:last], minlength=batch).tolist())
        num_without = lengths.count(0)
        committed = batch - num_without + float(sums[last - 1]) + committed_without * num_without
        rounds.append((lengths, committed / seconds(lengths)))
    return max(rounds, key=itemgetter(1))


class DraftUntilFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A serializable rule for drafts that may continue with looked-up tokens. It can be sent where drafts are made.

    worth: whether the model drafts one more token if no looked-up tokens are taken. by_class: see `LookupRecord`.
    min_survival: the probability above which a looked-up token is worth its row in the verify. drafting_gain: speed of
    drafting over that of plain decoding.
    """

    worth: DraftWhileWorth
    by_class: tuple[float, ...]
    min_survival: float
    drafting_gain: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """Return for each sequence whether it drafts one more token. confidences: of its drafted tokens so far."""
        return self.worth(confidences)

    def num_looked_up(self, sound: float, match_classes: Sequence[int]) -> int:
        """Return how many looked-up tokens, of these classes, complete a draft; 0: the model continues to draft. sound:
        the probability that all its tokens are accepted.

        At a rate of r tokens per second, a correct draft adds r times the seconds of a verify, minus the one token that
        comes without a draft. If a verify takes as long as a plain step, that is the gain minus 1. Looked-up tokens
        must add more: the number of tokens that they are expected to add, minus the cost of their rows.
        """
        reached = [sound * one for one in survival(self.by_class, match_classes)]
        taken = list(takewhile(lambda one: one > self.min_survival, reached))
        earned = sum(taken) - self.min_survival * len(taken)
        return len(taken) if earned > sound * (self.drafting_gain - 1) else 0
