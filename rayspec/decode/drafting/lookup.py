"""Drafts looked up in texts: the tokens that followed an earlier occurrence of a sequence's newest tokens.

Prompt lookup (Saxena 2023) with the longest match instead of the first: summaries and extractions copy, and the longest
match is more often the source of the copy. A corpus of finished outputs serves texts that share a template, as the
global tree of suffix decoding does (Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from rayspec.forms.grammar import Constraint
from rayspec.planning.lookup import AMBIGUOUS, OWN_TEXT, SINGLE, UNANIMOUS, match_classes

_MAX_PLACES = 8  # the latest occurrences of an n-gram, which are compared
_LONGEST_MATCH = 32  # tokens that are compared at most
_COMPARABLE = 0.5  # share of the longest match that other places must match to count as support
_MAX_UNSORTED = 512  # of each length
END_OF_TEXT = -1  # stands between the texts of an index of several; no copy goes beyond it
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may come next, and the class of each (`planning.lookup.match_classes`). Both are empty without any.

    parents: for each token, the row that it follows, see `RoundEntry`; empty for a chain. survival: the probability of
    each that it, and all that it follows, are right; falling. copied: the part that was copied, whole.
    """

    token_ids: tuple[int, ...] = ()
    match_classes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    copied: Proposal | None = None

    def cut_by(self, constraint: Constraint, drafted: Sequence[int] = ()) -> Proposal:
        """Return the proposal, a chain without survival, up to the first token that breaks the form of the output.
        drafted: tokens before it."""
        num_allowed = len(constraint.allowed([*drafted, *self.token_ids])) - len(drafted)
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[: max(0, num_allowed)],
            match_classes=self.match_classes[: max(0, num_allowed)],
        )

    def with_survival(self, chances: Sequence[float]) -> Proposal:
        return Proposal(self.token_ids, self.match_classes, self.parents, tuple(chances), self.copied)


NOTHING = Proposal()


