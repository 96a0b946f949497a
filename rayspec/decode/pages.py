"""The pages of the KV cache: who has them, and which hold tokens that another sequence may begin with. No tensors.

A page that is full has a hash: of its tokens and of the page before it. A sequence that begins like an earlier one
shares that one's pages. Pages that nobody has keep their content until they are needed, least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayspec.model.kv_arena import PAGE_SIZE
from rayspec.model.rows import Runs, runs_of_pages

PageHash = bytes
# Kept pages that are emptied together where one must be, and their most as a share of all: a sequence that grows then
# finds pages side by side, and its keys are not many short runs.
_NUM_EMPTIED, _SHARE_EMPTIED = 16, 1 / 16


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in order of position. claimed: pages behind its last one that others leave to it while
    there are others. num_hashed: the first pages, which others may find."""

    pages: list[int] = field(default_factory=list)
    runs: Runs = ()
    num_hashed: int = 0
    claimed: range = range(0)

    @property
    def capacity(self) -> int:
        """Tokens."""
        return len(self.pages) * PAGE_SIZE

    def extend(self, pages: Iterable[int]) -> None:
        self.pages.extend(pages)
        self.runs = runs_of_pages(self.pages, PAGE_SIZE)

    def clear(self) -> None:
        self.pages.clear()
        self.runs, self.num_hashed = (), 0


class PagePool:
    """Deals out `num_pages` pages. A page is one of: *empty*; *kept*, nobody's but with content that may be found; or
    in use by one sequence or several."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_users = [0] * num_pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}
        self._empty: NDArray[np.bool_] = np.ones(num_pages, np.bool_)
        self._claimed: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        self._num_empty = num_pages

    @property
    def num_free(self) -> int:
        """Empty or kept."""
        return self._num_empty + len(self._kept)

    def find(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages with the first of these hashes, up to the first that there is not."""
        pages = []
        for one in hashes:
            if one not in self._page_of:
                break
            pages.append(self._page_of[one])
        return pages

    def num_free_without(self, pages: Iterable[int]) -> int:
        """How many are free once these are in use."""
        return self.num_free - sum(page in self._kept for page in pages)

    def share(self, table: PageTable, pages: Sequence[int]) -> None:
        """Pages that were found become the first of a table."""
        for page in pages:
            self._num_users[page] += 1
            self._kept.pop(page, None)
        table.extend(pages)
        table.num_hashed = len(pages)

    def grow(self, table: PageTable, num_pages: int, room: int) -> bool:
        """Adds pages to a table until it has `num_pages`; False, and nothing is added, where fewer are free. New pages
        lie behind its last one where they can, and else where it may grow to `room` pages."""
        num_missing = num_pages - len(table.pages)
        if num_missing > self.num_free:
            return False
        if num_missing > self._num_empty:
            together = min(_NUM_EMPTIED, int(_SHARE_EMPTIED * self.num_pages))
            self._make_empty(min(max(num_missing, together), self.num_free))
        while num_missing > 0:
            room_left = max(room - len(table.pages), num_missing)
            hole = self._hole_for(table, room_left)
            taken = hole[:num_missing]
            self._take(table, taken)
            self._claim(table, hole[num_missing:room_left])
            num_missing -= len(taken)
        return True

    def release(self, table: PageTable) -> None:
        """The table is empty. Its last pages are the first that will be needed: others may share the first ones."""
        self._give_up_claim(table)
        for page in reversed(table.pages):
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self._free(page)
        table.clear()

    def register(self, table: PageTable, page_hash: PageHash) -> None:
        """The next page of the table is full: from now on it may be found by its hash."""
        page = table.pages[table.num_hashed]
        table.num_hashed += 1
        if page_hash not in self._page_of:
            self._page_of[page_hash], self._hash_of[page] = page, page_hash

    def forget(self, pages: Iterable[int]) -> None:
        """What is in these pages may not be found any more."""
        for page in pages:
            if page in self._hash_of:
                del self._page_of[self._hash_of.pop(page)]
            if page in self._kept:
                del self._kept[page]
                self._set_empty(page)

    def forget_all(self) -> None:
        self.forget(list(self._hash_of))

    def hashes(self) -> list[PageHash]:
        """Of all pages that can be found."""
        return list(self._page_of)

    def _make_empty(self, num_pages: int) -> None:
        while self._num_empty < num_pages:
            self.forget([next(iter(self._kept))])

    def _hole_for(self, table: PageTable, room: int) -> range:
        """Empty pages side by side: those behind the table's last page; or the smallest hole with `room`; or the
        largest; first those that nobody claims."""
        self._give_up_claim(table)
        if table.pages and (behind := self._hole_at(table.pages[-1] + 1)):
            return behind
        for empty in (self._empty & ~self._claimed, self._empty):
            holes = _holes(empty)
            if holes:
                large = [hole for hole in holes if len(hole) >= room]
                return min(large, key=len) if large else max(holes, key=len)
        raise AssertionError("no page is empty")

    def _hole_at(self, page: int) -> range:
        """Pages from this one on that are empty and that nobody claims; the first may be claimed."""
        if page >= self.num_pages or not self._empty[page]:
            return range(0)
        taken = np.flatnonzero(~self._empty[page + 1 :] | self._claimed[page + 1 :])
        return range(page, page + 1 + int(taken[0]) if len(taken) else self.num_pages)

    def _claim(self, table: PageTable, pages: range) -> None:
        self._claimed[pages.start : pages.stop] = True
        table.claimed = pages

    def _give_up_claim(self, table: PageTable) -> None:
        self._claimed[table.claimed.start : table.claimed.stop] = False
        table.claimed = range(0)

    def _take(self, table: PageTable, pages: range) -> None:
        table.extend(pages)
        self._empty[pages.start : pages.stop] = False
        self._num_empty -= len(pages)
        for page in pages:
            self._num_users[page] = 1

    def _free(self, page: int) -> None:
        if page in self._hash_of:
            self._kept[page] = None
        else:
            self._set_empty(page)

    def _set_empty(self, page: int) -> None:
        self._empty[page] = True
        self._num_empty += 1


def page_hash(before: PageHash, token_ids: Sequence[int], salt: bytes = b"") -> PageHash:
    """Of a full page with these tokens behind a page with hash `before`; 16 bytes of BLAKE2b, so that nobody can make
    two prompts that meet. salt: how the page came about, where that decides what it holds."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16, salt=salt[:16]).digest()


def _holes(empty: NDArray[np.bool_]) -> list[range]:
    """Where it is True, as ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], empty, [False]))))
    return [range(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
