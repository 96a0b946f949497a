import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from rayspec.choices import Weights
from rayspec.model import matrices
from rayspec.model.matrices import QUANTISED, LinearMap, group_size, num_bytes

COLUMNS = 192
ROW_COUNTS = [*range(1, 10), 33]
KINDS: list[Weights] = ["int8", "int4"]
# Of a product, as a share of its norm: int8 quantises the rows, too.
TOLERANCE = {
    ("int8", torch.float32): 0.015,
    ("int8", torch.bfloat16): 0.02,
    ("int4", torch.float32): 0.01,
    ("int4", torch.bfloat16): 0.01,
}


Make = Callable[[Weights, Sequence[nn.Linear]], LinearMap]


@pytest.fixture(params=["int8-rows", "full-rows", "operators"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """With oneDNN, as on other processors, and as on a GPU."""
    has_int8_rows = request.param == "int8-rows"
    if has_int8_rows and not matrices.has_int8_products(torch.device("cpu")):
        pytest.skip("this processor has no products of int8")
    monkeypatch.setattr(matrices, "has_int8_products", lambda device: has_int8_rows)
    return lambda kind, linears: QUANTISED[kind](linears, use_operators=request.param == "operators")


def linears(
    *sizes: int, bias: Sequence[bool] = (False, False, False), dtype: torch.dtype = torch.float32
) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(COLUMNS, size, bias=has, dtype=dtype) for size, has in zip(sizes, bias, strict=False)]


def dequantised(matrix: LinearMap) -> Tensor:
    """float32 [num_rows, num_columns]: rows of the identity are int8 without loss."""
    dtype = torch.float32 if matrix._bias is None else matrix._bias.dtype
    product: Tensor = matrix(torch.eye(matrix.num_columns, dtype=dtype)).float()
    return (product if matrix._bias is None else product - matrix._bias.float()).T


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_computes_the_product_with_the_dequantised_matrix(make: Make, kind: Weights, dtype: torch.dtype) -> None:
    """The exact one is that of a float32 matrix, whose weights are the same but for the type of its scales."""
    layers = linears(39, 32, 5, bias=(True, False, True), dtype=dtype)
    matrix = make(kind, layers)
    assert (matrix.num_rows, matrix.num_columns) == (76, COLUMNS)
    if dtype == torch.bfloat16:
        assert matrix.num_bytes == num_bytes(kind, 76, COLUMNS)
    bias = torch.cat([layers[0].bias, torch.zeros(32), layers[2].bias]).float()
    exact = dequantised(matrix)
    for num_rows in ROW_COUNTS:
        rows = torch.randn(num_rows, COLUMNS).to(dtype)
        found = matrix(rows)
        assert (found.shape, found.dtype) == ((num_rows, 76), dtype)
        assert relative_error(found, rows.float() @ exact.T + bias) < TOLERANCE[kind, dtype]
        assert torch.equal(matrix(rows[None]), found[None])


@torch.inference_mode()
def test_int4_is_off_by_half_a_level_at_most_but_at_the_ends(make: Make) -> None:
    layers = linears(40)
    groups = layers[0].weight.data.view(40, -1, group_size(COLUMNS))
    off = (dequantised(make("int4", layers)).view_as(groups) - groups).abs()
    low, high = groups.aminmax(dim=-1, keepdim=True)
    assert relative_error(dequantised(make("int4", layers)), layers[0].weight) < 0.09, "levels over the whole range"
    level = (high - low) / 15
    is_within = (groups - low > level) & (high - groups > level)
    assert (off[is_within] <= (level * 0.501).expand_as(off)[is_within]).all()
    assert (off <= level).all()


@pytest.mark.parametrize(("size", "lowest"), [(32, 0), (32, -8), (64, 0), (192, -8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_checkpoint_of_4_bits_stays_as_it_is(make: Make, size: int, lowest: int, dtype: torch.dtype) -> None:
    """Of groups of a size, with a minimum or symmetric, also where a group does not use all levels."""
    [layer] = linears(48)
    levels = torch.randn(48, COLUMNS // size, size).mul_(3).add_(7.5).round_().clamp_(0, 15)
    levels[3, 0] = 5
    scales = torch.rand(48, COLUMNS // size, 1) * 0.01 + 1e-4
    offset = lowest if lowest else -7.3
    layer.weight.data = ((levels + offset) * scales).flatten(1).to(dtype)
    assert relative_error(dequantised(make("int4", [layer])), layer.weight) < 0.02
    layer.weight += torch.randn_like(layer.weight) * 0.2 * layer.weight.std()
    assert relative_error(dequantised(make("int4", [layer])), layer.weight) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(make: Make, kind: Weights, dtype: torch.dtype) -> None:
    matrix = make(kind, linears(32, dtype=dtype))
    rows = torch.randn(9, COLUMNS).to(dtype) * torch.logspace(-3, 3, 9)[:, None].to(dtype)
    together = matrix(rows)
    alone = torch.cat([matrix(row[None]) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0.02, atol=1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_all_is_finite(make: Make, kind: Weights, dtype: torch.dtype) -> None:
    [layer] = linears(32, dtype=dtype)
    layer.weight[:8] = 0
    layer.weight[8:16] = 0.125
    layer.weight[16, 0] = 1000
    layer.weight[17] *= 1e-6
    matrix = make(kind, [layer])
    found = matrix(torch.stack([torch.zeros(COLUMNS), torch.ones(COLUMNS), torch.randn(COLUMNS) * 1e-7]).to(dtype))
    assert found.isfinite().all()
    assert not found[:, :8].any()
    torch.testing.assert_close(found[1, 8:16].float(), torch.full([8], 0.125 * COLUMNS), rtol=0.01, atol=0)


@torch.inference_mode()
def test_a_matrix_is_quantised_in_chunks_as_in_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, COLUMNS)
    whole = [make(kind, linears(170, 50))(rows) for kind in KINDS]
    monkeypatch.setattr(matrices, "_CHUNK_WEIGHTS", 1)
    in_chunks = [make(kind, linears(170, 50))(rows) for kind in KINDS]
    assert all(map(torch.equal, whole, in_chunks))


@torch.inference_mode()
def test_products_of_int8_rows_have_a_kernel() -> None:
    """Without one, oneDNN's reference code takes 300 times as long as the product in full."""
    if not matrices.has_int8_products(torch.device("cpu")):
        pytest.skip("this processor has no products of int8")
    layer, rows = nn.Linear(576, 1536), torch.randn(8, 576)
    seconds = {}
    for name, product in {"int8": QUANTISED["int8"]([layer]), "full": layer}.items():
        product(rows)
        times = []
        for _ in range(5):
            start = time.thread_time()
            product(rows)
            times.append(time.thread_time() - start)
        seconds[name] = min(times)
    assert seconds["int8"] < 30 * seconds["full"]
