import random

import pytest
import torch

from rayspec.model.attention import Division, pack
from rayspec.model.few_keys import newest_rows, page_masses
from rayspec.model.kv_cache import PAGE_SIZE, KeyBudget, KeyBudgets, KVCache, LayerShape
from rayspec.model.rows import Path, RowSpan, Runs, runs_of_pages, slots_between
from tests.model.by_definition import CPU, LAYER, attend, random_cache, weights_of

NUM_PAGES = 60
BUDGETS = KeyBudgets(pages=KeyBudget(newest=1, looked_at=2))
TREE = (-1, 0, 0, 2, 1, -3)


def _cache() -> KVCache:
    return random_cache(LayerShape(2, 8, 8), NUM_PAGES * PAGE_SIZE, budgets=BUDGETS, notes_pages=True)


def _sequences() -> list[list[int]]:
    """The pages of three sequences, in random order; the last two begin with the same five."""
    pages = list(range(NUM_PAGES))
    random.Random(0).shuffle(pages)
    return [pages[5:17], [*pages[:5], *pages[30:40]], [*pages[:5], *pages[40:50]]]


RUNS: list[Runs] = [runs_of_pages(pages, PAGE_SIZE) for pages in _sequences()]


def _noted(spans: list[RowSpan], division: Division = "runs") -> torch.Tensor:
    """The notes that these rows leave: [pages, 2]."""
    cache = _cache()
    assert cache.looked_at is not None
    attend(pack(cache, spans, device=CPU, scores_pages=True, division=division))
    assert bool((cache.looked_at[0] == -1).all()), "those of the other layer"
    return cache.looked_at[1]


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (110, None)])
def test_newest_rows_note_the_pages_at_which_they_look_most(window: int | None, softcap: float | None) -> None:
    """A verify of a chain and of a tree, and a chunk of a prompt, of which two share pages."""
    cache = _cache()
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
    for at, (path, row, pages) in enumerate(zip(paths, newest.rows, _sequences(), strict=True)):
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
    assert sorted(written) == sorted(_sequences()[0][94 // PAGE_SIZE : (97 + 64) // PAGE_SIZE + 1])
    assert torch.equal(notes, _noted([RowSpan(RUNS[0], 94 + row, 1) for row in range(4)], division="places"))


@pytest.mark.parametrize(("context", "num_rows"), [(40, 2), (62, 2), (112, 4)])
def test_sequences_that_drafts_read_in_full_and_rows_within_a_page_leave_no_note(context: int, num_rows: int) -> None:
    assert bool((_noted([RowSpan(RUNS[0], context, num_rows)]) == -1).all())
