"""Weights of linear layers, laid out as the device multiplies by them fastest.

On a CPU that is oneDNN's blocked layout. Measured on two cores (bfloat16, weights from memory), against the layout of a
checkpoint: 1.3 times as fast for one row, 1.6 times for 8, 1.05 times for 1,024 (docs/tried.md).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Matrix(nn.Module):
    """What `nn.Linear` is to one matrix: to those of several linear layers with the same input, one below the other.

    It holds a copy of their weights. `empty_linears` frees the originals.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([each.weight.data for each in linears]) if len(linears) > 1 else linears[0].weight.data
        self.num_rows, self.num_columns = weight.shape
        self._bias = _joined_bias(linears)
        self._is_blocked = has_blocked_layout(weight)
        # No parameter: nobody can read, save or move a blocked matrix.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_blocked else weight

    def forward(self, rows: Tensor) -> Tensor:
        """[..., num_columns] -> [..., num_rows]."""
        if self._is_blocked:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
            return product
        return linear(rows, self._weight, self._bias)

    def added_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """residual + forward(rows), rounded once."""
        if self._is_blocked:
            total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._weight, self._bias, "add")
            return total
        if self._bias is not None:
            return residual + self(rows)
        return torch.addmm(residual.flatten(0, -2), rows.flatten(0, -2), self._weight.T).view_as(residual)


def is_plain(linear_layer: object) -> TypeGuard[nn.Linear]:
    """It computes what `nn.Linear` does on an ordinary tensor: not quantised, not split over ranks, not fetched."""
    return (
        type(linear_layer) is nn.Linear
        and type(linear_layer.weight) is nn.Parameter
        and type(linear_layer.weight.data) is Tensor
        and not linear_layer._forward_hooks
        and not linear_layer._forward_pre_hooks
    )


def has_blocked_layout(weight: Tensor) -> bool:
    """Whether there is a faster layout for it than a checkpoint's: on the processors where that was measured."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def empty_linears(linears: Sequence[nn.Linear]) -> None:
    """Free their weights: something else holds them now."""
    for each in linears:
        each.weight = nn.Parameter(each.weight.data.new_empty(0), requires_grad=False)


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(each.bias is None for each in linears):
        return None
    return torch.cat(
        [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.data for each in linears]
    )
