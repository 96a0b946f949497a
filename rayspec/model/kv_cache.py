"""The KV cache: keys and values of the attention layers in pages of equal size, and which sequences use which pages.

Every process of a model has a `KVCache`. The engine's `PagePool` decides for all of them, and knows no tensors. A full
page has a hash of its tokens and of the page before it. A sequence that starts with the same tokens as an earlier
sequence shares those pages. Free pages keep their content until reuse; the least recently used go first. Layers with a
sliding window may have a store of their own, where a sequence keeps only the pages that its next rows can see.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.rows import Runs, joined, one_run, runs_of_pages

# Slots per page. A slot holds the keys and values of one token.
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudget:
    """Numbers of pages of the KV cache that a row reads. sink: the first pages of the sequence. newest: pages right
    before the row's own page. looked_at: pages between these that got most attention in the last verify. The row's own
    page is read up to the row, in addition to these."""

    sink: int = 1
    newest: int
    looked_at: int = 0

    @property
    def num_pages(self) -> int:
        """Number of pages that a row reads, its own page included."""
        return self.sink + self.looked_at + self.newest + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudgets:
    """Budget of each way to read few keys. `window` has more of the newest pages, because it has no scored ones."""

    window: KeyBudget = field(default=KeyBudget(newest=16))
    pages: KeyBudget = field(default=KeyBudget(newest=4, looked_at=16))

    def of(self, keys: Keys) -> KeyBudget | None:
        """Return the budget of these keys, or None for `all`."""
        return {"all": None, "window": self.window, "pages": self.pages}[keys]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one attention layer for one token. num_heads: the key heads of all attention
    calls of the layer, one call after another."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Slots of a KV cache. num_windowed_slots: slots of a second, smaller store for layers with a sliding window. If it
    is 0, these layers have the slots of the others."""

    num_slots: int
    num_windowed_slots: int = 0

    def slots_of(self, window: int | None) -> int:
        return self.num_windowed_slots if window and self.num_windowed_slots else self.num_slots


class KVCache:
    """Keys and values of the attention layers of one stage.

    keys[layer]: [num_heads, slots + num_spare, key_dim]; values[layer] has value_dim instead. Padding rows write to the
    spare slots. keeps_finite: store 0 in place of NaN and infinity, because a masked slot with NaN makes a result NaN.
    windowed_layers: layers with a sliding window, if they have a smaller store of `num_windowed_slots` slots of their
    own, in which a sequence keeps only the pages in its window.

    looked_at: int32 [layers, pages, budgets.pages.looked_at], None unless `notes_pages`. By page that a sequence is
    about to write to, the pages that got most attention of its newest row, see `few_keys`. They are numbered in the
    sequence, not in the cache; a negative number is empty.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_slots: int,
        *,
        num_windowed_slots: int = 0,
        windowed_layers: Collection[int] = (),
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        budgets: KeyBudgets | None = None,
        notes_pages: bool = False,
        keeps_finite: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.num_windowed_slots = num_windowed_slots
        self.windowed_layers = frozenset(windowed_layers) & layers.keys() if num_windowed_slots else frozenset()
        self._keeps_finite = keeps_finite
        self.budgets = budgets or KeyBudgets()
        self.place_of_layer = {index: place for place, index in enumerate(layers)}
        self.looked_at: Tensor | None = None
        if notes_pages:
            shape = (len(layers), -(-max(num_slots, num_windowed_slots) // PAGE_SIZE), self.budgets.pages.looked_at)
            self.looked_at = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for index, of_layer in layers.items():
            size = num_spare + (num_windowed_slots if index in self.windowed_layers else num_slots)
            for store, dim in ((self.keys, of_layer.key_dim), (self.values, of_layer.value_dim)):
                store[index] = torch.zeros(of_layer.num_heads, size, dim, dtype=dtype, device=device)

    def heads(self, layer: int, first_head: int, num_heads: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of these heads of the layer, as views."""
        heads = slice(first_head, first_head + num_heads)
        return self.keys[layer][heads], self.values[layer][heads]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, *, first_head: int = 0) -> None:
        """Store keys [H, N, key_dim] and values [H, N, value_dim] in slots [N], int64, as H heads from `first_head`."""
        for cached, new in zip(self.heads(layer, first_head, len(keys)), (keys, values), strict=True):
            cached.index_copy_(1, slots, new.nan_to_num(0.0, 0.0, 0.0) if self._keeps_finite else new)

    def move(self, sources: Tensor, destinations: Tensor, *, in_windowed_store: bool = False) -> None:
        """Copy slots in the layers of one store. sources, destinations: int64 [N] each. They may overlap: all sources
        are read first. No destination occurs twice."""
        for layer in self.keys:
            if (layer in self.windowed_layers) == in_windowed_store:
                for tensor in (self.keys[layer], self.values[layer]):
                    tensor.index_copy_(1, destinations, tensor.index_select(1, sources))


