"""The pages of layers with a sliding window, if they have a store of their own. No tensors.

A sequence keeps only the pages that its next rows can see, and gives earlier pages back. So long sequences take little
memory in these layers. Pages that are given back can be shared until they are reused, like all free pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayspec.decode.pages import PageHash, PagePool, PageTable
from rayspec.model.kv_arena import PAGE_SIZE

# Windows in the store for each sequence that may run. Those of finished sequences can then be shared for a while.
_WINDOWS_EACH = 2


class WindowedPages:
    """Keeps the pages in the sliding window of each sequence. window: the longest sliding window of a layer, in tokens.
    num_behind: how many positions behind the newest token also keep their windows, for plan searches over tapped
    tokens.

    The pool must have as many slots as `num_slots_needed` returns. It then never runs out of pages.
    """

    def __init__(self, num_slots: int, window: int, num_behind: int) -> None:
        self.pool = PagePool(num_slots // PAGE_SIZE, spares_content=True)
        self._window = window
        self._num_behind = num_behind

    @staticmethod
    def num_slots_needed(
        window: int, num_behind: int, *, max_num_seqs: int, max_rows: int, max_prefill_tokens: int, num_cohorts: int
    ) -> int:
        """Return the slots for `max_num_seqs` sequences. max_rows: the most rows that a sequence has in a round.
        max_prefill_tokens: the most prompt tokens that each of `num_cohorts` cohorts may prefill at the same time."""
        num_pages = _WINDOWS_EACH * max_num_seqs * (2 + -(-(window + num_behind + max_rows) // PAGE_SIZE))
        return (num_pages + num_cohorts * -(-max_prefill_tokens // PAGE_SIZE)) * PAGE_SIZE

    def longest_prefix(self, hashes: Sequence[PageHash]) -> int:
        """Return the longest prefix, in pages, whose next row finds all pages in its window. hashes: of the prefix's
        pages."""
        usable, first_there = 0, 0
        for page, one in enumerate(hashes):
            if not self.pool.has(one):
                first_there = page + 1
            elif self._first_seen((page + 1) * PAGE_SIZE) >= first_there:
                usable = page + 1
        return usable

    def share(self, table: PageTable, hashes: Sequence[PageHash]) -> None:
        """Share the pages in the window of the row after a prefix that `longest_prefix` has found. hashes: of the
        prefix's pages."""
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
