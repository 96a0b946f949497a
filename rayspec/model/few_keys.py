"""Which pages of its sequence a draft's row reads if it reads few keys, found without a device-to-host copy.

Keys in the cache are already rotated by their positions. A row may therefore read some pages in any order, and its
attention is that over exactly these keys.

Some of the pages are those that got most attention of the sequence's newest row: a *note* has their numbers. The score
of a page is the sum of the row's softmax weights over the page's keys and the layer's heads. A note is stored under the
pages that the sequence writes to next (`KVCache.looked_at`), so all steps of a draft find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KVCache
from rayspec.model.rows import Path, RowSpan, Runs, is_paged, runs_between, slots_between


def reads_all(budget: KeyBudget, position: int, sliding_window: int | None) -> bool:
    """Return whether a row at this position sees no more keys than the budget allows."""
    is_narrow = sliding_window is not None and sliding_window <= budget.num_pages * PAGE_SIZE
    return is_narrow or position // PAGE_SIZE < budget.num_pages


def few_pages(
    budget: KeyBudget,
    positions: Tensor,
    tables: Tensor,
    *,
    looked_at: Tensor | None = None,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the pages that R rows read in each of L layers: the sink, the noted pages, and the newest ones with the
    row's own. L is 1 if all layers read the same pages. Return the pages, int64 [L, R, P], and how many places of these
    are before the row, int64 [L, R]. The row's own page is the last that counts; entries after it are padding.

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
    return pages, num_full * PAGE_SIZE + positions % PAGE_SIZE


def block_tables(runs: Sequence[Runs], device: torch.device) -> Tensor:
    """Return the pages of sequences in order of position, padded with zeros: int64 [sequences, pages]."""
    return pad_sequence([pages_of(each) for each in runs], batch_first=True).to(device)


def pages_of(runs: Runs) -> Tensor:
    """Return the pages of a sequence in order of position, on the host: int64 [pages]."""
    assert is_paged(runs, PAGE_SIZE), "sequences lie in whole pages"
    return torch.cat([torch.arange(run.start // PAGE_SIZE, -(-run.end // PAGE_SIZE)) for run in runs])


# A draft starts in a page of the verify's rows or right after them, and continues for some tokens.
_NOTED_TOKENS_AHEAD = 64
# A run of at least so many slots is read in place; shorter runs are gathered.
_LONG_RUN = 256


@dataclass(frozen=True, slots=True)
class NewestRows:
    """The R rows of a batch whose pages are noted. rows: their indices in the batch. keys: by row, the keys that it
    reads, as pairs of their places in the sequence and their slots in the cache. num_pages: pages of the longest
    sequence. own: int64 [R], the page of each row's position, counted in its sequence. pages: int64 [M], pages of the
    cache that get a note. owners: int64 [M], which of the R rows each note is about."""

    rows: Sequence[int]
    keys: Sequence[Sequence[tuple[slice | Tensor, slice | Tensor]]]
    num_pages: int
    own: Tensor
    pages: Tensor
    owners: Tensor


def newest_rows(
    budget: KeyBudget,
    spans: Sequence[RowSpan],
    paths: Sequence[Sequence[Path]],
    sliding_window: int | None,
    device: torch.device,
) -> NewestRows | None:
    """Return the newest row of each sequence that needs a note, or None if no sequence does. In a tree it is the row
    that is farthest from the root. The rows of a sequence may be several spans.

    A sequence needs a note if a draft will not read it in full and its rows are in more than one page. Scoring all keys
    costs half of a verify, and a note stays useful for some pages.
    """
    newest: dict[Runs, tuple[int, Path]] = {}
    context: dict[Runs, int] = {}  # places that were filled before the batch
    last: dict[Runs, int] = {}  # the newest row's own place
    end = 0
    for span, tree in zip(spans, paths, strict=True):
        first, end = end, end + span.num_rows
        row, path = max(enumerate(tree), key=lambda each: each[1].position) if tree else (span.num_rows - 1, None)
        path = path or Path(span.end, ())
        context.setdefault(span.runs, span.context)
        if span.runs not in newest or path.position > newest[span.runs][1].position:
            newest[span.runs] = first + row, path
            last[span.runs] = span.context + row
    noted = [
        runs
        for runs, (_, path) in newest.items()
        if context[runs] // PAGE_SIZE < last[runs] // PAGE_SIZE
        # The draft may reach the next page.
        and not reads_all(budget, path.position + PAGE_SIZE, sliding_window)
    ]
    if not noted:
        return None
    next_pages = [
        pages_of(runs)[context[runs] // PAGE_SIZE : (last[runs] + _NOTED_TOKENS_AHEAD) // PAGE_SIZE + 1]
        for runs in noted
    ]
    owners = torch.arange(len(noted)).repeat_interleave(torch.tensor([len(pages) for pages in next_pages]))
    return NewestRows(
        rows=[newest[runs][0] for runs in noted],
        keys=[_keys_seen(runs, newest[runs][1], sliding_window, device) for runs in noted],
        num_pages=max(last[runs] for runs in noted) // PAGE_SIZE + 1,
        own=torch.tensor([newest[runs][1].position // PAGE_SIZE for runs in noted], device=device),
        pages=torch.cat(next_pages).to(device),
        owners=owners.to(device),
    )


def note_pages(
    cache: KVCache,
    layer: int,
    newest: NewestRows,
    query: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> None:
    """Score the pages, and store the best in `cache.looked_at`. query: [H, N, D], all rows of the batch. keys: the
    layer's keys in the cache, [H_kv, slots, D]; those of the rows are already there."""
    assert cache.looked_at is not None, "a cache with room for notes"
    budget = cache.budgets.pages
    masses = page_masses(keys, newest, query, scaling=scaling, softcap=softcap)
    numbers = torch.arange(newest.num_pages, device=masses.device)
    is_older = (numbers >= budget.sink) & (numbers <= newest.own[:, None] - budget.newest)
    best = masses.where(is_older, 0.0).topk(budget.looked_at)
    chosen = best.indices.where(best.values > 0, -1).int()
    cache.looked_at[cache.place_of_layer[layer]].index_copy_(0, newest.pages, chosen[newest.owners])


