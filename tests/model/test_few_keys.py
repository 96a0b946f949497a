import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.attention import Division, pack, pack_branches
from rayspec.model.few_keys import newest_rows, page_masses
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.rows import Path, RowSpan, Runs, runs_of_pages, slots_between
from tests.model.by_definition import CPU, LAYER, again, attend, attention_of, random_cache, weights_of

DIM, VALUE_DIM, NUM_PAGES = 8, 6, 60
BUDGETS = KeyBudgets(window=KeyBudget(newest=2), pages=KeyBudget(newest=1, looked_at=2))
OPTIONS = [
    pytest.param({"sliding_window": window, "softcap": softcap}, id=f"{window}-{softcap}")
    for window, softcap in ((None, None), (30, 2.0), (77, None), (110, 2.0))
]


def _cache(value_dim: int = VALUE_DIM, dtype: torch.dtype = torch.float32, budgets: KeyBudgets = BUDGETS) -> KVCache:
    shape, num_slots = LayerShape(2, DIM, value_dim), NUM_PAGES * PAGE_SIZE
    return random_cache(shape, num_slots, dtype=dtype, num_spare=4, budgets=budgets, notes_pages=True)


def _sequences() -> list[list[int]]:
    """The pages of sequences, in random order; the second and the third sequence begin with the same five."""
    pages = list(range(NUM_PAGES))
    random.Random(0).shuffle(pages)
    return [pages[5:17], [*pages[:5], *pages[30:40]], [*pages[:5], *pages[40:50]], pages[17:30]]


PAGES = _sequences()
RUNS: list[Runs] = [runs_of_pages(pages, PAGE_SIZE) for pages in PAGES]
TREE = (-1, 0, 0, 2, 1, -3)


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
    cache = _cache()
    notes = _note_at_random(cache)
    contexts = ((47, 62, 63, 64), (65, 79, 80, 100, 143, 96, 127), (80, 130))
    spans = [RowSpan(place, context, 1) for place, each in zip(RUNS[:3], contexts, strict=True) for context in each]
    spans.append(RowSpan(RUNS[0], 120, 3))
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
    rows = pack(cache, [RowSpan(place, 90 + at, 1) for at, place in enumerate(RUNS)], device=CPU)
    assert torch.equal(attend(rows)[-1], attend(rows.seeing(keys))[-1])


@pytest.mark.parametrize("keys", ["window", "pages"])
def test_rows_that_read_few_keys_do_not_see_what_others_left_behind(keys: Keys) -> None:
    cache, place = _cache(), RUNS[0]
    filled = slots_between(place, 0, 120)
    for tensor in (cache.keys[LAYER], cache.values[LAYER]):
        kept = tensor[:, filled].clone()
        tensor.fill_(float("nan"))
        tensor[:, filled] = kept
    assert attend(pack(cache, [RowSpan(place, 120, 1)], device=CPU).seeing(keys))[-1].isfinite().all()


def test_rows_of_a_tree_read_all_that_they_see() -> None:
    cache, place = _cache(), RUNS[0]
    rows = pack(cache, [RowSpan(place, 120, 3, (-1, 0, 0))], device=CPU)
    assert torch.equal(attend(rows)[-1], attend(rows.seeing("window"))[-1])


@pytest.mark.parametrize("keys", ["all", "window", "pages"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_branch_sees_what_a_row_of_a_draft_sees(options: dict[str, Any], keys: Keys) -> None:
    cache = _cache()
    _note_at_random(cache)
    tokens = [RowSpan(RUNS[0], 121, 1), RowSpan(RUNS[2], 20, 1), RowSpan(RUNS[3], 143, 1)]
    positions = torch.tensor([token.context for token in tokens])
    branches = pack_branches(cache, tokens, 2, positions.repeat_interleave(2)).seeing(keys)
    *own, found = attend(branches, **options)
    for mine in (torch.arange(one, 6, 2) for one in range(2)):
        drafted = again(pack(cache, tokens, device=CPU).seeing(keys), *(each[:, mine] for each in own), **options)
        torch.testing.assert_close(found[mine], drafted, atol=2e-5, rtol=2e-5)


def _noted(spans: list[RowSpan], division: Division = "runs") -> Tensor:
    """The notes that these rows leave: [pages, 2]."""
    cache = _cache(DIM)
    assert cache.looked_at is not None
    attend(pack(cache, spans, device=CPU, scores_pages=True, division=division))
    assert bool((cache.looked_at[0] == -1).all()), "those of the other layer"
    return cache.looked_at[1]


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (110, None)])
def test_newest_rows_note_the_pages_at_which_they_look_most(window: int | None, softcap: float | None) -> None:
    """A verify of a chain and of a tree, and a chunk of a prompt, of which two share pages."""
    cache = _cache(DIM)
    assert cache.looked_at is not None
    spans = [RowSpan(RUNS[0], 110, 4), RowSpan(RUNS[1], 142, 6, TREE), RowSpan(RUNS[2], 80, 45)]
    rows = pack(cache, spans, device=CPU, scores_pages=True)
    query, *_ = attend(rows, sliding_window=window, softcap=softcap)
    keys = cache.keys[LAYER]
    newest = newest_rows(BUDGETS.pages, spans, rows.paths, window, CPU)
    assert newest is not None
    assert list(newest.rows) == [3, 4 + 3, 10 + 44], "of the tree the first of those that are farthest from the root"
    found = page_masses(keys, newest, query, scaling=8**-0.5, softcap=softcap)
    paths = [Path(113, (113,)), spans[1].paths()[3], Path(124, (124,))]
    for at, (path, row, pages) in enumerate(zip(paths, newest.rows, PAGES[:3], strict=True)):
        slots = slots_between(RUNS[at], 0, path.own[-1] + 1)
        places = torch.tensor([*range(path.shared), *path.own][-window if window else 0 :])
        weights = weights_of(query[:, row], keys[:, [slots[place] for place in places]], softcap=softcap)
        masses = torch.zeros(found.shape[1]).index_add_(0, places // PAGE_SIZE, weights.sum(0).float())
        torch.testing.assert_close(found[at], masses, atol=1e-5, rtol=1e-5)
        older = masses[1 : path.position // PAGE_SIZE]
        best = [page + 1 for page in older.argsort(descending=True)[:2].tolist() if older[page] > 0]
        first, last = spans[at].context // PAGE_SIZE, path.own[-1] // PAGE_SIZE
        for page in pages[first : last + 1]:
            assert [number for number in cache.looked_at[1, page].tolist() if number >= 0] == best
        assert bool((cache.looked_at[1, pages[:first]] == -1).all()), "only where the sequence goes on"


def test_a_note_lies_wherever_the_draft_may_write() -> None:
    """It begins with one of the verify's rows, and goes on behind the last. Rows one by one, as the deterministic mode
    packs them, leave the note of the last."""
    notes = _noted([RowSpan(RUNS[0], 94, 4)])
    written = (notes >= 0).any(-1).nonzero()[:, 0].tolist()
    assert sorted(written) == sorted(PAGES[0][94 // PAGE_SIZE : (97 + 64) // PAGE_SIZE + 1])
    assert torch.equal(notes, _noted([RowSpan(RUNS[0], 94 + row, 1) for row in range(4)], division="places"))


@pytest.mark.parametrize(("context", "num_rows"), [(40, 2), (62, 2), (112, 4)])
def test_sequences_that_drafts_read_in_full_and_rows_within_a_page_leave_no_note(context: int, num_rows: int) -> None:
    assert bool((_noted([RowSpan(RUNS[0], context, num_rows)]) == -1).all())
