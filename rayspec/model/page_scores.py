"""At which pages the newest rows of sequences look most, noted for drafts that read few keys.

How much a row looks at a page is the sum of its softmax weights there, over the page's keys and the layer's heads. The
note lies with the page that the sequence writes to next, see `KVArena.looked_at`. So a draft finds the choice by the
place of its own row, and all steps of a draft, which write to the same few pages, find the same choice.
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

# A draft begins in a page of the verify's rows or right behind them, and goes on for some tokens.
_NOTED_TOKENS_AHEAD = 64
# A run of so many slots is looked at where it lies; shorter ones are gathered.
_LONG_RUN = 256


@dataclass(frozen=True, slots=True)
class _Look:
    """Keys that a row looks at. places: in its sequence; slots: in the cache."""

    places: slice | Tensor
    slots: slice | Tensor


@dataclass(frozen=True, slots=True)
class NewestRows:
    """Those of a batch that are worth a note: R of them. rows: numbers in the batch. looks: by row. num_pages: of the
    longest sequence. own: int64 [R], the number of each row's page in its sequence. pages: int64 [M], pages of the
    cache that get a note; owners: int64 [M], the row that each note is of."""

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
    """Of sequences that a draft will not read in full, and whose rows lie in more than one page: a look at all keys
    costs half of a verify, and notes are good for some pages. None where there are none. Of a tree it is the row that
    is farthest from the root."""
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
    arena: KVArena, layer: int, newest: NewestRows, query: Tensor, *, scaling: float, softcap: float | None
) -> None:
    """query: [H, N, D], of the batch, whose keys are in the cache."""
    assert arena.looked_at is not None, "an arena with room for notes"
    budget = arena.budgets.pages
    masses = page_masses(arena.keys[layer], newest, query, scaling=scaling, softcap=softcap)
    numbers = torch.arange(newest.num_pages, device=masses.device)
    is_older = (numbers >= budget.sink) & (numbers <= newest.own[:, None] - budget.newest)
    best = masses.where(is_older, 0.0).topk(budget.looked_at)
    chosen = best.indices.where(best.values > 0, -1).int()
    arena.looked_at[arena.place_of_layer[layer]].index_copy_(0, newest.pages, chosen[newest.owners])


def page_masses(keys: Tensor, newest: NewestRows, query: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """How much each row looks at each page of its sequence: float32 [R, pages]. keys: [H_kv, slots, D]; query:
    [H, N, D], of the batch."""
    shape = (len(newest.rows), len(keys), len(query) // len(keys), newest.num_pages * PAGE_SIZE)
    scores = query.new_full(shape, float("-inf"), dtype=torch.float32)
    for own, row, looks in zip(scores, newest.rows, newest.looks, strict=True):
        folded = query[:, row].reshape(len(keys), -1, query.shape[-1]).transpose(1, 2)
        for look in looks:
            # Keys on the left: on a CPU that is more than twice as fast.
            own[..., look.places] = (keys[:, look.slots] @ folded).transpose(1, 2).float()
    scores *= scaling
    if softcap:
        scores = (torch.tanh(scores / softcap) * softcap).where(scores.isfinite(), scores)
    weights: Tensor = scores.softmax(-1).sum((1, 2))
    return weights.view(len(weights), -1, PAGE_SIZE).sum(-1)


@dataclass(frozen=True, slots=True)
class _NewestRow:
    """The newest row of a sequence that lies in `runs`. number: in the batch. path: what it sees. context: places that
    were filled before the batch. last: its own place."""

    number: int
    path: Path
    runs: Runs
    context: int
    last: int

    @property
    def begins_page(self) -> bool:
        return self.context // PAGE_SIZE < self.last // PAGE_SIZE

    def next_pages(self) -> Tensor:
        """To which the sequence may write next, on the host."""
        first, last = self.context // PAGE_SIZE, (self.last + _NOTED_TOKENS_AHEAD) // PAGE_SIZE
        return pages_of(self.runs)[first : last + 1]

    def places(self, sliding_window: int | None) -> tuple[range, Sequence[int]]:
        """What it sees: from the beginning on, and of a tree's own places."""
        lowest = max(0, self.path.position + 1 - sliding_window) if sliding_window else 0
        return range(lowest, self.path.shared), self.path.own[max(0, lowest - self.path.shared) :]


def _newest_of_sequences(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Iterable[_NewestRow]:
    """The rows of a sequence may be several spans."""
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
    """The runs in which the places lie, each with the first of its places."""
    found, place = [], places.start
    for run in runs_between(runs, places.start, places.stop):
        found.append((place, run))
        place += run.length
    return found
