"""Which pages of its sequence a draft's row reads if it reads few keys, found without a device-to-host copy.

Keys in the cache are already rotated by their positions. A row may therefore read some pages in any order, and its
attention is that over exactly these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget
from rayspec.model.rows import Runs, is_paged


def reads_all(budget: KeyBudget, position: int, sliding_window: int | None) -> bool:
    """Return whether a row at this position sees no more keys than the budget allows."""
    is_narrow = sliding_window is not None and sliding_window <= budget.num_pages * PAGE_SIZE
    return is_narrow or position // PAGE_SIZE < budget.num_pages


@dataclass(frozen=True, slots=True)
class FewPages:
    """The pages that R rows read in each of L layers; L is 1 if all layers read the same pages.

    pages: int64 [L, R, P]; the row's own page is the last that counts, and entries after it are padding. num_before:
    int64 [L, R], how many places of these pages are before the row.
    """

    pages: Tensor
    num_before: Tensor

    def slots(self, *, with_own: bool) -> tuple[Tensor, Tensor]:
        """Return the slots to read, int64 [L, R, n], and which of them count, bool [L, R, n]. with_own: the row's own
        slot counts. The first slot, which counts, replaces each slot that does not, as that may hold any data."""
        inside = torch.arange(PAGE_SIZE, device=self.pages.device)
        slots = (self.pages[..., None] * PAGE_SIZE + inside).flatten(-2)
        places = torch.arange(slots.shape[-1], device=slots.device)
        counts = places < (self.num_before + with_own)[..., None]
        return torch.where(counts, slots, slots[..., :1]), counts


def few_pages(
    budget: KeyBudget,
    positions: Tensor,
    tables: Tensor,
    *,
    looked_at: Tensor | None = None,
    sliding_window: int | None = None,
) -> FewPages:
    """Choose the pages that rows read: the sink, the noted pages, and the newest ones with the row's own.

    positions: int64 [R]; rows for which `reads_all` is true read all their pages if there is no sliding window.
    tables: int64 [R, pages], see `block_tables`.
    looked_at: int [L, R, budget.looked_at], distinct page numbers in the sequence, none of the sink; negative: empty.
    Noted pages among the newest are not read twice. Pages that are partly outside the sliding window are left out.
    """
    own = positions[:, None] // PAGE_SIZE
    newest = own - torch.arange(budget.newest, -1, -1, device=own.device)
    older = torch.arange(budget.sink, device=own.device).expand(1, len(own), -1)
    if looked_at is not None:
        older = torch.cat([older.expand(len(looked_at), -1, -1), looked_at.long()], -1)
    is_read = (older >= 0) & (older < newest[:, :1])
    if sliding_window is not None:
        is_read &= older * PAGE_SIZE > positions[:, None] - sliding_window
    numbers = torch.cat([older, newest.expand(len(older), -1, -1)], -1)
    is_read = torch.cat([is_read, (newest >= 0).expand(len(older), -1, -1)], -1)
    numbers = torch.where(is_read, numbers, own + 1).sort(-1).values
    pages = tables.expand(len(numbers), -1, -1).gather(-1, numbers.minimum(own))
    num_full = is_read.sum(-1) - 1  # the last is the row's own
    return FewPages(pages, num_full * PAGE_SIZE + positions % PAGE_SIZE)


def block_tables(runs: Sequence[Runs], device: torch.device) -> Tensor:
    """Return the pages of sequences in order of position, padded with zeros: int64 [sequences, pages]."""
    return pad_sequence([pages_of(each) for each in runs], batch_first=True).to(device)


def pages_of(runs: Runs) -> Tensor:
    """Return the pages of a sequence in order of position, on the host: int64 [pages]."""
    assert is_paged(runs, PAGE_SIZE), "sequences lie in whole pages"
    return torch.cat([torch.arange(run.start // PAGE_SIZE, -(-run.end // PAGE_SIZE)) for run in runs])
