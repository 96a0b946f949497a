"""Find the pages that a sequence shares with earlier sequences: the longest prefix of full pages with equal tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayspec.decode.pages import PageHash, PagePool, WindowedPages, extend_hashes
from rayspec.decode.sequence import SequenceState
from rayspec.model.kv_cache import PAGE_SIZE


class PrefixCache:
    """Finds pages of a pool by their tokens. windowed: the pages of the windowed store, if the cache has one.

    chunk_grid: prompts are cut at its multiples, and the bits in a page depend on the chunk that computed it. So only
    whole chunks are shared. enabled: if False, no page is ever found.
    """

    def __init__(
        self, pool: PagePool, windowed: WindowedPages | None, *, enabled: bool, chunk_grid: int | None
    ) -> None:
        self._pool = pool
        self._windowed = windowed
        self._enabled = enabled
        self._chunk_grid = chunk_grid
        self._in_work: dict[PageHash, SequenceState] = {}  # pages that a sequence is about to fill

    def find(self, sequence: SequenceState) -> list[int]:
        """Return pages that hold the sequence's first tokens. At least one token remains to be computed, because its
        logits give the next token."""
        hashes = self._hashes(sequence, _num_pages_before_last(sequence))
        pages = self._pool.find(hashes)
        num_usable = self._num_usable(sequence, len(pages))
        while self._windowed is not None and num_usable:
            in_window = self._windowed.longest_prefix(hashes[:num_usable])
            if in_window == num_usable:
                break
            num_usable = self._num_usable(sequence, in_window)
        return pages[:num_usable]

    def share(self, sequence: SequenceState, pages: Sequence[int]) -> None:
        """Make the pages that `find` returned the sequence's first pages."""
        self._pool.share(sequence.table, pages)
        if self._windowed is not None:
            self._windowed.share(sequence.windowed_table, self._hashes(sequence, len(pages)))
        sequence.num_computed = sequence.table.capacity

    def is_in_work(self, sequence: SequenceState) -> bool:
        """Return whether another sequence is filling the first page of this sequence that cannot be found yet."""
        hashes = self._hashes(sequence, _num_pages_before_last(sequence))
        num_found = len(self._pool.find(hashes))
        return num_found < len(hashes) and hashes[num_found] in self._in_work

    def begin(self, sequence: SequenceState) -> None:
        """Record that the sequence is about to fill the full pages of its tokens."""
        for one in self._hashes(sequence, sequence.num_tokens // PAGE_SIZE):
            self._in_work.setdefault(one, sequence)

    def register(self, sequence: SequenceState) -> None:
        """Let other sequences find the pages that this sequence has filled."""
        num_full = sequence.num_computed // PAGE_SIZE
        if num_full > sequence.table.num_hashed:
            for one in self._hashes(sequence, num_full)[sequence.table.num_hashed :]:
                self._pool.register(sequence.table, one)
                if self._windowed is not None:
                    self._windowed.pool.register(sequence.windowed_table, one)
                self._give_up(sequence, one)

    def end(self, sequence: SequenceState) -> None:
        """Record that the sequence fills no more pages."""
        for one in sequence.page_hashes:
            self._give_up(sequence, one)

    def _give_up(self, sequence: SequenceState, one: PageHash) -> None:
        if self._in_work.get(one) is sequence:
            del self._in_work[one]

    def _hashes(self, sequence: SequenceState, num_pages: int) -> list[PageHash]:
        """Return the hashes of the first `num_pages` pages of the sequence, which must be full; [] if not enabled.

        With a grid, the bits of the prompt's last chunk and of generated tokens depend on the prompt length, so it is
        the salt of their pages.
        """
        if not self._enabled:
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


def _num_pages_before_last(sequence: SequenceState) -> int:
    return (sequence.num_tokens - 1) // PAGE_SIZE
