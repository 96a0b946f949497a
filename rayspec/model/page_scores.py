"""Notes of the pages that get most attention of each sequence's newest row, for drafts that read few keys.

The score of a page is the sum of the row's softmax weights over the page's keys and the layer's heads. A note is stored
under the pages that the sequence writes to next, see `KVArena.looked_at`. A draft therefore finds the note by the page
of its own row. All steps of a draft write to the same few pages, so they find the same note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.model.few_keys import pages_of, reads_all
from rayspec.model.key_budgets import KeyBudget
from rayspec.model.kv_arena import PAGE_SIZE, KVArena
from rayspec.model.rows import Path, RowSpan, Run, Runs, runs_between

# A draft starts in a page of the verify's rows or right after them, and continues for some tokens.
_NOTED_TOKENS_AHEAD = 64
# A run of at least so many slots is read in place; shorter runs are gathered.
_LONG_RUN = 256


@dataclass(frozen=True, slots=True)
class _Look:
    """Keys that a row reads. places: their places in the sequence. slots: their slots in the cache."""

    places: slice | Tensor
    slots: slice | Tensor


@dataclass(frozen=True, slots=True)
class NewestRows:
    """The R rows of a batch whose pages are noted. rows: their indices in the batch. looks: the keys that each reads.
    num_pages: pages of the longest sequence. own: int64 [R], the page of each row's position, counted in its sequence.
    pages: int64 [M], pages of the cache that get a note. owners: int64 [M], which of the R rows each note is about."""

    rows: Sequence[int]
    looks: Sequence[Sequence[_Look]]
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
    that is farthest from the root.

    A sequence needs a note if a draft will not read it in full and its rows are in more than one page. Scoring all keys
    costs half of a verify, and a note stays useful for some pages.
    """
    newest = [
        row
        for row in _newest_of_sequences(spans, paths)
        # The draft may reach the next page.
        if row.begins_page and not reads_all(budget, row.path.position + PAGE_SIZE, sliding_window)
    ]
    if not newest:
        return None
    noted = [row.next_pages() for row in newest]
    owners = torch.arange(len(newest)).repeat_interleave(torch.tensor([len(pages) for pages in noted]))
    return NewestRows(
        rows=[row.number for row in newest],
        looks=[_looks(row, sliding_window, device) for row in newest],
        num_pages=max(row.last for row in newest) // PAGE_SIZE + 1,
        own=torch.tensor([row.path.position // PAGE_SIZE for row in newest], device=device),
        pages=torch.cat(noted).to(device),
        owners=owners.to(device),
    )


def note_pages(
    arena: KVArena,
    layer: int,
    newest: NewestRows,
    query: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> None:
    """Score the pages, and store the best in `arena.looked_at`. query: [H, N, D], all rows of the batch. keys: the
    layer's keys in the cache, [H_kv, slots, D]; those of the rows are already there."""
    assert arena.looked_at is not None, "an arena with room for notes"
    budget = arena.budgets.pages
    masses = page_masses(keys, newest, query, scaling=scaling, softcap=softcap)
    numbers = torch.arange(newest.num_pages, device=masses.device)
    is_older = (numbers >= budget.sink) & (numbers <= newest.own[:, None] - budget.newest)
    best = masses.where(is_older, 0.0).topk(budget.looked_at)
    chosen = best.indices.where(best.values > 0, -1).int()
    arena.looked_at[arena.place_of_layer[layer]].index_copy_(0, newest.pages, chosen[newest.owners])


def page_masses(keys: Tensor, newest: NewestRows, query: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """Return the score of each page for each row: float32 [R, pages]. keys: [H_kv, slots, D]; query: [H, N, D], all
    rows of the batch."""
    shape = (len(newest.rows), len(keys), len(query) // len(keys), newest.num_pages * PAGE_SIZE)
    scores = query.new_full(shape, float("-inf"), dtype=torch.float32)
    for own, row, looks in zip(scores, newest.rows, newest.looks, strict=True):
        folded = query[:, row].reshape(len(keys), -1, query.shape[-1]).transpose(1, 2)
        for look in looks:
            # With keys as the left operand, the product is more than twice as fast on a CPU.
            own[..., look.places] = (keys[:, look.slots] @ folded).transpose(1, 2).float()
    scores *= scaling
    if softcap:
        scores = (torch.tanh(scores / softcap) * softcap).where(scores.isfinite(), scores)
    weights: Tensor = scores.softmax(-1).sum((1, 2))
    return weights.view(len(weights), -1, PAGE_SIZE).sum(-1)


@dataclass(frozen=True, slots=True)
class _NewestRow:
    """The newest row of the sequence in `runs`. number: index in the batch. path: the places that the row sees.
    context: number of places that were filled before the batch. last: the row's own place."""

    number: int
    path: Path
    runs: Runs
    context: int
    last: int

    @property
    def begins_page(self) -> bool:
        """Whether the rows of the sequence in this batch are in more than one page."""
        return self.context // PAGE_SIZE < self.last // PAGE_SIZE

    def next_pages(self) -> Tensor:
        """Return the pages to which the sequence may write next, as a tensor on the host."""
        first, last = self.context // PAGE_SIZE, (self.last + _NOTED_TOKENS_AHEAD) // PAGE_SIZE
        return pages_of(self.runs)[first : last + 1]

    def places(self, sliding_window: int | None) -> tuple[range, Sequence[int]]:
        """Return the places that the row sees: those of the shared context, and those of the tree's rows."""
        lowest = max(0, self.path.position + 1 - sliding_window) if sliding_window else 0
        return range(lowest, self.path.shared), self.path.own[max(0, lowest - self.path.shared) :]


def _newest_of_sequences(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Iterable[_NewestRow]:
    """Return the newest row of each sequence, whose rows may be several spans."""
    found: dict[Runs, _NewestRow] = {}
    end = 0
    for span, tree in zip(spans, paths, strict=True):
        first, end = end, end + span.num_rows
        row, path = max(enumerate(tree), key=_position) if tree else (span.num_rows - 1, Path(span.end, ()))
        before = found.get(span.runs)
        if before is None or path.position > before.path.position:
            context = before.context if before else span.context
            found[span.runs] = _NewestRow(first + row, path, span.runs, context, span.context + row)
    return found.values()


def _position(row: tuple[int, Path]) -> int:
    return row[1].position


def _looks(row: _NewestRow, sliding_window: int | None, device: torch.device) -> list[_Look]:
    shared, own = row.places(sliding_window)
    runs = _with_places(row.runs, shared)
    short = [(place, run) for place, run in runs if run.length < _LONG_RUN]
    short += [pair for place in own for pair in _with_places(row.runs, range(place, place + 1))]
    looks = [
        _Look(slice(place, place + run.length), slice(run.start, run.end))
        for place, run in runs
        if run.length >= _LONG_RUN
    ]
    if short:
        places = [each for place, run in short for each in range(place, place + run.length)]
        slots = [slot for _, run in short for slot in run.slots]
        looks.append(_Look(torch.tensor(places, device=device), torch.tensor(slots, device=device)))
    return looks


def _with_places(runs: Runs, places: range) -> list[tuple[int, Run]]:
    """Return the runs that hold the places, each with the first of its places."""
    found, place = [], places.start
    for run in runs_between(runs, places.start, places.stop):
        found.append((place, run))
        place += run.length
    return found
