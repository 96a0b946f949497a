"""The one place that gives pages of the KV cache to sequences, takes them back, and finds those that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayspec.decode.pages import PageHash, PagePool, PageTable, WindowedPages, extend_hashes
from rayspec.decode.sequence import SequenceState
from rayspec.model.kv_cache import PAGE_SIZE


class KVManager:
    """The pages of one KV cache. A sequence that begins with the same tokens as an earlier sequence shares its full
    pages. windowed: the pages of the windowed store, if the cache has one.

    chunk_grid: prompts are cut at its multiples, and the bits in a page depend on the chunk that computed it. So only
    whole chunks are shared. shares_pages: if False, no page is ever found.
    """

    def __init__(
        self, num_slots: int, windowed: WindowedPages | None, *, shares_pages: bool, chunk_grid: int | None
    ) -> None:
        self.pool = PagePool(num_slots // PAGE_SIZE)
        self.windowed = windowed
        self._shares_pages = shares_pages
        self._chunk_grid = chunk_grid
        self._in_work: dict[PageHash, SequenceState] = {}  # pages that a sequence is about to fill

    @property
    def num_slots(self) -> int:
        return self.pool.num_pages * PAGE_SIZE

    @property
    def num_used_slots(self) -> int:
        """Number of slots in pages that sequences use. Free pages may also hold tokens, for later sequences."""
        return self.num_slots - self.pool.num_free * PAGE_SIZE

    def holds_window(self, sequence: SequenceState, position: int) -> bool:
        """Return whether the cache still has all keys that the sequence's token at this position sees."""
        return self.windowed is None or self.windowed.holds_window(sequence.windowed_table, position)

    def find(self, sequence: SequenceState) -> list[int]:
        """Return pages that hold the sequence's first tokens. At least one token remains to be computed, because its
        logits give the next token."""
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // PAGE_SIZE)
        pages = self.pool.find(hashes)
        num_usable = self._num_usable(sequence, len(pages))
        while self.windowed is not None and num_usable:
            in_window = self.windowed.longest_prefix(hashes[:num_usable])
            if in_window == num_usable:
                break
            num_usable = self._num_usable(sequence, in_window)
        return pages[:num_usable]

    def is_in_work(self, sequence: SequenceState) -> bool:
        """Return whether another sequence is filling the first page of this sequence that cannot be found yet."""
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // PAGE_SIZE)
        num_found = len(self.pool.find(hashes))
        return num_found < len(hashes) and hashes[num_found] in self._in_work

    def begin(self, sequence: SequenceState, pages: Sequence[int]) -> None:
        """Make the pages that `find` returned the sequence's first pages. It is about to fill the other full pages of
        its tokens."""
        self.pool.share(sequence.table, pages)
        if self.windowed is not None:
            self.windowed.share(sequence.windowed_table, self._hashes(sequence, len(pages)))
        sequence.num_computed = sequence.table.capacity
        for one in self._hashes(sequence, sequence.num_tokens // PAGE_SIZE):
            self._in_work.setdefault(one, sequence)

    def grow(self, sequence: SequenceState, num_pages: int, room: int) -> bool:
        """Give the sequence pages until it has `num_pages`, if possible where it can grow to `room` pages. Return
        False, and give none, if too few are free."""
        has_grown = self.pool.grow(sequence.table, num_pages, room)
        if has_grown and sequence.prefilled:
            self.grow_window(sequence, sequence.table.capacity)
        return has_grown

    def grow_window(self, sequence: SequenceState, num_tokens: int) -> None:
        """Give the sequence pages of the windowed store up to `num_tokens`, and take back those before its window."""
        if self.windowed is not None:
            self.windowed.grow(sequence.windowed_table, sequence.num_computed, num_tokens)

    def register(self, sequence: SequenceState) -> None:
        """Let other sequences find the pages that this sequence has filled."""
        num_full = sequence.num_computed // PAGE_SIZE
        if num_full > sequence.table.num_hashed:
            for one in self._hashes(sequence, num_full)[sequence.table.num_hashed :]:
                for pool, table in self._tables(sequence):
                    pool.register(table, one)
                self._give_up(sequence, one)

    def release(self, sequence: SequenceState) -> None:
        """Take back all pages of the sequence. Others can still find its full pages, unless the sequence has failed."""
        if sequence.error is None:
            self.register(sequence)
        for one in sequence.page_hashes:
            self._give_up(sequence, one)
        for pool, table in self._tables(sequence):
            if sequence.error is not None:
                pool.forget(table.pages)
            pool.release(table)
        sequence.num_computed = 0

    def forget_all(self) -> None:
        """Let nobody find a page any more, because the content of the cache is lost."""
        self.pool.forget_all()
        if self.windowed is not None:
            self.windowed.pool.forget_all()

    def _tables(self, sequence: SequenceState) -> list[tuple[PagePool, PageTable]]:
        both = [(self.pool, sequence.table)]
        return both if self.windowed is None else [*both, (self.windowed.pool, sequence.windowed_table)]

    def _give_up(self, sequence: SequenceState, one: PageHash) -> None:
        if self._in_work.get(one) is sequence:
            del self._in_work[one]

    def _hashes(self, sequence: SequenceState, num_pages: int) -> list[PageHash]:
        """Return the hashes of the first `num_pages` pages of the sequence, which must be full; [] if none are shared.

        With a grid, the bits of the prompt's last chunk and of generated tokens depend on the prompt length, so it is
        the salt of their pages.
        """
        if not self._shares_pages:
            return []
        num_prompt, grid = sequence.num_prompt_tokens, self._chunk_grid

        def salt(end: int) -> bytes:
            return b"" if grid is None or end <= num_prompt // grid * grid else str(num_prompt).encode()

        extend_hashes(sequence.page_hashes, sequence.token_ids, num_pages, salt)
        return sequence.page_hashes[:num_pages]

    def _num_usable(self, sequence: SequenceState, num_pages: int) -> int:
        """Return how many of the found pages can be shared. With a grid, the next prompt chunk must begin at a multiple
        of it; pages after the prompt can all be shared, because generated tokens come one by one."""
        if self._chunk_grid is None or num_pages * PAGE_SIZE >= sequence.num_prompt_tokens:
            return num_pages
        step = math.lcm(self._chunk_grid, PAGE_SIZE) // PAGE_SIZE
        return num_pages // step * step
