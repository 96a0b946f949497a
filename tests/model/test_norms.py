import pytest
import torch
from torch import nn

from rayspec.model.matrices import RmsNorm, as_operator
from tests.families import checkpoint, modules_of


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
