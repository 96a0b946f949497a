import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayspec.model.kv_cache import KVCache, LayerShape
from rayspec.model.rows import (
    MAX_TREE_ROWS,
    RowSpan,
    bucket_of,
    joined,
    one_run,
    padded_rows,
    runs_between,
    runs_of_pages,
    slots_between,
)

PAGES = st.lists(st.integers(0, 12), unique=True, max_size=9)


@given(PAGES, st.integers(0, 9))
def test_pages_side_by_side_are_one_run(pages: list[int], cut: int) -> None:
    runs = runs_of_pages(pages, 4)
    slots = [4 * page + offset for page in pages for offset in range(4)]
    assert [slot for run in runs for slot in run.slots] == slots
    assert all(run.end != other.start for run, other in itertools.pairwise(runs))
    assert joined(runs_of_pages(pages[:cut], 4), runs_of_pages(pages[cut:], 4)) == runs


@given(PAGES, st.integers(0, 40), st.integers(0, 40))
def test_positions_are_found(pages: list[int], first: int, end: int) -> None:
    runs = runs_of_pages(pages, 4)
    slots = [slot for run in runs for slot in run.slots]
    assert slots_between(runs, first, end) == slots[first:end]
    assert all(run.length > 0 for run in runs_between(runs, first, end))


def spans_of(*num_rows: int) -> list[RowSpan]:
    return [RowSpan(one_run(0, 1024), 10, count) for count in num_rows]


def test_there_are_few_sizes_and_little_padding() -> None:
    sizes = sorted({padded_rows(count) for count in range(1, 513)})
    assert sizes[:9] == [1, 2, 4, 8, 16, 24, 32, 40, 48]
    assert len(sizes) < 32
    assert all(later <= 1.25 * earlier for earlier, later in itertools.pairwise(size for size in sizes if size >= 32))
    assert all(count <= padded_rows(count) == padded_rows(padded_rows(count)) for count in range(1, 700))
    assert padded_rows(700) == 700


def test_single_rows_chains_trees_and_chunks_have_buckets_of_their_own() -> None:
    single, chain, chunk = (
        bucket_of(spans, [()] * 3) for spans in (spans_of(1, 1, 1), spans_of(1, 5, 2), spans_of(1, 200, 1))
    )
    tree = bucket_of(spans_of(1, 5, 2), [(), RowSpan(one_run(0, 64), 10, 5, (-1, 0, 0, 1, 1)).paths(), ()])
    assert (single.num_rows, single.num_sequences, single.max_rows) == (4, 4, 1)
    assert (chain.num_rows, chain.max_rows, chain.is_tree) == (8, MAX_TREE_ROWS, False)
    assert (tree.num_rows, tree.max_rows, tree.is_tree) == (8, MAX_TREE_ROWS, True)
    assert chunk.max_rows == 224


def test_moving_in_the_cache_may_overlap() -> None:
    for sources, destinations in ((range(2, 9), range(5, 12)), (range(5, 12), range(2, 9)), ((1, 9, 4), (9, 0, 1))):
        layers = {0: LayerShape(2, 4, 3), 5: LayerShape(1, 2, 2)}
        cache = KVCache(layers, 16, dtype=torch.float32, device=torch.device("cpu"))
        tensors = [*cache.keys.values(), *cache.values.values()]
        before = [tensor.normal_().clone() for tensor in tensors]
        cache.move(torch.tensor(sources), torch.tensor(destinations))
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor[:, destinations], old[:, sources])
            others = [slot for slot in range(16) if slot not in destinations]
            assert torch.equal(tensor[:, others], old[:, others])
