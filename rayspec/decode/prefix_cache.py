"""Which pages a sequence shares with those before it: as many full pages from its beginning as hold the same tokens."""

from __future__ import annotations

import math
from functools import partial

from rayspec.decode.pages import PageHash, PagePool, extend_hashes
from rayspec.decode.sequence import SequenceState
from rayspec.model.kv_arena import PAGE_SIZE


class PrefixCache:
    """Finds pages of a pool by what they hold.

    chunk_grid: prompts are cut at multiples of it, and what a page holds depends on the chunk that it came from, to the
    bit. Whole chunks are then shared, and no part of one. Not `enabled`: nothing is ever found.
    """

    def __init__(self, pool: PagePool, *, enabled: bool, chunk_grid: int | None) -> None:
        self._pool = pool
        self._enabled = enabled
        self._chunk_grid = chunk_grid
        self._in_work: dict[PageHash, SequenceState] = {}  # pages that a sequence is about to fill

    def find(self, sequence: SequenceState) -> list[int]:
        """Pages with the sequence's first tokens. At least one token is left, which gives the next one's logits."""
        pages = self._pool.find(self._hashes(sequence, _num_pages_before_last(sequence)))
        return pages[: self._num_usable(sequence, len(pages))]

    def is_in_work(self, sequence: SequenceState) -> bool:
        """Another sequence is about to fill the page behind those that there are."""
        hashes = self._hashes(sequence, _num_pages_before_last(sequence))
        num_found = len(self._pool.find(hashes))
        return num_found < len(hashes) and hashes[num_found] in self._in_work

    def begin(self, sequence: SequenceState) -> None:
        """The sequence is about to fill the pages of its tokens."""
        for one in self._hashes(sequence, sequence.num_tokens // PAGE_SIZE):
            self._in_work.setdefault(one, sequence)

    def register(self, sequence: SequenceState) -> None:
        """The pages that it has filled may be found."""
        num_full = sequence.num_computed // PAGE_SIZE
        if num_full > sequence.table.num_hashed:
            for one in self._hashes(sequence, num_full)[sequence.table.num_hashed :]:
                self._pool.register(sequence.table, one)
                self._give_up(sequence, one)

    def end(self, sequence: SequenceState) -> None:
        """The sequence fills no more pages."""
        for one in sequence.page_hashes:
            self._give_up(sequence, one)

    def _give_up(self, sequence: SequenceState, one: PageHash) -> None:
        if self._in_work.get(one) is sequence:
            del self._in_work[one]

    def _hashes(self, sequence: SequenceState, num_pages: int) -> list[PageHash]:
        """Of its first pages, which have all their tokens."""
        if not self._enabled:
            return []
        extend_hashes(sequence.page_hashes, sequence.token_ids, num_pages, partial(self._salt, sequence))
        return sequence.page_hashes[:num_pages]

    def _salt(self, sequence: SequenceState, end: int) -> bytes:
        """On a grid, what a page of a prompt's last chunk, or of generated tokens, holds depends on the chunk."""
        if self._chunk_grid is None or end <= sequence.num_prompt_tokens // self._chunk_grid * self._chunk_grid:
            return b""
        return str(sequence.num_prompt_tokens).encode()

    def _num_usable(self, sequence: SequenceState, num_pages: int) -> int:
        """On a grid the next chunk begins on a line of it; generated tokens come one by one."""
        if self._chunk_grid is None or num_pages * PAGE_SIZE >= sequence.num_prompt_tokens:
            return num_pages
        step = math.lcm(self._chunk_grid, PAGE_SIZE) // PAGE_SIZE
        return num_pages // step * step


def _num_pages_before_last(sequence: SequenceState) -> int:
    return (sequence.num_tokens - 1) // PAGE_SIZE