def page_masses(keys: Tensor, newest: NewestRows, query: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """Return the score of each page for each row: float32 [R, pages]. keys: [H_kv, slots, D]; query: [H, N, D], all
    rows of the batch."""
    shape = (len(newest.rows), len(keys), len(query) // len(keys), newest.num_pages * PAGE_SIZE)
    scores = query.new_full(shape, float("-inf"), dtype=torch.float32)
    for own, row, seen in zip(scores, newest.rows, newest.keys, strict=True):
        folded = query[:, row].reshape(len(keys), -1, query.shape[-1]).transpose(1, 2)
        for places, slots in seen:
            # With keys as the left operand, the product is more than twice as fast on a CPU.
            own[..., places] = (keys[:, slots] @ folded).transpose(1, 2).float()
    scores *= scaling
    if softcap:
        scores = (torch.tanh(scores / softcap) * softcap).where(scores.isfinite(), scores)
    weights: Tensor = scores.softmax(-1).sum((1, 2))
    return weights.view(len(weights), -1, PAGE_SIZE).sum(-1)


def _keys_seen(
    runs: Runs, path: Path, sliding_window: int | None, device: torch.device
) -> list[tuple[slice | Tensor, slice | Tensor]]:
    """Return places and slots of the keys that a row sees: those of each long run, and all others together."""
    lowest = place = max(0, path.position + 1 - sliding_window) if sliding_window else 0
    found: list[tuple[slice | Tensor, slice | Tensor]] = []
    others: list[tuple[int, int]] = []
    for run in runs_between(runs, lowest, path.shared):
        if run.length >= _LONG_RUN:
            found.append((slice(place, place + run.length), slice(run.start, run.end)))
        else:
            others.extend(zip(range(place, place + run.length), run.slots, strict=True))
        place += run.length
    others += [(own, slots_between(runs, own, own + 1)[0]) for own in path.own[max(0, lowest - path.shared) :]]
    if others:
        places, slots = torch.tensor(others, device=device).T
        found.append((places, slots))
    return found
