"""Drafts from what the target itself found likely before: Token Recycling (Luo et al. 2025).

Each row that the target verifies gives the likeliest tokens after it, whether the row was accepted or not. They are
kept, and become candidates wherever the same token stands again, in any text. Ours: they are kept for pairs of tokens,
too, which are right more often; their probabilities are kept, by which their acceptance is learned; and the tree has
no fixed template, but grows where it is likeliest to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from rayspec.planning.lookup import UNVERIFIED, recycled_classes

NUM_SUCCESSORS = 8
_NUM_SLOTS = 1 << 17
_NONE = -1

# Of one row of a verify: the likeliest next tokens, best first, and their probabilities.
Likeliest: TypeAlias = tuple[Sequence[int], Sequence[float]]


class Successors:
    """The likeliest successors of each token and of each pair of tokens, at their last verify, 6 MB in all.

    A hash table in which the newer of two keys with one slot stays. It begins with the bigrams of prompts.
    """

    def __init__(self) -> None:
        self._keys = np.full(_NUM_SLOTS, _NONE, np.int64)
        self._token_ids = np.full((_NUM_SLOTS, NUM_SUCCESSORS), _NONE, np.int32)
        self._classes = np.zeros((_NUM_SLOTS, NUM_SUCCESSORS), np.uint8)

    def note(self, pairs: Sequence[tuple[int, int]], likeliest: Sequence[Likeliest]) -> None:
        """Note what the target found likeliest after the second token of each pair. Of a shorter one, what is beyond
        the pairs or the likeliest counts for nothing."""
        num_rows = min(len(pairs), len(likeliest))
        if not num_rows:
            return
        text = np.array(pairs[:num_rows], np.int64)
        token_ids = np.array([one for one, _ in likeliest[:num_rows]], np.int32)
        probabilities = np.array([one for _, one in likeliest[:num_rows]])
        count = token_ids.shape[1]
        for is_pair, keys in ((True, _keys(text[:, 0], text[:, 1])), (False, text[:, 1])):
            slots = keys % _PRIME
            self._keys[slots] = keys
            self._token_ids[slots, :count] = token_ids
            self._token_ids[slots, count:] = _NONE
            self._classes[slots, :count] = recycled_classes(probabilities, is_pair=is_pair)

    def note_text(self, token_ids: Sequence[int]) -> None:
        """Note the bigrams of a text for the tokens after which nothing is noted yet."""
        text = np.array(token_ids, np.int64)
        tokens, following = text[:-1], text[1:]
        slots = tokens % _PRIME
        is_new = self._keys[slots] != tokens
        slots, tokens, following = slots[is_new], tokens[is_new], following[is_new]
        self._keys[slots] = tokens
        self._token_ids[slots] = _NONE
        self._token_ids[slots, 0] = following
        self._classes[slots, 0] = UNVERIFIED

    def after(self, before: int, token: int) -> tuple[list[int], list[int]]:
        """Return the candidates after `token`, which follows `before`, and their classes."""
        for key in (int(_keys(before, token)), token):
            slot = key % _PRIME
            if self._keys[slot] == key:
                found = [one for one in self._token_ids[slot].tolist() if one != _NONE]
                return found, self._classes[slot, : len(found)].tolist()
        return [], []


_PRIME = 131_071  # the largest below the number of slots: the remainder is the hash


def _keys(before: Any, token: Any) -> Any:
    """Return the keys of pairs, of integers or arrays of them."""
    return (before + 1) << 32 | token
