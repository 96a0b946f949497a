from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.model.attention import PackedRows, pack, packed_attention
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.page_scores import newest_rows, page_masses
from rayspec.model.rows import Path, RowSpan, Runs, runs_of_pages, slots_between

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, NUM_PAGES = 4, 2, 8, 60
MODULE: Any = SimpleNamespace(layer_idx=3)
BUDGETS = KeyBudgets(pages=KeyBudget(newest=1, looked_at=2))
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap}, id=f"{window}-{softcap}")
    for window in (None, 110)
    for softcap in (None, 2.0)
]
TREE = (-1, 0, 0, 2, 1, -3)


def _cache() -> KVCache:
    # The other layer shows that each layer has notes of its own.
    shapes = {1: LayerShape(1, 4, 4), 3: LayerShape(KV_HEADS, DIM, DIM)}
    cache = KVCache(shapes, NUM_PAGES * PAGE_SIZE, dtype=torch.float32, device=CPU, budgets=BUDGETS, notes_pages=True)
    torch.manual_seed(0)
    cache.keys[3].normal_().mul_(2)
    cache.values[3].normal_()
    return cache


def _sequences() -> list[list[int]]:
    """The pages of three sequences, in random order; the last two begin with the same five."""
    pages = list(range(NUM_PAGES))
    random.Random(0).shuffle(pages)
    return [pages[5:17], [*pages[:5], *pages[30:40]], [*pages[:5], *pages[40:50]]]


def _runs() -> list[Runs]:
    return [runs_of_pages(pages, PAGE_SIZE) for pages in _sequences()]


def _attend(rows: PackedRows, **options: Any) -> tuple[Tensor, Tensor]:
    """The query of random rows, [H, N, D], and what the rows saw."""
    torch.manual_seed(1)
    own = [torch.randn(1, heads, len(rows.positions), DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return own[0][0], packed_attention(MODULE, *own, None, packed=rows, **options)[0]


def _expected(
    query: Tensor, keys: Tensor, places: list[int], slots: list[int], num_pages: int, softcap: float | None
) -> Tensor:
    """By the book, of one row that sees these places: [pages]."""
    masses = torch.zeros(num_pages)
    for head, one in enumerate(query):
        scores = keys[head // (HEADS // KV_HEADS), [slots[place] for place in places]] @ one * DIM**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        for place, weight in zip(places, scores.softmax(-1), strict=True):
            masses[place // PAGE_SIZE] += weight
    return masses


def _places(path: Path, sliding_window: int | None) -> list[int]:
    """By the book: in order of position, within the layer's window."""
    return [*range(path.shared), *path.own][-sliding_window if sliding_window else 0 :]


@pytest.mark.parametrize("options", OPTIONS)
def test_newest_rows_note_the_pages_at_which_they_look_most(options: dict[str, Any]) -> None:
    """A verify of a chain and of a tree, and a chunk of a prompt, of which two share pages."""
    cache, runs = _cache(), _runs()
    assert cache.looked_at is not None
    spans = [RowSpan(runs[0], 110, 4), RowSpan(runs[1], 142, 6, TREE), RowSpan(runs[2], 80, 45)]
    rows = pack(cache, spans, device=CPU, scores_pages=True)
    query, _ = _attend(rows, **options)
    window = options["sliding_window"]
    newest = newest_rows(BUDGETS.pages, spans, rows.paths, window, CPU)
    assert newest is not None
    assert list(newest.rows) == [3, 4 + 3, 10 + 44], "of the tree the first of those that are farthest from the root"
    found = page_masses(cache.keys[3], newest, query, scaling=DIM**-0.5, softcap=options["softcap"])
    paths = [Path(113, (113,)), spans[1].paths()[3], Path(124, (124,))]
    for at, (path, row, pages) in enumerate(zip(paths, newest.rows, _sequences(), strict=True)):
        slots = slots_between(runs[at], 0, path.own[-1] + 1)
        masses = _expected(
            query[:, row], cache.keys[3], _places(path, window), slots, found.shape[1], options["softcap"]
        )
        torch.testing.assert_close(found[at], masses, atol=1e-5, rtol=1e-5)
        older = masses[1 : path.position // PAGE_SIZE]
        best = [page + 1 for page in older.argsort(descending=True)[:2].tolist() if older[page] > 0]
        first, last = spans[at].context // PAGE_SIZE, path.own[-1] // PAGE_SIZE
        for page in pages[first : last + 1]:
            assert [number for number in cache.looked_at[1, page].tolist() if number >= 0] == best
        assert bool((cache.looked_at[1, pages[:first]] == -1).all()), "only where the sequence goes on"
    assert bool((cache.looked_at[0] == -1).all())


def test_a_note_lies_wherever_the_draft_may_write() -> None:
    """It begins with one of the verify's rows, and goes on behind the last."""
    cache, runs = _cache(), _runs()
    assert cache.looked_at is not None
    _attend(pack(cache, [RowSpan(runs[0], 94, 4)], device=CPU, scores_pages=True))
    written = (cache.looked_at[1] >= 0).any(-1).nonzero()[:, 0].tolist()
    assert sorted(written) == sorted(_sequences()[0][94 // PAGE_SIZE : (97 + 64) // PAGE_SIZE + 1])


def test_rows_one_by_one_leave_the_note_of_the_last() -> None:
    """As the deterministic mode packs them."""
    together, single, (runs, *_) = _cache(), _cache(), _runs()
    assert together.looked_at is not None
    assert single.looked_at is not None
    _attend(pack(together, [RowSpan(runs, 94, 4)], device=CPU, scores_pages=True))
    spans = [RowSpan(runs, 94 + row, 1) for row in range(4)]
    _attend(pack(single, spans, device=CPU, scores_pages=True, division="places"))
    assert torch.equal(together.looked_at, single.looked_at)


@pytest.mark.parametrize(("context", "num_rows"), [(40, 2), (62, 2), (112, 4)])
def test_sequences_that_drafts_read_in_full_and_rows_within_a_page_leave_no_note(context: int, num_rows: int) -> None:
    cache, (runs, *_) = _cache(), _runs()
    assert cache.looked_at is not None
    _attend(pack(cache, [RowSpan(runs, context, num_rows)], device=CPU, scores_pages=True))
    assert bool((cache.looked_at == -1).all())
