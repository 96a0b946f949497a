import itertools

from rayspec.model.rows import MAX_TREE_ROWS, RowSpan, bucket_of, one_run, padded_rows


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
