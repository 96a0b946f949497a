"""Drafts looked up in the sequence's own text: what followed the last time its newest tokens stood there.

Prompt lookup (Saxena 2023) with the longest match instead of the first: summaries and extractions copy, and a longer
match is more often the place that is being copied from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_PLACES = 8  # of one n-gram that are compared: the latest
_LONGEST_MATCH = 32  # tokens that are compared


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next, and how many of the newest tokens match where they were found. Neither if nothing was
    found."""

    token_ids: tuple[int, ...] = ()
    num_matched: int = 0


NOTHING = Proposal()


class LookupIndex:
    """Where each n-gram of a growing text has ended. Costs the same for every token, however long the text is."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._token_ids: list[int] = []
        self._num_indexed = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> how many tokens come up to its end

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """The whole text so far, which begins with what it was before."""
        self._token_ids.extend(token_ids[len(self._token_ids) :])
        for end in range(max(self._num_indexed, self._ngram), len(self._token_ids)):
            ends = self._ends.setdefault(tuple(self._token_ids[end - self._ngram : end]), [])
            ends.append(end)
            del ends[:-_MAX_PLACES]
        self._num_indexed = len(self._token_ids)

    def propose(self, num_tokens: int) -> Proposal:
        """At most so many tokens, from the place with the longest match; of equals from the latest."""
        text = self._token_ids
        newest = tuple(text[len(text) - self._ngram :])
        places = self._ends.get(newest, ()) if num_tokens > 0 else ()
        if not places:
            return NOTHING
        num_matched, end = max((self._matched(place), place) for place in places)
        return Proposal(tuple(self._continued(end, num_tokens)), num_matched)

    def _matched(self, end: int) -> int:
        """How many tokens before `end` are the newest ones of the text."""
        text, length = self._token_ids, self._ngram
        longest = min(end, _LONGEST_MATCH)
        while length < longest and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def _continued(self, end: int, num_tokens: int) -> list[int]:
        """What follows `end`; where the text ends meanwhile, it goes on as it repeats itself."""
        text, period = self._token_ids, len(self._token_ids) - end
        return [text[end + index % period] for index in range(num_tokens)]
