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


@dataclass(frozen=True, slots=True)
class NewestRow:
    """The newest row of a sequence. row: its number in the batch. path: what it sees, by places. runs: the sequence's.
    context: places filled before the batch."""

    row: int
    path: Path
    runs: Runs
    context: int


@dataclass(frozen=True, slots=True)
class NewestRows:
    """Those of a batch that are worth a note: R of them. rows: numbers in the batch. seen: by row the runs that it
    sees, each with the place of its first key. own: int64 [R], the number of each row's page in its sequence. pages:
    int64 [M], pages of the cache that get a note; owners: int64 [M], the row that each note is of."""

    rows: Sequence[int]
    seen: Sequence[Sequence[tuple[int, Run]]]
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
    """Of sequences that a draft will not read in full; None where there are none. Of a tree it is the row that is
    farthest from the root."""
    newest = [
        one
        for one in _newest_of_sequences(spans, paths)
        # The draft may reach the next page.
        if not reads_all(budget, one.path.position + PAGE_SIZE, sliding_window)
    ]
    if not newest:
        return None
    noted = [_pages_to_write(one) for one in newest]
    owners = torch.arange(len(newest)).repeat_interleave(torch.tensor([len(pages) for pages in noted]))
    return NewestRows(
        rows=[one.row for one in newest],
        seen=[_seen(one, sliding_window) for one in newest],
        own=torch.tensor([one.path.position // PAGE_SIZE for one in newest], device=device),
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
    numbers = torch.arange(masses.shape[1], device=masses.device)
    is_older = (numbers >= budget.sink) & (numbers <= newest.own[:, None] - budget.newest)
    best = masses.where(is_older, 0.0).topk(budget.looked_at)
    chosen = best.indices.where(best.values > 0, -1).int()
    arena.looked_at[arena.place_of_layer[layer]].index_copy_(0, newest.pages, chosen[newest.owners])


def page_masses(keys: Tensor, newest: NewestRows, query: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """How much each row looks at each page of its sequence: float32 [R, pages]. keys: [H_kv, slots, D]; query:
    [H, N, D], of the batch."""
    num_pages = int(max(place + run.length for seen in newest.seen for place, run in seen) - 1) // PAGE_SIZE + 1
    scores = query.new_full((len(newest.rows), len(query), num_pages * PAGE_SIZE), float("-inf"), dtype=torch.float32)
    for at, (row, seen) in enumerate(zip(newest.rows, newest.seen, strict=True)):
        folded = query[:, row].reshape(len(keys), -1, query.shape[-1])
        for place, run in seen:
            products = (folded @ keys[:, run.start : run.end].transpose(1, 2)).flatten(0, 1).float() * scaling
            scores[at, :, place : place + run.length] = (
                torch.tanh(products / softcap) * softcap if softcap else products
            )
    return scores.softmax(-1).sum(1).view(len(newest.rows), num_pages, PAGE_SIZE).sum(-1)


def _newest_of_sequences(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Iterable[NewestRow]:
    """The rows of a sequence may be several spans."""
    found: dict[Runs, NewestRow] = {}
    end = 0
    for span, tree in zip(spans, paths, strict=True):
        first, end = end, end + span.num_rows
        last = span.end - 1
        row, path = max(enumerate(tree), key=_position) if tree else (span.num_rows - 1, Path(last, (last,)))
        before = found.get(span.runs)
        if before is None or path.position > before.path.position:
            found[span.runs] = NewestRow(first + row, path, span.runs, before.context if before else span.context)
    return found.values()


def _position(row: tuple[int, Path]) -> int:
    return row[1].position


def _pages_to_write(newest: NewestRow) -> Tensor:
    """To which the sequence may write next."""
    first, last = newest.context // PAGE_SIZE, (newest.path.own[-1] + _NOTED_TOKENS_AHEAD) // PAGE_SIZE
    return pages_of(newest.runs)[first : last + 1]


def _seen(newest: NewestRow, sliding_window: int | None) -> list[tuple[int, Run]]:
    path = newest.path
    lowest = max(0, path.position + 1 - sliding_window) if sliding_window else 0
    own = [range(place, place + 1) for place in path.own[max(0, lowest - path.shared) :]]
    found = []
    for places in (range(lowest, path.shared), *own):
        place = places.start
        for run in runs_between(newest.runs, places.start, places.stop):
            found.append((place, run))
            place += run.length
    return found
