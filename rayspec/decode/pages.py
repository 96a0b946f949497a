"""The pages of the KV cache: who has them, and which hold tokens that another sequence may begin with. No tensors.

A page that is full has a hash: of its tokens and of the page before it. A sequence that begins like an earlier one
shares that one's pages. Free pages keep their content until they are needed, least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rayspec.model.kv_arena import PAGE_SIZE
from rayspec.model.rows import Runs, joined, runs_of_pages

PageHash = bytes


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
        new = list(pages)
        self.pages += new
        self.runs = joined(self.runs, runs_of_pages(new, PAGE_SIZE))

    def clear(self) -> None:
        self.pages.clear()
        self.runs, self.num_hashed = (), 0


class PagePool:
    """Deals out `num_pages` pages. A page is in use, by one sequence or several, or free; a free one may hold what can
    still be found."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._num_users: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._claimed: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        # When a page was released that can still be found, as a count of releases; 0 for the others.
        self._released: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._num_releases = 0
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}

    def find(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages with the first of these hashes, up to the first that there is not. May be asked from any thread."""
        pages = []
        for one in hashes:
            page = self._page_of.get(one)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_free_without(self, pages: Sequence[int]) -> int:
        """How many are free once these are in use."""
        return self.num_free - int((self._num_users[pages] == 0).sum()) if pages else self.num_free

    def share(self, table: PageTable, pages: Sequence[int]) -> None:
        """Pages that were found become the first of a table."""
        self._use(table, pages)
        table.num_hashed = len(pages)

    def grow(self, table: PageTable, num_pages: int, room: int) -> bool:
        """Adds pages to a table until it has `num_pages`; False, and nothing is added, where fewer are free. New pages
        lie behind its last one where they can, and else where it may grow to `room` pages."""
        if num_pages - len(table.pages) > self.num_free:
            return False
        while (num_missing := num_pages - len(table.pages)) > 0:
            hole = self._hole_for(table, num_missing, max(room - len(table.pages), num_missing))
            self.forget(hole[:num_missing])
            self._use(table, hole[:num_missing])
            self._claim(table, hole[num_missing:])
        return True

    def release(self, table: PageTable) -> None:
        """The table is empty."""
        self._claim(table, range(0))
        self._num_releases += 1
        for page in table.pages:
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self.num_free += 1
                self._released[page] = self._num_releases if page in self._hash_of else 0
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
            self._released[page] = 0
            if page in self._hash_of:
                del self._page_of[self._hash_of.pop(page)]

    def forget_all(self) -> None:
        self.forget(list(self._hash_of))

    def _hole_for(self, table: PageTable, num_pages: int, room: int) -> range:
        """Free pages side by side, `room` at most: those behind the table's last page; or as many as there are for the
        table alone, at least `num_pages`; or else what there is."""
        self._claim(table, range(0))
        free = self._num_users == 0
        if table.pages and (behind := self._hole_at(table.pages[-1] + 1, free)):
            return behind[:room]
        while room >= num_pages:
            if (hole := self._oldest(free & ~self._claimed, room)) is not None:
                return hole
            room //= 2
        return max(_ranges(free), key=len)

    def _hole_at(self, page: int, free: NDArray[np.bool_]) -> range:
        """Pages from this one on that are free and that nobody claims; the first may be claimed."""
        if page >= self.num_pages or not free[page]:
            return range(0)
        taken = np.flatnonzero(~free[page + 1 :] | self._claimed[page + 1 :])
        return range(page, page + 1 + int(taken[0]) if len(taken) else self.num_pages)

    def _oldest(self, allowed: NDArray[np.bool_], num_pages: int) -> range | None:
        """So many pages side by side that are empty, or of which the newest content is older than elsewhere. What came
        free together lies side by side and is taken from its end: others may begin like its beginning."""
        found: tuple[int, int, int] | None = None
        for hole in _ranges(allowed):
            if len(hole) < num_pages:
                continue
            released = self._released[hole.start : hole.stop]
            edges = np.flatnonzero(np.diff(released)) + 1
            starts = {0, len(hole) - num_pages, *edges.tolist(), *(edges - num_pages).tolist()}
            for start in starts:
                if 0 <= start <= len(hole) - num_pages:
                    content = released[start : start + num_pages]
                    cost = (int(content.max()), int(np.count_nonzero(content)), -hole.start - start)
                    found = min(found or cost, cost)
        return None if found is None else range(-found[2], -found[2] + num_pages)

    def _claim(self, table: PageTable, pages: range) -> None:
        """In place of what the table claimed before."""
        self._claimed[table.claimed.start : table.claimed.stop] = False
        self._claimed[pages.start : pages.stop] = True
        table.claimed = pages

    def _use(self, table: PageTable, pages: Sequence[int]) -> None:
        for page in pages:
            self.num_free -= int(self._num_users[page] == 0)
            self._num_users[page] += 1
        table.extend(pages)


def page_hash(before: PageHash, token_ids: Sequence[int], salt: bytes = b"") -> PageHash:
    """Of a full page with these tokens behind a page with hash `before`; 16 bytes of BLAKE2b, so that nobody can make
    two prompts that meet. salt: how the page came about, where that decides what it holds."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16, salt=salt[:16]).digest()


def extend_hashes(
    hashes: list[PageHash], token_ids: Sequence[int], num_pages: int, salt: Callable[[int], bytes] = lambda end: b""
) -> None:
    """Until there are `num_pages`. salt: of the page that ends at a position, see `page_hash`."""
    for end in range((len(hashes) + 1) * PAGE_SIZE, num_pages * PAGE_SIZE + 1, PAGE_SIZE):
        before = hashes[-1] if hashes else b""
        hashes.append(page_hash(before, token_ids[end - PAGE_SIZE : end], salt(end)))


def _ranges(flags: NDArray[np.bool_]) -> list[range]:
    """Where they are True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return [range(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
