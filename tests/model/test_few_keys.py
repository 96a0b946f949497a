import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.attention import pack, pack_branches
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.rows import RowSpan, Runs, runs_of_pages, slots_between
from tests.model.by_definition import CPU, LAYER, again, attend, attention_of, random_cache

DIM, VALUE_DIM, NUM_PAGES = 8, 6, 60
BUDGETS = KeyBudgets(window=KeyBudget(newest=2), pages=KeyBudget(newest=1, looked_at=2))
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap}, id=f"{window}-{softcap}")
    for window, softcap in ((None, None), (30, 2.0), (77, None), (110, 2.0))
]


def _cache(value_dim: int = VALUE_DIM, dtype: torch.dtype = torch.float32, budgets: KeyBudgets = BUDGETS) -> KVCache:
    shape, num_slots = LayerShape(2, DIM, value_dim), NUM_PAGES * PAGE_SIZE
    return random_cache(shape, num_slots, dtype=dtype, num_spare=4, budgets=budgets, notes_pages=True)


def _sequences() -> list[Runs]:
    """Pages in random order; the last two sequences begin with the same five."""
    pages = list(range(NUM_PAGES))
    random.Random(0).shuffle(pages)
    shared, one, two, three, four = pages[:5], pages[5:17], pages[17:30], pages[30:40], pages[40:50]
    return [runs_of_pages(each, PAGE_SIZE) for each in (one, two, [*shared, *three], [*shared, *four])]


def _positions_read(position: int, keys: Keys, looked_at: list[int], sliding_window: int | None) -> list[int]:
    """By definition. looked_at: page numbers, in order of how much, at most two."""
    budget = BUDGETS.of(keys)
    assert budget is not None
    own, lowest = position // PAGE_SIZE, position + 1 - sliding_window if sliding_window else 0
    pages = [*range(own + 1)]
    if own >= budget.num_pages and (sliding_window or 1000) > budget.num_pages * PAGE_SIZE:
        newest = range(own - budget.newest, own + 1)
        older = [*range(budget.sink), *(looked_at if keys == "pages" else ())]
        pages = [*(page for page in older if page * PAGE_SIZE >= lowest and page not in newest), *newest]
    found = itertools.chain.from_iterable(range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages)
    return [each for each in found if lowest <= each <= position]


def _note_at_random(cache: KVCache) -> Tensor:
    """Some notes, of which some say nothing: int32 [pages, 2]."""
    assert cache.looked_at is not None
    notes = torch.stack([torch.randperm(5)[:2] for _ in range(NUM_PAGES)]).int()
    notes = torch.where((notes == 0) | (torch.rand(NUM_PAGES, 2) < 0.2), -1, notes)
    cache.looked_at[cache.place_of_layer[LAYER]] = notes
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
    query, key, _, output = attend(rows, **options)
    cached_keys, cached_values, at = cache.keys[LAYER], cache.values[LAYER], 0
    for span in spans:
        slots = slots_between(span.runs, 0, span.end)
        for position in range(span.context, span.end):
            noted = [page for page in notes[slots[position] // PAGE_SIZE].tolist() if page >= 0]
            where = [slots[each] for each in _positions_read(position, keys, noted, options["sliding_window"])]
            assert torch.equal(cached_keys[:, slots[position]], key[:, at]), "it is written in full"
            expected = attention_of(
                query[:, at], cached_keys[:, where], cached_values[:, where], softcap=options["softcap"]
            )
            torch.testing.assert_close(output[at], expected, atol=2e-5, rtol=2e-5)
            at += 1
    assert not output[at:].any(), "padding rows attend to nothing"


@pytest.mark.parametrize(("dtype", "value_dim"), [(torch.float32, VALUE_DIM), (torch.bfloat16, DIM)])
@pytest.mark.parametrize("keys", ["window", "pages"])
def test_a_budget_beyond_the_context_gives_the_bits_of_all_keys(dtype: torch.dtype, value_dim: int, keys: Keys) -> None:
    cache = _cache(value_dim, dtype, KeyBudgets())
    rows = pack(cache, [RowSpan(place, 90 + at, 1) for at, place in enumerate(_sequences())], device=CPU)
    assert torch.equal(attend(rows)[-1], attend(rows.seeing(keys))[-1])


@pytest.mark.parametrize("keys", ["window", "pages"])
def test_rows_that_read_few_keys_do_not_see_what_others_left_behind(keys: Keys) -> None:
    cache, (place, *_) = _cache(), _sequences()
    filled = slots_between(place, 0, 120)
    for tensor in (cache.keys[LAYER], cache.values[LAYER]):
        kept = tensor[:, filled].clone()
        tensor.fill_(float("nan"))
        tensor[:, filled] = kept
    assert attend(pack(cache, [RowSpan(place, 120, 1)], device=CPU).seeing(keys))[-1].isfinite().all()


def test_rows_of_a_tree_read_all_that_they_see() -> None:
    cache, (place, *_) = _cache(), _sequences()
    rows = pack(cache, [RowSpan(place, 120, 3, (-1, 0, 0))], device=CPU)
    assert torch.equal(attend(rows)[-1], attend(rows.seeing("window"))[-1])


@pytest.mark.parametrize("keys", ["all", "window", "pages"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_branch_sees_what_a_row_of_a_draft_sees(options: dict[str, Any], keys: Keys) -> None:
    cache, places = _cache(), _sequences()
    _note_at_random(cache)
    tokens = [RowSpan(places[0], 121, 1), RowSpan(places[2], 20, 1), RowSpan(places[1], 143, 1)]
    positions = torch.tensor([token.context for token in tokens])
    branches = pack_branches(cache, tokens, 2, positions.repeat_interleave(2)).seeing(keys)
    *own, found = attend(branches, **options)
    for mine in (torch.arange(one, 6, 2) for one in range(2)):
        drafted = again(pack(cache, tokens, device=CPU).seeing(keys), *(each[:, mine] for each in own), **options)
        torch.testing.assert_close(found[mine], drafted, atol=2e-5, rtol=2e-5)
