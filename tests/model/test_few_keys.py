from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.attention import PackedRows, pack, pack_branches, packed_attention
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.rows import RowSpan, Runs, runs_of_pages, slots_between

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, VALUE_DIM, NUM_PAGES = 4, 2, 8, 6, 60
MODULE: Any = SimpleNamespace(layer_idx=3)
BUDGETS = KeyBudgets(window=KeyBudget(newest=2), pages=KeyBudget(newest=1, looked_at=2))
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap}, id=f"{window}-{softcap}")
    for window in (None, 30, 77, 110)
    for softcap in (None, 2.0)
]


def _cache(*, value_dim: int = VALUE_DIM, budgets: KeyBudgets = BUDGETS, dtype: torch.dtype = torch.float32) -> KVCache:
    shapes = {3: LayerShape(KV_HEADS, DIM, value_dim)}
    cache = KVCache(
        shapes, NUM_PAGES * PAGE_SIZE, dtype=dtype, device=CPU, num_spare=4, budgets=budgets, notes_pages=True
    )
    torch.manual_seed(0)
    for tensor in (cache.keys[3], cache.values[3]):
        tensor.copy_(torch.randn_like(tensor) * 2)
    return cache


def _sequences() -> list[Runs]:
    """Pages in random order; the last two sequences begin with the same five."""
    pages = list(range(NUM_PAGES))
    random.Random(0).shuffle(pages)
    shared, one, two, three, four = pages[:5], pages[5:17], pages[17:30], pages[30:40], pages[40:50]
    return [runs_of_pages(each, PAGE_SIZE) for each in (one, two, [*shared, *three], [*shared, *four])]


def _attend(rows: PackedRows, seed: int, value_dim: int = VALUE_DIM, **options: Any) -> tuple[Tensor, ...]:
    """Query, key and value of random rows, and what the rows saw."""
    torch.manual_seed(seed)
    num_rows = len(rows.positions)
    query, key = torch.randn(1, HEADS, num_rows, DIM), torch.randn(1, KV_HEADS, num_rows, DIM)
    value = torch.randn(1, KV_HEADS, num_rows, value_dim)
    own = [each.to(rows.cache.keys[3].dtype) for each in (query, key, value)]
    return (*own, packed_attention(MODULE, *own, None, packed=rows, **options)[0][0])


