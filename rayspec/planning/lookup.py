"""What looked-up tokens are worth: how often they are right, and how many of them to verify."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul

import numpy as np

from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.constants import TEXT_HALF_LIFE
from rayspec.planning.discounted import Discounted

# What other places with the same tokens before them say of a token: some continue with another token, there are no
# others, or all continue with this token.
AMBIGUOUS, SINGLE, UNANIMOUS = range(3)
# Matched tokens at which a class begins; and what is expected of a token behind a match, alone, before there was any.
_LENGTHS = (0, 2, 3, 4, 5, 6, 8, 11, 16, 24)
_SINGLE = tuple(max(length, 1) / (max(length, 1) + 2) for length in _LENGTHS)
_PRIORS = (*(right / 2 for right in _SINGLE), *_SINGLE, *((1 + right) / 2 for right in _SINGLE))


def match_class(num_matched: int, support: int) -> int:
    """The class of a looked-up token: tokens that match before it, and AMBIGUOUS, SINGLE or UNANIMOUS."""
    return support * len(_LENGTHS) + bisect_right(_LENGTHS, num_matched) - 1


class LookupRecord:
    """Acceptance of a looked-up token by its class: how many tokens match before it, and whether the text has gone on
    otherwise elsewhere (as suffix decoding counts, Oliaro et al. 2024). After an accepted token one more matches, so a
    proposal passes through the classes: they separate text that is copied by the word from text copied by the page.

    What was proposed can be held against what was committed in every round, whether it was the draft or not: so nothing
    has to be tried in order to be known.
    """

    def __init__(self) -> None:
        self._classes = [Discounted(TEXT_HALF_LIFE, prior=prior, strength=1) for prior in _PRIORS]

    @property
    def by_class(self) -> tuple[float, ...]:
        """Acceptance of each class."""
        return tuple(one.value for one in self._classes)

    def observe(self, match_classes: Sequence[int], proposed: Sequence[int], committed: Sequence[int]) -> None:
        """proposed: the looked-up tokens, of these classes. committed: the tokens that came, as far as is known."""
        for at, one, other in zip(match_classes, proposed, committed, strict=False):
            self._classes[at].observe(one == other)
            if one != other:
                return


def survival(by_class: Sequence[float], match_classes: Sequence[int]) -> list[float]:
    """Of each looked-up token, the probability that it and all before it are right."""
    return list(accumulate((by_class[one] for one in match_classes), mul))


@dataclass(frozen=True, slots=True)
class Verified:
    """A round that verifies what was looked up, `lengths` tokens by sequence: what it commits and takes."""

    lengths: tuple[int, ...]
    committed: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.committed / self.seconds


def best_lookup(
    survivals: Sequence[Sequence[float]],
    seconds: Callable[[Sequence[int]], float],
    *,
    committed_without: float = 1.0,
) -> Verified:
    """Which looked-up tokens to verify for the most tokens per second: the likeliest of the batch, whose number is a
    power of two, or all. As survival falls, these are the first ones of each sequence.

    survivals: of each sequence, the `survival` of what was found; of one, at least, something was. seconds: of a round
    that verifies so many for each. committed_without: tokens of a sequence of which none are verified.
    """
    likeliest = sorted(itertools.chain(*survivals), reverse=True)
    numbers = {min(2**power, len(likeliest)) for power in range(len(likeliest).bit_length() + 1)}
    sums = [list(accumulate(one, initial=1.0)) for one in survivals]
    rounds = []
    for least in dict.fromkeys(likeliest[number - 1] for number in sorted(numbers)):
        lengths = tuple(sum(chance >= least for chance in one) for one in survivals)
        committed = [one[length] if length else committed_without for one, length in zip(sums, lengths, strict=True)]
        rounds.append(Verified(lengths, sum(committed), seconds(lengths)))
    return max(rounds, key=lambda one: one.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftUntilFound:
    """A rule for drafts that may go on with what followed their tokens earlier in the text. It can be sent to wherever
    drafts are made.

    worth: whether the model drafts one more token where nothing is taken. ngram: tokens that must match, `shortest`
    where so many do not. by_class: see `LookupRecord`. min_survival: with which a looked-up token is worth its row.
    drafting_gain: by how many times drafting is faster than plain decoding.
    """

    worth: DraftWhileWorth
    ngram: int
    shortest: int
    by_class: tuple[float, ...]
    min_survival: float
    drafting_gain: float

    def __call__(self, confidences: Sequence[Sequence[float]]) -> list[bool]:
        """confidences: of the tokens drafted so far, by sequence. Which sequences draft one more."""
        return self.worth(confidences)

    def num_looked_up(self, confidences: Sequence[float], match_classes: Sequence[int]) -> int:
        """How many looked-up tokens, of these classes, end a draft of these confidences; 0: the model drafts on.

        At a rate of r tokens per second, the tokens of a correct draft bring r times the seconds of a verification,
        less the one token that comes without a draft; in seconds of plain decoding that is the gain less one. Looked-up
        tokens must bring more: the number of tokens that they are expected to add, less the cost of their rows.
        """
        sound = float(np.prod(self.worth.curve.acceptance(confidences)))
        reached = [sound * one for one in survival(self.by_class, match_classes)]
        taken = list(takewhile(lambda one: one > self.min_survival, reached))
        earned = sum(taken) - self.min_survival * len(taken)
        return len(taken) if earned > sound * (self.drafting_gain - 1) else 0
