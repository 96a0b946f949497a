"""Drafts looked up in the sequence's own text: the tokens that followed an earlier occurrence of its newest tokens.

Prompt lookup (Saxena 2023) with the longest match instead of the first: summaries and extractions copy, and the longest
match is more often the source of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.config import SpeculationOptions
from rayspec.planning.lookup import AMBIGUOUS, SINGLE, UNANIMOUS, match_class

_MAX_PLACES = 8  # the latest occurrences of an n-gram, which are compared
_LONGEST_MATCH = 32  # tokens that are compared at most
_COMPARABLE = 0.5  # share of the longest match that other places must match to count as support
# Tokens that must match in `auto`, which learns the acceptance for each length of match.
SHORTEST_MATCH = 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next, and the class of each (`planning.lookup.match_class`). Both are empty without a
    match."""

    token_ids: tuple[int, ...] = ()
    match_classes: tuple[int, ...] = ()


NOTHING = Proposal()


class LookupIndex:
    """The ends of each n-gram in a growing text. The cost per token does not depend on the length of the text.

    ngram: tokens that must match. shortest: tokens that suffice if no match is that long.
    """

    def __init__(self, ngram: int, shortest: int | None = None) -> None:
        self._token_ids: list[int] = []
        self._num_indexed = 0
        lengths = range(ngram, (shortest or ngram) - 1, -1)
        # For each length of n-grams, the longest first: n-gram -> positions after its end.
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {length: {} for length in lengths}

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Extend the text. token_ids: the whole text so far, which begins with the text of the previous call."""
        text = self._token_ids
        text.extend(token_ids[len(text) :])
        for length, ends_of in self._ends.items():
            for end in range(max(self._num_indexed, length), len(text)):
                ends = ends_of.setdefault(tuple(text[end - length : end]), [])
                ends.append(end)
                del ends[:-_MAX_PLACES]
        self._num_indexed = len(text)

    def propose(self, num_tokens: int, drafted: Sequence[int] = ()) -> Proposal:
        """Propose at most `num_tokens` tokens from the place with the longest match; of equal matches, from the latest.

        drafted: tokens that follow the text for this call only. They are not indexed.
        """
        num_committed = len(self._token_ids)
        self._token_ids.extend(drafted)
        try:
            return self._proposed(num_tokens)
        finally:
            del self._token_ids[num_committed:]

    def _proposed(self, num_tokens: int) -> Proposal:
        text = self._token_ids
        if num_tokens > 0:
            for length, ends_of in self._ends.items():
                if places := ends_of.get(tuple(text[len(text) - length :])):
                    found = sorted((self._matched(place, length), place) for place in places)
                    num_matched, end = found.pop()
                    others = [place for count, place in found if count >= _COMPARABLE * num_matched]
                    token_ids = self._continued(end, num_tokens)
                    supports = self._supports(token_ids, others)
                    match_classes = [match_class(num_matched + at, support) for at, support in enumerate(supports)]
                    return Proposal(tuple(token_ids), tuple(match_classes))
        return NOTHING

    def _supports(self, token_ids: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the support of each token by the other places, as long as these continue like the proposal."""
        text, supports = self._token_ids, []
        for at, token in enumerate(token_ids):
            others = [place for place in others if place + at < len(text)]
            same = [place for place in others if text[place + at] == token]
            supports.append(SINGLE if not others else UNANIMOUS if len(same) == len(others) else AMBIGUOUS)
            others = same
        return supports

    def _matched(self, end: int, length: int) -> int:
        """Return how many tokens before `end` equal the newest tokens of the text, at least `length`."""
        text = self._token_ids
        longest = min(end, _LONGEST_MATCH)
        while length < longest and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def _continued(self, end: int, num_tokens: int) -> list[int]:
        """Return the tokens that follow `end`. At the end of the text, continue periodically from `end` again."""
        text, period = self._token_ids, len(self._token_ids) - end
        return [text[end + index % period] for index in range(num_tokens)]


def shortest_match(options: SpeculationOptions) -> int | None:
    """Return the number of tokens that suffice if `lookup_ngram` tokens do not match; None: fewer do not suffice."""
    return SHORTEST_MATCH if options.strategy == "auto" else None
