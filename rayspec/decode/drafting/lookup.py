"""Drafts looked up in the sequence's own text: what followed the last time its newest tokens stood there.

Prompt lookup (Saxena 2023) with the longest match instead of the first: summaries and extractions copy, and a longer
match is more often the place that is being copied from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.config import SpeculationOptions
from rayspec.planning.lookup import AMBIGUOUS, SINGLE, UNANIMOUS, match_class

_MAX_PLACES = 8  # of one n-gram that are compared: the latest
_LONGEST_MATCH = 32  # tokens that are compared
_COMPARABLE = 0.5  # of the longest match, that others must have to speak for it or against it
# Tokens that must match where what a match is worth is learned, and no number of them given.
SHORTEST_MATCH = 1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next, and the class of each (`planning.lookup.match_class`). Both empty if nothing was
    found."""

    token_ids: tuple[int, ...] = ()
    match_classes: tuple[int, ...] = ()


NOTHING = Proposal()


class LookupIndex:
    """Where each n-gram of a growing text has ended. Costs the same for every token, however long the text is.

    ngram: tokens that must match; shortest: that will do where so many do not.
    """

    def __init__(self, ngram: int, shortest: int | None = None) -> None:
        self._token_ids: list[int] = []
        self._num_indexed = 0
        lengths = range(ngram, (shortest or ngram) - 1, -1)
        # Of each length of n-grams, the longest first: n-gram -> how many tokens come up to its end.
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {length: {} for length in lengths}

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """The whole text so far, which begins with what it was before."""
        text = self._token_ids
        text.extend(token_ids[len(text) :])
        for length, ends_of in self._ends.items():
            for end in range(max(self._num_indexed, length), len(text)):
                ends = ends_of.setdefault(tuple(text[end - length : end]), [])
                ends.append(end)
                del ends[:-_MAX_PLACES]
        self._num_indexed = len(text)

    def propose(self, num_tokens: int, drafted: Sequence[int] = ()) -> Proposal:
        """At most so many tokens, from the place with the longest match; of equals from the latest. drafted: tokens
        that go on the text for the moment, and are not looked for."""
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
        """Of each token, what followed at the other places that have gone on as it does so far."""
        text, supports = self._token_ids, []
        for at, token in enumerate(token_ids):
            others = [place for place in others if place + at < len(text)]
            same = [place for place in others if text[place + at] == token]
            supports.append(SINGLE if not others else UNANIMOUS if len(same) == len(others) else AMBIGUOUS)
            others = same
        return supports

    def _matched(self, end: int, length: int) -> int:
        """How many tokens before `end` are the newest ones of the text, which `length` are."""
        text = self._token_ids
        longest = min(end, _LONGEST_MATCH)
        while length < longest and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def _continued(self, end: int, num_tokens: int) -> list[int]:
        """What follows `end`; where the text ends meanwhile, it goes on as it repeats itself."""
        text, period = self._token_ids, len(self._token_ids) - end
        return [text[end + index % period] for index in range(num_tokens)]


def shortest_match(options: SpeculationOptions) -> int | None:
    """Tokens that will do where so many as `lookup_ngram` do not match; None: there must be so many."""
    return SHORTEST_MATCH if options.strategy == "auto" else None
