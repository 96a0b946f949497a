"""What looked-up tokens are worth: how often they are right, and how many of them to verify."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayspec.planning.acceptance import expected_tokens

# Matched tokens at which a class begins, and what is expected of it before anything was seen.
_CLASSES = (0, 4, 6, 10, 16)
_PRIORS = (0.5, 0.6, 0.7, 0.8, 0.9)
_PRIOR_TOKENS = 4.0
_HALF_LIFE = 256.0  # tested tokens


class LookupRecord:
    """Acceptance of looked-up tokens by how many tokens matched where they were found.

    What was proposed can be held against what was committed in every round, whether it was the draft or not: so nothing
    has to be tried in order to be known.
    """

    def __init__(self) -> None:
        self._agreed = [0.0] * len(_CLASSES)
        self._tested = [0.0] * len(_CLASSES)

    def acceptance(self, num_matched: int) -> float:
        """Of a token, given that those before it were right."""
        at = _class_of(num_matched)
        return (self._agreed[at] + _PRIOR_TOKENS * _PRIORS[at]) / (self._tested[at] + _PRIOR_TOKENS)

    def observe(self, num_matched: int, proposed: Sequence[int], committed: Sequence[int]) -> None:
        """proposed: what was looked up. committed: what came instead, as far as is known."""
        pairs = list(zip(proposed, committed, strict=False))
        num_agreed = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        num_tested = min(num_agreed + 1, len(pairs))
        at = _class_of(num_matched)
        fade = 0.5 ** (num_tested / _HALF_LIFE)
        self._agreed[at] = self._agreed[at] * fade + num_agreed
        self._tested[at] = self._tested[at] * fade + num_tested


def _class_of(num_matched: int) -> int:
    return bisect_right(_CLASSES, num_matched) - 1


@dataclass(frozen=True, slots=True)
class Verified:
    """A round that verifies what was looked up, at most `num_tokens` a sequence: what it commits and takes."""

    num_tokens: int
    committed: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.committed / self.seconds


def best_lookup(
    acceptance: Sequence[float],
    available: Sequence[int],
    seconds: Callable[[Sequence[int]], float],
    *,
    num_tokens_beside: float = 0.0,
) -> Verified:
    """How many looked-up tokens to verify for the most tokens per second, the powers of two being tried.

    acceptance, available: of each sequence, its acceptance and how many tokens were found. seconds: of a round that
    verifies so many for each. num_tokens_beside: what else the round commits.
    """
    longest = max(available)
    lengths = sorted({min(2**power, longest) for power in range(longest.bit_length() + 1)})
    rounds = []
    for length in lengths:
        taken = [min(length, found) for found in available]
        committed = float(expected_tokens(acceptance, taken).sum()) + num_tokens_beside
        rounds.append(Verified(length, committed, seconds(taken)))
    return max(rounds, key=lambda one: one.rate)
