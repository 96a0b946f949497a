"""RMS norms that run as a single operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from rayspec.model.cuda.operations import rms_norm

Norm: TypeAlias = Callable[[Tensor], Tensor]

_CHECK_ROWS = 4


class RmsNorm(nn.Module):
    """The operator `rayspec::rms_norm` over the last dimension. weight: [C]."""

    def __init__(self, weight: nn.Parameter, eps: float, weight_offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.weight_offset = weight_offset

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last dimension: [..., C] in and out."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return rms_norm(rows, self.weight, self.eps, self.weight_offset).view_as(hidden)


def as_operator(norm: nn.Module) -> nn.Module:
    """Return an operator that equals the module on random input, or the module itself if no operator does."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return norm
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_CHECK_ROWS, len(weight), generator=generator).to(weight.device, weight.dtype)
    expected = norm(rows)
    for weight_offset in (0.0, 1.0):
        operator = RmsNorm(weight, eps, weight_offset)
        if torch.allclose(operator(rows), expected, rtol=2 * torch.finfo(weight.dtype).eps, atol=0):
            return operator
    return norm