class LookupIndex:
    """The ends of each n-gram in a growing text.

    ngram: tokens that must match. shortest: tokens that suffice if no match is that long. source: OWN_TEXT or CORPUS.
    """

    def __init__(self, ngram: int, shortest: int | None = None, *, source: int = OWN_TEXT) -> None:
        self.ngram, self.shortest, self._source = ngram, shortest, source
        self._token_ids = array("i")
        self._ends = [_Ends(length) for length in range(ngram, (shortest or ngram) - 1, -1)]  # the longest first

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return len(self._token_ids)

    def extend_to(self, token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """Extend the text to the first `num_tokens` of `token_ids`, by default to all. Each text begins with the text
        of the previous call. A text that is no longer than that changes nothing."""
        self.extend(token_ids[len(self._token_ids) : num_tokens])

    def extend(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        self._token_ids.extend(token_ids)
        for ends in self._ends:
            ends.extend(self._token_ids)

    def propose(self, num_tokens: int, drafted: Sequence[int] = ()) -> Proposal:
        """Propose at most `num_tokens` tokens that follow the text.

        drafted: tokens that follow the text for this call only. They are not indexed.
        """
        num_committed = len(self._token_ids)
        self._token_ids.extend(drafted)
        try:
            return self.propose_after(newest_of(self._token_ids, self.ngram), num_tokens)
        finally:
            del self._token_ids[num_committed:]

    def propose_after(self, newest: Sequence[int], num_tokens: int) -> Proposal:
        """Propose at most `num_tokens` tokens that follow the tokens `newest`, from the place with the longest match;
        of equal matches, from the latest. Newest tokens before the last `_LONGEST_MATCH` may be left out."""
        if num_tokens <= 0 or not self._token_ids:
            return NOTHING
        for ends in self._ends:
            found = sorted((self._matched(place, newest), place) for place in ends.of(newest[-ends.length :]))
            if found and found[-1][0] >= ends.length:
                num_matched, end = found.pop()
                needed = max(ends.length, _COMPARABLE * num_matched)
                others = [place for count, place in found if count >= needed]
                copied = self._token_ids[end : end + num_tokens]
                while len(copied) < num_tokens:  # at the end of the text, it continues from `end` again
                    copied += copied[: num_tokens - len(copied)]
                token_ids = tuple(copied[: copied.index(END_OF_TEXT)] if END_OF_TEXT in copied else copied)
                classes = match_classes(num_matched, self._supports(token_ids, others), self._source)
                return Proposal(token_ids, classes)
        return NOTHING

    def _supports(self, token_ids: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the support of each token by the other places, as long as these continue like the proposal."""
        text, supports = self._token_ids, list[int]()
        for at, token in enumerate(token_ids):
            if not others:
                return supports + [SINGLE] * (len(token_ids) - at)
            others = [place for place in others if place + at < len(text)]
            same = [place for place in others if text[place + at] == token]
            supports.append(SINGLE if not others else UNANIMOUS if len(same) == len(others) else AMBIGUOUS)
            others = same
        return supports

    def _matched(self, end: int, newest: Sequence[int]) -> int:
        """Return how many tokens before `end` equal the newest tokens."""
        text, num_matched = self._token_ids, 0
        longest = min(end, len(newest))
        while num_matched < longest and text[end - 1 - num_matched] == newest[-1 - num_matched]:
            num_matched += 1
        return num_matched


def newest_of(text: Sequence[int], ngram: int = 0) -> Sequence[int]:
    """Return the newest tokens of a text, as many as are compared."""
    return text[-max(ngram, _LONGEST_MATCH) :]


class _Ends:
    """The ends of the n-grams of one length, found by hash. Different n-grams may have the same hash.

    Sorted hashes find an n-gram of any text in a few comparisons and take 12 bytes a token. The newest n-grams are in a
    dict, until there are enough of them to be sorted in.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._hashes = np.empty(0, np.uint64)  # sorted; equal hashes stand in the order of the text
        self._starts = np.empty(0, np.int32)  # of the n-grams with these hashes
        self._newest: dict[tuple[int, ...], tuple[int, ...]] = {}  # starts of the n-grams that follow
        self._num_starts = 0  # of both

    def extend(self, text: array[int]) -> None:
        """Add the n-grams of the text that are not here yet. A proposal needs a token after its n-gram."""
        num_sorted, num_starts = len(self._starts), max(self._num_starts, len(text) - self.length)
        if num_starts - num_sorted > _MAX_UNSORTED:
            new = _hashes(np.array(text[num_sorted:-1]).astype(np.uint64), self.length)
            order = np.argsort(new, kind="stable")
            at = np.searchsorted(self._hashes, new[order], side="right")
            self._starts = np.insert(self._starts, at, order + num_sorted)
            self._hashes = np.insert(self._hashes, at, new[order])
            self._newest = {}
        else:
            for start in range(self._num_starts, num_starts):
                ngram = tuple(text[start : start + self.length])
                self._newest[ngram] = (*self._newest.get(ngram, ()), start)
        self._num_starts = num_starts

    def of(self, ngram: Sequence[int]) -> list[int]:
        """Return where the latest n-grams with the hash of this one end, at most `_MAX_PLACES`."""
        if len(ngram) < self.length:
            return []
        starts = list(self._newest.get(tuple(ngram), ())[-_MAX_PLACES:])
        if len(self._hashes) and len(starts) < _MAX_PLACES:
            wanted = np.uint64(_hash_of(ngram))
            last = int(self._hashes.searchsorted(wanted, side="right"))
            if last and self._hashes[last - 1] == wanted:
                older = slice(max(0, last - _MAX_PLACES + len(starts)), last)
                starts = self._starts[older][self._hashes[older] == wanted].tolist() + starts
        return [start + self.length for start in starts]


def _hashes(tokens: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Return the hash of each n-gram of this length, as `_hash_of` does."""
    num_ngrams = len(tokens) - length + 1
    hashes = tokens[:num_ngrams]
    for at in range(1, length):
        hashes = hashes * np.uint64(_MULTIPLIER) + tokens[at : at + num_ngrams]
    return hashes


def _hash_of(ngram: Sequence[int]) -> int:
    found = 0
    for token in ngram:
        found = found * _MULTIPLIER + token & _MASK
    return found
