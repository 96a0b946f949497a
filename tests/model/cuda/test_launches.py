"""The kernels in Triton's interpreter. What runs on a GPU is the same source, compiled."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayspec.model.cuda import launches, reference
from rayspec.model.kv_cache import PAGE_SIZE
from tests.exhaustive import few_of
from tests.model.cuda.batches import Rows, lay_out, random_rows

SCALING = 0.11
# They have tiles of other sizes.
DTYPES = few_of([torch.float32, torch.float16], [torch.float32])
DECODE_OR_VERIFY, LONG, CHUNK = (8, 256), (8, 1024), (128, 1024)
# Branches, two of which follow filled positions.
TREE = (-1, 0, 0, 1, -3, 4, -1)


@pytest.fixture
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products add up in the order of the inner axis. Libraries of matrix products choose kernels by
    the shapes, whose sums round differently on some processors."""

    def product(left: NDArray[Any], right: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
        left, right = left.astype(dtype or left.dtype), right.astype(dtype or right.dtype)
        total = np.zeros((*left.shape[:-1], right.shape[-1]), left.dtype)
        for column in range(left.shape[-1]):
            total += left[..., column, None] * right[..., None, column, :]
        return total

    monkeypatch.setattr(np, "matmul", product)


def _attend(
    sequences: list[Rows],
    *,
    bucket: tuple[int, int] = DECODE_OR_VERIFY,
    window: int = 0,
    softcap: float = 0.0,
    **layout: Any,
) -> Tensor:
    batch = lay_out(sequences, **layout)
    return launches.attend(*batch.values(), SCALING, window, softcap, PAGE_SIZE, *bucket).run()


def _agree(sequences: list[Rows], **options: Any) -> None:
    """The kernels and the reference."""
    found = _attend(sequences, num_padding=3, seed=1, **options)
    bucket = options.pop("bucket", DECODE_OR_VERIFY)
    window, softcap = options.get("window", 0), options.get("softcap", 0.0)
    batch = lay_out(sequences, num_padding=3, seed=2)
    expected = reference.attend(*batch.values(), SCALING, window, softcap, PAGE_SIZE, *bucket)
    tolerance = 1e-5 if found.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert not found[-3:].any(), "padding rows are zeros"


@pytest.mark.parametrize(
    "options",
    few_of(
        [{}, {"window": 1}, {"window": 21}, {"softcap": 2.0}, {"window": 70, "softcap": 1.0}],
        [{"window": 70, "softcap": 1.0}],
    ),
)
@pytest.mark.parametrize("parents", [(), TREE], ids=["chain", "tree"])
def test_ragged_rows_see_what_they_should(options: dict[str, Any], parents: tuple[int, ...]) -> None:
    sequences = [random_rows(37, 1), random_rows(100, 7, parents=parents), random_rows(9, 0), random_rows(0, 8)]
    _agree(sequences, **options)


@pytest.mark.parametrize("parents", [(), TREE], ids=["chain", "tree"])
def test_pages_outside_the_window_are_not_read(parents: tuple[int, ...]) -> None:
    """Other sequences may have written NaN there. The window of the first row begins in the middle of a tile."""
    batch = lay_out([random_rows(203, 7, parents=parents, dtype=torch.float16)])
    arguments = (SCALING, 20, 0.0, PAGE_SIZE, *DECODE_OR_VERIFY)
    expected = launches.attend(*batch.values(), *arguments).run()
    for page in batch["block_table"][0, : (203 - 20 - 3) // PAGE_SIZE].tolist():
        for cached in (batch["keys"], batch["values"]):
            cached[:, page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = math.nan
    assert torch.equal(launches.attend(*batch.values(), *arguments).run(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", few_of([0, 10, 300], (300,)))
@pytest.mark.parametrize("parents", [(), TREE], ids=["chain", "tree"])
def test_splits_are_merged(window: int, parents: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contexts that end in, at the edge of and behind the first of four splits of 256 places."""
    splits = launches.choose_splits(num_kv_heads=1, num_sequences=5, max_rows=8, max_context=1024)
    assert splits == launches.Splits(4, 256, 0, 4)
    lengths, options = [(255, 1), (256, 1), (520, 2), (3, 2)], {"heads": (2, 1), "dtype": dtype}
    chains = [random_rows(context, rows, **options) for context, rows in lengths]
    _agree([random_rows(253, 7, parents=parents, **options), *chains], bucket=LONG, window=window)


@pytest.mark.parametrize("group", few_of(range(1, 9), (3, 8)))
@pytest.mark.parametrize(("num_kv_heads", "dtype"), [(1, torch.float32), (2, torch.float16)])
def test_any_number_of_query_heads_shares_a_key_head(group: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    heads = (group * num_kv_heads, num_kv_heads)
    _agree([random_rows(30, 5, heads=heads, dtype=dtype), random_rows(70, 8, heads=heads, dtype=dtype)])


@pytest.mark.parametrize("dim", few_of([64, 80, 96, 112, 128, 256], (80, 256)))
@pytest.mark.parametrize("bucket", [DECODE_OR_VERIFY, CHUNK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_any_size(dim: int, bucket: tuple[int, int], dtype: torch.dtype) -> None:
    _agree([random_rows(70, 3, dim=dim, dtype=dtype), random_rows(2, 1, dim=dim, dtype=dtype)], bucket=bucket)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", few_of([0, 50], [50]))
@pytest.mark.parametrize("parents", [(), TREE], ids=["chain", "tree"])
def test_chunks_of_prompts(parents: tuple[int, ...], window: int, dtype: torch.dtype) -> None:
    """More rows than a tile, beside a decode and a verify."""
    lengths = ((40, 100), (0, 128), (77, 1))
    sequences = [random_rows(context, rows, heads=(2, 1), dtype=dtype) for context, rows in lengths]
    sequences.append(random_rows(60, 7, parents=parents, heads=(2, 1), dtype=dtype))
    _agree(sequences, bucket=CHUNK, window=window)


@pytest.mark.usefixtures("products_in_one_order")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bucket", "window", "heads"),
    few_of(
        [(bucket, *rest) for bucket in (DECODE_OR_VERIFY, LONG) for rest in ((0, (2, 1)), (40, (4, 2)))],
        [(DECODE_OR_VERIFY, 0, (2, 1))],
    ),
)
def test_the_same_bits_in_any_batch(
    dtype: torch.dtype, bucket: tuple[int, int], window: int, heads: tuple[int, int]
) -> None:
    """Verified together, decoded one by one, among others in any order, on other pages, with padding."""
    longest = 520 if bucket == LONG else 240
    contexts = [(longest, 3), (50, 5), (longest // 2 - 5, 4), (7, 1)]
    sequences = [random_rows(context, rows, heads=heads, dtype=dtype) for context, rows in contexts]
    sequences.append(random_rows(longest // 2, 7, parents=TREE, heads=heads, dtype=dtype))
    options: Any = {"bucket": bucket, "window": window}
    alone = [_attend([rows], **options) for rows in sequences]
    for seed, order in enumerate(itertools.islice(itertools.permutations(range(5)), 0, None, 61)):
        together = _attend([sequences[index] for index in order], num_padding=seed, seed=seed, **options)
        expected = torch.cat([alone[index] for index in order])
        _same(together[: len(expected)], expected, f"in the order {order}")
    decodes = [rows.alone(row) for rows in sequences[:4] for row in range(len(rows))]
    _same(_attend(decodes, seed=7, **options), torch.cat(alone[:4]), "decoded one by one")
    firsts = [_attend([rows.first(1)], seed=8, **options) for rows in sequences]
    _same(torch.cat(firsts), torch.cat([found[:1] for found in alone]), "the first rows alone")


@pytest.mark.parametrize(
    ("window", "num_programs"), few_of(list(itertools.product([0, 300], [1, 1000])), [(0, 1000), (300, 1)])
)
def test_longer_contexts_have_longer_splits(window: int, num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits of 256, 512 or 1,024 places, by one program or by two."""
    monkeypatch.setattr(launches, "MOST_SPLITS", 2)
    monkeypatch.setattr(launches, "_NUM_PROGRAMS", num_programs)
    lengths = ((511, 1), (510, 3), (1023, 1), (1100, 5), (3, 2))
    sequences = [random_rows(context, rows, heads=(2, 1)) for context, rows in lengths]
    _agree(sequences, bucket=(8, 1536), window=window)


@pytest.mark.parametrize("max_context", [1, 100, 4096, 131072, 10**6])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 40])
@pytest.mark.parametrize("max_rows", [1, 64, 65])
def test_splits_cover_the_bucket_and_are_whole_tiles(max_context: int, num_kv_heads: int, max_rows: int) -> None:
    splits = launches.choose_splits(
        num_kv_heads=num_kv_heads, num_sequences=4, max_rows=max_rows, max_context=max_context
    )
    assert max_context <= splits.number * splits.least_length << splits.doublings
    assert 1 <= splits.programs <= splits.number <= 64
    assert splits.number == 1 or splits.least_length % 256 == 0
    assert max_rows <= launches.MAX_SMALL_ROWS or splits.number == 1


def test_a_cache_beyond_32_bits_is_refused() -> None:
    batch = lay_out([random_rows(5, 1)])
    batch["values"] = torch.empty(1, 2**24, 128, device="meta")
    with pytest.raises(ValueError, match="use fewer slots"):
        launches.attend(*batch.values(), SCALING, 0, 0.0, PAGE_SIZE, *DECODE_OR_VERIFY)


@pytest.mark.parametrize("size", [64, 100, 1536])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(size: int, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    hidden, weight = torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    found = launches.rms_norm(hidden, weight, 1e-5, offset).run()
    _close_to_the_last_place(found, reference.rms_norm(hidden, weight, 1e-5, offset))
    _same(launches.rms_norm(hidden[3:4], weight, 1e-5, offset).run(), found[3:4], "alone")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [100, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated(activation: str, size: int, dtype: torch.dtype) -> None:
    packed = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype) * 4
    _close_to_the_last_place(launches.gated(packed, activation).run(), reference.gated(packed, activation))


@pytest.mark.parametrize(("heads", "dim", "rotary"), [((4, 2), 64, 64), ((3, 1), 80, 32), ((2, 2), 96, 96)])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_write(heads: tuple[int, int], dim: int, rotary: int, normalised: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    packed = torch.randn(5, (heads[0] + 2 * heads[1]) * dim).to(dtype)
    cos, sin = torch.randn(2, 5, rotary).to(dtype)
    norms = torch.randn(2, dim).to(dtype) if normalised else (None, None)
    slots = torch.tensor([3, 9, 30, 0, 7])
    caches = torch.randn(heads[1], 31, dim).to(dtype).repeat(4, 1, 1, 1)
    found = launches.rotate_and_write(packed, cos, sin, slots, *caches[:2], heads[0], *norms, 1e-6).run()
    expected = reference.rotate_and_write(packed, cos, sin, slots, *caches[2:], heads[0], *norms, 1e-6)
    compare = _close_to_the_last_place if normalised else torch.testing.assert_close
    exact: Any = {} if normalised else {"atol": 0, "rtol": 0}
    compare(found, expected, **exact)
    compare(caches[0], caches[2], **exact)
    assert torch.equal(caches[1], caches[3]), "values are copied"


# Whole tiles and parts of them, with one tile of columns and several; groups of int4.
PRODUCT_SIZES = [(48, 64, 64), (75, 352, 32), (20, 256, 128)]


def _quantised(num_outputs: int, size: int, group: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weights and scales for int8, and for int4."""
    generator = torch.Generator().manual_seed(size)
    int8 = torch.randint(-127, 128, (num_outputs, size), dtype=torch.int8, generator=generator)
    int4 = torch.randint(-(2**31), 2**31, (num_outputs, size // 8), dtype=torch.int32, generator=generator)
    scales = torch.rand(num_outputs, generator=generator) * 0.01
    return (int8, scales), (int4, torch.randn(size // group, num_outputs, 2, generator=generator) * 0.1)


def _matrices(num_outputs: int, size: int, group: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    int8, (int4, scales) = _quantised(num_outputs, size, group)
    full = torch.randn(num_outputs, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [(full, None), int8, (int4, scales.to(dtype))]


@pytest.mark.parametrize(
    ("sizes", "num_rows", "dtype"),
    few_of(
        list(itertools.product(PRODUCT_SIZES, (1, 16, 33), (torch.float32, torch.float16))),
        [
            *((sizes, 33, torch.float16) for sizes in PRODUCT_SIZES),
            (PRODUCT_SIZES[0], 1, torch.float32),
            (PRODUCT_SIZES[2], 16, torch.float32),
        ],
    ),
)
def test_products(sizes: tuple[int, int, int], num_rows: int, dtype: torch.dtype) -> None:
    num_outputs, size, group = sizes
    wide = torch.randn(num_rows, size + 5, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    output, bias = torch.randn(num_rows, num_outputs).to(dtype), torch.randn(num_outputs).to(dtype)
    for rows in (wide[:, :size].contiguous(), wide[:, 5:]):
        for matrix in _matrices(num_outputs, size, group, dtype):
            for also, adds in ((None, False), (bias, True)):
                found, expected = output.clone(), output.clone()
                launches.product(found, rows, *matrix, also, adds=adds).run()
                reference.product(expected, rows, *matrix, also, adds=adds)
                _close_to_the_largest(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("products_in_one_order")
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    def product(rows: Tensor, matrix: tuple[Tensor, Tensor | None]) -> Tensor:
        output = rows.new_empty(len(rows), 40)
        launches.product(output, rows, *matrix, None, adds=False).run()
        return output

    rows = torch.randn(64, 96).to(dtype)
    for matrix in _matrices(40, 96, 32, dtype):
        for most, fewer in ((8, (1, 7)), (16, (9,)), (40, (33,))):
            some = product(rows[:most], matrix)
            for count in fewer:
                _same(product(rows[:count], matrix), some[:count], f"{count} rows")
    if dtype == torch.float16:
        full = _matrices(40, 576, 32, dtype)[0]
        rows = torch.randn(64, 576).to(dtype)
        most = product(rows, full)
        for count in (1, 8, 9, 16, 17, 33):
            _same(product(rows[:count], full), most[:count], f"{count} rows in full")


def _close_to_the_largest(found: Tensor, expected: Tensor) -> None:
    """A sum of products of both signs may be small by chance."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-3
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def _same(found: Tensor, expected: Tensor, message: str) -> None:
    assert torch.equal(found, expected), message


def _close_to_the_last_place(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-6 if found.dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_places_in_a_few_pages_may_stand_for_positions() -> None:
    """As rows that read a window have them: int32, and one for each sequence."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(size, generator=generator) for size in ((4, 4, 8), (2, 256, 8), (2, 256, 8)))
    table = torch.tensor([[7, 2, 13, 3], [5, 0, 9, 1], [11, 4, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32)
    contexts = torch.tensor([48, 63, 17, 0], dtype=torch.int32)
    arguments = (query, keys, values, table, starts, contexts, contexts, None, None)
    found = launches.attend(*arguments, SCALING, 0, 0.0, PAGE_SIZE, 1, 4 * PAGE_SIZE).run()
    expected = reference.attend(*arguments, SCALING, 0, 0.0, PAGE_SIZE, 1, 4 * PAGE_SIZE)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [1, 1027])
def test_noise(vocab_size: int) -> None:
    """Extreme keys, and numbers for which 1 + size is rounded to 1."""
    keys = torch.tensor([[0, 1, -1, 2**62 + 1, -(2**63), 7919], [0, 7 << 33, -1, 1, 2**63 - 1, 3]])
    found = launches.gumbel(keys, vocab_size).run()
    assert found is not None
    torch.testing.assert_close(found, reference.gumbel(keys, vocab_size), rtol=0, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 50, 5000])
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["random", "equal ones"])
def test_the_cut_to_top_p(vocab_size: int, step: float) -> None:
    """Random scores, of which some are forbidden, and scores of which many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    top_p = torch.tensor([0.9, 0.95, 0.5, 1e-9, 1 - 1e-9, 0.1], dtype=torch.float64).unsqueeze(1)
    scores = 4 * torch.randn(len(top_p), vocab_size, generator=generator)
    scores = (scores / step).round() * step if step else scores
    scores[:, 1::5] = -math.inf
    scores[4] *= 30
    scores -= scores.amax(1, keepdim=True)
    expected = scores.clone()
    reference.cut_to_top_p(expected, top_p)
    launches.cut_to_top_p(scores, top_p).run()
    assert torch.equal(scores, expected)