def _expected(query: Tensor, keys: Tensor, values: Tensor, softcap: float | None, scaling: float = DIM**-0.5) -> Tensor:
    """One row by the book. query: [H, D]; keys: [H_kv, n, D]; returns [H, D_v]."""
    keys, values = (each.double().repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
    scores = (keys @ query.double()[:, :, None])[..., 0] * scaling
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (scores.softmax(-1)[:, None] @ values)[:, 0].float()


def _pages_read(position: int, keys: Keys, looked_at: list[int], sliding_window: int | None) -> list[int]:
    """By the book: the numbers of the pages that a row reads. looked_at: in order of how much, at most two."""
    budget = BUDGETS.of(keys)
    assert budget is not None
    own = position // PAGE_SIZE
    if own < budget.num_pages or (sliding_window or 1000) <= budget.num_pages * PAGE_SIZE:
        return list(range(own + 1))
    lowest = position + 1 - sliding_window if sliding_window else 0
    newest = range(own - budget.newest, own + 1)
    older = [*range(budget.sink), *(looked_at if keys == "pages" else ())]
    return [*(page for page in older if page * PAGE_SIZE >= lowest and page not in newest), *newest]


def _positions(pages: list[int], position: int, sliding_window: int | None) -> list[int]:
    """Those of the pages up to the row's own, within the layer's window."""
    lowest = position + 1 - sliding_window if sliding_window else 0
    found = itertools.chain.from_iterable(range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages)
    return [each for each in found if lowest <= each <= position]


def _note_at_random(cache: KVCache) -> Tensor:
    """Some notes, of which some say nothing: int32 [pages, 2]."""
    assert cache.looked_at is not None
    notes = torch.stack([torch.randperm(5)[:2] for _ in range(NUM_PAGES)]).int()
    notes = torch.where((notes == 0) | (torch.rand(NUM_PAGES, 2) < 0.2), -1, notes)
    cache.looked_at[0] = notes
    return notes


@pytest.mark.parametrize("keys", ["window", "pages"])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_see_the_first_pages_the_noted_ones_and_the_newest(options: dict[str, Any], keys: Keys) -> None:
    """Contexts of all lengths: within the budget, at its edge, far beyond, at either end of a page; and a chain."""
    cache, places = _cache(), _sequences()
    notes = _note_at_random(cache)
    contexts = ((47, 62, 63, 64), (65, 79, 80, 100, 143), (96, 127), (80, 130))
    spans = [RowSpan(place, context, 1) for place, each in zip(places, contexts, strict=True) for context in each]
    spans.append(RowSpan(places[0], 120, 3))
    rows = pack(cache, spans, device=CPU, pad_to=len(spans) + 4).seeing(keys)
    query, key, _, output = _attend(rows, 1, **options)
    at = 0
    for span in spans:
        slots = slots_between(span.runs, 0, span.end)
        for position in range(span.context, span.end):
            noted = [page for page in notes[slots[position] // PAGE_SIZE].tolist() if page >= 0]
            pages = _pages_read(position, keys, noted, options["sliding_window"])
            where = [slots[each] for each in _positions(pages, position, options["sliding_window"])]
            assert torch.equal(cache.keys[3][:, slots[position]], key[0, :, at]), "it is written in full"
            expected = _expected(
                query[0, :, at], cache.keys[3][:, where], cache.values[3][:, where], options["softcap"]
            )
            torch.testing.assert_close(output[at], expected, atol=2e-5, rtol=2e-5)
            at += 1
    assert not output[at:].any(), "padding rows attend to nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [VALUE_DIM, DIM])
@pytest.mark.parametrize("keys", ["window", "pages"])
def test_a_budget_beyond_the_context_gives_the_bits_of_all_keys(dtype: torch.dtype, value_dim: int, keys: Keys) -> None:
    cache, places = _cache(value_dim=value_dim, budgets=KeyBudgets(), dtype=dtype), _sequences()
    rows = pack(cache, [RowSpan(place, 90 + at, 1) for at, place in enumerate(places)], device=CPU)
    *_, whole = _attend(rows, 2, value_dim)
    *_, few = _attend(rows.seeing(keys), 2, value_dim)
    assert torch.equal(whole, few)


def test_rows_that_read_few_keys_do_not_see_what_others_left_behind() -> None:
    cache, (place, *_) = _cache(), _sequences()
    filled = slots_between(place, 0, 120)
    for tensor in (cache.keys[3], cache.values[3]):
        kept = tensor[:, filled].clone()
        tensor.fill_(float("nan"))
        tensor[:, filled] = kept
    few: tuple[Keys, ...] = ("window", "pages")
    for keys in few:
        *_, output = _attend(pack(cache, [RowSpan(place, 120, 1)], device=CPU).seeing(keys), 3)
        assert output.isfinite().all()


def test_rows_of_a_tree_read_all_that_they_see() -> None:
    cache, (place, *_) = _cache(), _sequences()
    rows = pack(cache, [RowSpan(place, 120, 3, (-1, 0, 0))], device=CPU)
    *_, whole = _attend(rows, 4)
    *_, windowed = _attend(rows.seeing("window"), 4)
    assert torch.equal(whole, windowed)


@pytest.mark.parametrize("keys", ["all", "window", "pages"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_branch_sees_what_a_row_of_a_draft_sees(options: dict[str, Any], keys: Keys) -> None:
    cache, places = _cache(), _sequences()
    _note_at_random(cache)
    tokens = [RowSpan(places[0], 121, 1), RowSpan(places[2], 20, 1), RowSpan(places[1], 143, 1)]
    positions = torch.tensor([token.context for token in tokens])
    branches = pack_branches(cache, tokens, 2, positions.repeat_interleave(2)).seeing(keys)
    query, key, value, found = _attend(branches, 5, **options)
    for one in range(2):
        mine = torch.arange(one, 6, 2)
        rows = pack(cache, tokens, device=CPU).seeing(keys)
        own = [each[:, :, mine] for each in (query, key, value)]
        drafted, _ = packed_attention(MODULE, *own, None, packed=rows, **options)
        torch.testing.assert_close(found[mine], drafted[0], atol=2e-5, rtol=2e-5)
