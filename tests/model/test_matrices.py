import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from rayspec.choices import Weights
from rayspec.model import matrices
from rayspec.model.matrices import (
    LinearMap,
    Matrix,
    OperatorMatrix,
    RmsNorm,
    as_operator,
    has_blocked_layout,
    int4_matrix,
    int8_matrix,
    is_plain,
    num_bytes,
)
from tests.families import checkpoint, modules_of

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


QUANTISED: dict[Weights, Callable[..., LinearMap]] = {"int8": int8_matrix, "int4": int4_matrix}
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
        taken = matrix._weight.nbytes + matrix._scales.nbytes
        assert taken == num_bytes(kind, 76, COLUMNS, on_cpu=not isinstance(matrix, OperatorMatrix))
    bias = torch.cat([layers[0].bias, torch.zeros(32), layers[2].bias]).float()
    exact = dequantised(matrix)
    for num_rows in ROW_COUNTS:
        rows = torch.randn(num_rows, COLUMNS).to(dtype)
        found = matrix(rows)
        assert (found.shape, found.dtype) == ((num_rows, 76), dtype)
        assert relative_error(found, rows.float() @ exact.T + bias) < TOLERANCE[kind, dtype]
        assert torch.equal(matrix(rows[None]), found[None])


@torch.inference_mode()
def test_int4_has_16_levels_for_each_group_of_a_row(make: Make) -> None:
    layers = linears(40)
    matrix = make("int4", layers)
    found = dequantised(matrix)
    numbers = found.view(40, len(matrix._scales), -1)
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    levels = (numbers - low) / (high - low).clamp(min=1e-9) * 15
    assert ((levels - levels.round()).abs() < 0.05).float().mean() > 0.9
    assert relative_error(found, layers[0].weight) < 0.09, "levels over the whole range: 0.1"


@pytest.mark.parametrize("use_operators", [False, True])
@torch.inference_mode()
def test_columns_with_large_inputs_have_small_errors(*, use_operators: bool) -> None:
    [layer] = linears(40)
    rows = torch.randn(200, COLUMNS) * torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS)]
    expected = rows @ layer.weight.T
    alike = int4_matrix([layer], use_operators=use_operators)
    fitted = int4_matrix([layer], use_operators=use_operators, mean_squares=rows.square().mean(0))
    assert relative_error(fitted(rows), expected) < 0.93 * relative_error(alike(rows), expected)
    zeros = int4_matrix([layer], use_operators=use_operators, mean_squares=torch.zeros(COLUMNS))
    assert zeros(rows).isfinite().all()


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


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@torch.inference_mode()
def test_it_computes_what_its_linear_layers_do(blocked: bool, dtype: torch.dtype, bias: Sequence[bool]) -> None:
    layers = linears(7, 16, 5, bias=bias, dtype=dtype)
    if blocked and not has_blocked_layout(layers[0].weight):
        pytest.skip("this processor has no such layout for this type")
    matrix = Matrix(layers, blocked=blocked)
    assert (matrix.num_rows, matrix.num_columns) == (28, COLUMNS)
    for shape in ((1,), (3,), (1, 2), (200,)):
        rows = torch.randn(*shape, COLUMNS).to(dtype)
        expected = torch.cat([layer(rows) for layer in layers], -1)
        torch.testing.assert_close(matrix(rows), expected)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_it_adds_to_a_residual_new_and_in_place(blocked: bool, has_bias: bool) -> None:
    [layer] = linears(16, bias=[has_bias])
    matrix = Matrix([layer], blocked=blocked)
    rows, residual = torch.randn(1, 4, COLUMNS), torch.randn(1, 4, 16)
    before, expected = residual.clone(), residual + layer(rows)
    torch.testing.assert_close(matrix.plus(residual, rows), expected)
    assert torch.equal(residual, before)
    total = matrix.add_to(residual, rows)
    assert total.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(residual, expected)


def test_only_plain_linear_layers_are_taken() -> None:
    class Scaled(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) * 2

    hooked, before = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    before.register_forward_pre_hook(lambda module, inputs: None)
    assert is_plain(nn.Linear(4, 4))
    assert not any(map(is_plain, [Scaled(4, 4), hooked, before, nn.Embedding(4, 4), None]))


@pytest.mark.parametrize(("family", "weight_offset"), [("llama", 0.0), ("gemma2", 1.0)])
@torch.inference_mode()
def test_a_familys_norm_becomes_an_operator(family: str, weight_offset: float) -> None:
    norm = modules_of(checkpoint(family)).final_norm
    assert norm is not None
    operator = as_operator(norm)
    assert isinstance(operator, RmsNorm)
    assert operator.weight_offset == weight_offset
    hidden = torch.randn(2, 3, operator.weight.shape[0])
    torch.testing.assert_close(operator(hidden), norm(hidden))


@torch.inference_mode()
def test_other_norms_stay() -> None:
    for norm in (nn.LayerNorm(8), nn.Identity()):
        assert as_operator(norm) is norm