def bytes_per_slot(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize


def whole_pages(num_slots: int) -> int:
    """Round a number of slots up to whole pages."""
    return -(-num_slots // PAGE_SIZE) * PAGE_SIZE


PageHash = bytes


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence, in order of position. num_gone: how many pages before these were released early; in
    `runs`, slots without meaning stand for them. claimed: free pages after the last page, which other tables avoid
    while they find others. num_hashed: how many pages, with those gone, are registered by hash."""

    pages: list[int] = field(default_factory=list)
    runs: Runs = ()
    num_gone: int = 0
    num_hashed: int = 0
    claimed: range = range(0)

    @property
    def end(self) -> int:
        """Number of pages, with those gone."""
        return self.num_gone + len(self.pages)

    @property
    def capacity(self) -> int:
        return self.end * PAGE_SIZE

    def extend(self, pages: Iterable[int]) -> None:
        new = list(pages)
        self.pages += new
        self.runs = joined(self.runs, runs_of_pages(new, PAGE_SIZE))

    def drop(self, num_gone: int) -> None:
        """Remove the pages before page `num_gone`."""
        del self.pages[: num_gone - self.num_gone]
        self.num_gone = num_gone
        gone = one_run(0, num_gone * PAGE_SIZE) if num_gone else ()
        self.runs = joined(gone, runs_of_pages(self.pages, PAGE_SIZE))

    def clear(self) -> None:
        self.pages.clear()
        self.runs, self.num_gone, self.num_hashed = (), 0, 0


class PagePool:
    """Allocates `num_pages` pages. A page is free or is used by one or more sequences. `find` may still return a free
    page. spares_content: a table grows only into adjacent pages that `find` cannot return or that it has claimed.
    Tables that go forward through the pool would else overwrite whatever lies there."""

    def __init__(self, num_pages: int, *, spares_content: bool = False) -> None:
        self.num_pages = num_pages
        self._spares_content = spares_content
        self.num_free = num_pages
        self._num_users: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._claimed: NDArray[np.bool_] = np.zeros(num_pages, np.bool_)
        # For each free page that can still be found: the number of the release that freed it. 0 for the others.
        self._released: NDArray[np.int64] = np.zeros(num_pages, np.int64)
        self._num_releases = 0
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}

    def find(self, hashes: Iterable[PageHash]) -> list[int]:
        """Return the pages with these hashes, up to the first hash that has no page. Any thread may call this."""
        pages = []
        for one in hashes:
            page = self._page_of.get(one)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Return how many pages are free once `pages` are in use."""
        return self.num_free - int((self._num_users[pages] == 0).sum()) if pages else self.num_free

    def share(self, table: PageTable, pages: Sequence[int], num_gone: int = 0) -> None:
        """Make the pages that `find` returned the first pages of an empty table, after `num_gone` that it lacks."""
        table.drop(num_gone)
        self._use(table, pages)
        table.num_hashed = table.end

    def grow(self, table: PageTable, num_pages: int, room: int) -> bool:
        """Add pages to a table until it has `num_pages`. Return False, and add nothing, if too few pages are free. New
        pages follow the table's last page if possible, or else lie where the table can grow to `room` pages."""
        if num_pages - table.end > self.num_free:
            return False
        while (num_missing := num_pages - table.end) > 0:
            hole = self._free_range_for(table, num_missing, max(room - table.end, num_missing))
            self.forget(hole[:num_missing])
            self._use(table, hole[:num_missing])
            self._claim(table, hole[num_missing:])
        return True

    def release(self, table: PageTable) -> None:
        self._claim(table, range(0))
        self._release(table.pages)
        table.clear()

    def release_before(self, table: PageTable, first: int) -> None:
        """Release the pages of the table before its page `first`, which counts pages that are gone."""
        if first > table.num_gone:
            self._release(table.pages[: first - table.num_gone])
            table.drop(first)

    def register(self, table: PageTable, page_hash: PageHash) -> None:
        """Record that the table's next page is full. `find` returns it, unless another page has the same hash."""
        page = table.pages[table.num_hashed - table.num_gone]
        table.num_hashed += 1
        if page_hash not in self._page_of:
            self._page_of[page_hash], self._hash_of[page] = page, page_hash

    def forget(self, pages: Iterable[int]) -> None:
        """Remove the hashes of these pages, so that `find` no longer returns them."""
        for page in pages:
            self._released[page] = 0
            if page in self._hash_of:
                del self._page_of[self._hash_of.pop(page)]

    def forget_all(self) -> None:
        self.forget(list(self._hash_of))

    def _free_range_for(self, table: PageTable, num_pages: int, room: int) -> range:
        """Return contiguous free pages: up to `room` pages after the table's last page; or unclaimed pages, `room` or a
        half, a quarter, ... of it, but at least `num_pages`; or else the longest free range, even if claimed."""
        own = table.claimed
        self._claim(table, range(0))
        free = self._num_users == 0
        behind, page = range(0), table.pages[-1] + 1 if table.pages else self.num_pages
        if page < self.num_pages and free[page]:  # the table itself may have claimed it
            taken = np.flatnonzero(~free[page + 1 :] | self._claimed[page + 1 :])
            behind = range(page, page + 1 + int(taken[0]) if len(taken) else self.num_pages)[:room]
        if self._spares_content:
            num_allowed = itertools.takewhile(lambda page: page in own or not self._released[page], behind)
            behind = behind[: sum(1 for _ in num_allowed)]
        if behind:
            return behind
        while room >= num_pages:
            if (hole := self._oldest(free & ~self._claimed, room)) is not None:
                return hole
            room //= 2
        return max(_ranges(free), key=len)

    def _oldest(self, allowed: NDArray[np.bool_], num_pages: int) -> range | None:
        """Return `num_pages` contiguous allowed pages that are empty, or else those whose newest content is oldest.
        Pages released together are reused from their end, because another sequence may share their beginning."""
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
        """Claim `pages` for the table in place of its earlier claim."""
        self._claimed[table.claimed.start : table.claimed.stop] = False
        self._claimed[pages.start : pages.stop] = True
        table.claimed = pages

    def _release(self, pages: Iterable[int]) -> None:
        self._num_releases += 1
        for page in pages:
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                self.num_free += 1
                self._released[page] = self._num_releases if page in self._hash_of else 0

    def _use(self, table: PageTable, pages: Sequence[int]) -> None:
        for page in pages:
            self.num_free -= int(self._num_users[page] == 0)
            self._num_users[page] += 1
        table.extend(pages)


def page_hash(before: PageHash, token_ids: Sequence[int], salt: bytes = b"") -> PageHash:
    """Return the hash of a full page with these tokens after a page with hash `before`: 16 bytes of BLAKE2b, so that
    nobody can construct equal hashes. salt: how the page was computed, if that affects its content."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16, salt=salt[:16]).digest()


def extend_hashes(
    hashes: list[PageHash], token_ids: Sequence[int], num_pages: int, salt: Callable[[int], bytes] = lambda end: b""
) -> None:
    """Append page hashes until there are `num_pages`. salt: gives the salt of the page that ends at a position."""
    for end in range((len(hashes) + 1) * PAGE_SIZE, num_pages * PAGE_SIZE + 1, PAGE_SIZE):
        before = hashes[-1] if hashes else b""
        hashes.append(page_hash(before, token_ids[end - PAGE_SIZE : end], salt(end)))


def _ranges(flags: NDArray[np.bool_]) -> list[range]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return [range(int(first), int(end)) for first, end in edges.reshape(-1, 2)]


# Windows in the store for each sequence that may run. Those of finished sequences can then be shared for a while.
_WINDOWS_EACH = 2


class WindowedPages:
    """Keeps the pages in the sliding window of each sequence. window: the longest sliding window of a layer, in tokens.
    num_behind: how many positions behind the newest token also keep their windows, for plan searches. A pool with as
    many slots as `num_slots_needed` returns never runs out of pages."""

    def __init__(self, num_slots: int, window: int, num_behind: int) -> None:
        self.pool = PagePool(num_slots // PAGE_SIZE, spares_content=True)
        self._window = window
        self._num_behind = num_behind

    @staticmethod
    def num_slots_needed(
        window: int, num_behind: int, *, max_num_seqs: int, max_rows: int, max_prefill_tokens: int, num_cohorts: int
    ) -> int:
        """max_rows: the most rows that a sequence has in a round. max_prefill_tokens: the most prompt tokens that each
        of `num_cohorts` cohorts may prefill at the same time."""
        num_pages = _WINDOWS_EACH * max_num_seqs * (2 + -(-(window + num_behind + max_rows) // PAGE_SIZE))
        return (num_pages + num_cohorts * -(-max_prefill_tokens // PAGE_SIZE)) * PAGE_SIZE

    def longest_prefix(self, hashes: Sequence[PageHash]) -> int:
        """Return the longest prefix, in pages, whose next row finds all pages in its window. hashes: of its pages."""
        usable, first_there = 0, 0
        for page, one in enumerate(hashes):
            if not self.pool.find([one]):
                first_there = page + 1
            elif self._first_seen((page + 1) * PAGE_SIZE) >= first_there:
                usable = page + 1
        return usable

    def share(self, table: PageTable, hashes: Sequence[PageHash]) -> None:
        """Share the pages in the window of the row after a prefix that `longest_prefix` has found."""
        first = self._first_seen(len(hashes) * PAGE_SIZE)
        self.pool.share(table, self.pool.find(hashes[first:]), num_gone=first)

    def grow(self, table: PageTable, num_computed: int, num_tokens: int) -> None:
        """Give back the pages before the windows of all rows from position `num_computed - num_behind` on, and add
        pages up to `num_tokens`."""
        self.pool.release_before(table, self._first_seen(num_computed - self._num_behind))
        num_pages = -(-num_tokens // PAGE_SIZE)
        has_grown = self.pool.grow(table, num_pages, room=num_pages + self._window // PAGE_SIZE)
        assert has_grown, "the pool holds the windows of all sequences"

    def holds_window(self, table: PageTable, position: int) -> bool:
        """Return whether the table still has all pages that the row at this position sees."""
        return self._first_seen(position) >= table.num_gone

    def _first_seen(self, position: int) -> int:
        """Return the first page that the row at this position sees."""
        return max(0, position + 1 - self._window) // PAGE_SIZE
