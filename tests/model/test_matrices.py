from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from rayspec.model.matrices import Matrix, RmsNorm, as_operator, has_blocked_layout, is_plain
from tests.families import checkpoint, modules_of

SHAPES = [(1, 16), (3, 16), (1, 2, 16), (200, 16)]


def linears(
    *sizes: int, bias: Sequence[bool] = (False, False, False), dtype: torch.dtype = torch.float32
) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, size, bias=has, dtype=dtype) for size, has in zip(sizes, bias, strict=False)]


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (True, False, True)])
@torch.inference_mode()
def test_it_computes_what_its_linear_layers_do(blocked: bool, dtype: torch.dtype, bias: Sequence[bool]) -> None:
    layers = linears(7, 16, 5, bias=bias, dtype=dtype)
    if blocked and not has_blocked_layout(layers[0].weight):
        pytest.skip("this processor has no such layout for this type")
    matrix = Matrix(layers, blocked=blocked)
    assert (matrix.num_rows, matrix.num_columns) == (28, 16)
    for shape in SHAPES:
        rows = torch.randn(shape).to(dtype)
        expected = torch.cat([layer(rows) for layer in layers], -1)
        torch.testing.assert_close(matrix(rows), expected)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_it_adds_to_a_residual_new_and_in_place(blocked: bool, has_bias: bool) -> None:
    [layer] = linears(16, bias=[has_bias])
    matrix = Matrix([layer], blocked=blocked)
    rows, residual = torch.randn(1, 4, 16), torch.randn(1, 4, 16)
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
