"""Weights of linear layers in the memory layout that is fastest on the device: on a CPU oneDNN's (docs/tried.md)."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class LinearMap(nn.Module, ABC):
    """Several linear layers with the same input as one matrix, which has the rows of the first layer first."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.num_rows = sum(len(each.weight) for each in linears)
        self.num_columns = linears[0].weight.shape[1]
        biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.data for each in linears]
        self._bias = None if all(each.bias is None for each in linears) else torch.cat(biases)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the weights and their scales."""

    @abstractmethod
    def forward(self, rows: Tensor) -> Tensor:
        """Apply the map to the last dimension: [..., num_columns] -> [..., num_rows]."""

    def plus(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Return residual + forward(rows) as a new tensor."""
        return residual.add(self(rows))

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Add forward(rows) to the residual in place, and return the residual. Both tensors must be contiguous."""
        return residual.add_(self(rows))


class Matrix(LinearMap):
    """A `LinearMap` with weights in full precision.

    It copies the weights, except for a single layer that is not blocked. `empty_linears` frees the layers' own weights.
    blocked: store the weights in oneDNN's layout.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, blocked: bool) -> None:
        super().__init__(linears)
        weight = joined_weight(linears)
        self._is_blocked = blocked
        # Not a parameter: a blocked matrix cannot be read, saved or moved.
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if blocked else weight

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def forward(self, rows: Tensor) -> Tensor:
        if self._is_blocked:
            pointwise = torch.ops.mkldnn._linear_pointwise
            return cast(Tensor, pointwise(rows, self._weight, self._bias, "none", [], ""))
        return linear(rows, self._weight, self._bias)

    def plus(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._is_blocked:
            pointwise = torch.ops.mkldnn._linear_pointwise
            return cast(Tensor, pointwise.binary(rows, residual, self._weight, self._bias, "add"))
        return super().plus(residual, rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._is_blocked:
            return residual.copy_(self.plus(residual, rows))
        residual.view(-1, self.num_rows).addmm_(rows.view(-1, self.num_columns), self._weight.T)
        return residual if self._bias is None else residual.add_(self._bias)


def joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the weight [num_rows, num_columns]: for a single layer its own tensor, for several a copy."""
    return torch.cat([each.weight.data for each in linears]) if len(linears) > 1 else linears[0].weight.data


def is_plain(module: object) -> TypeGuard[nn.Linear]:
    """Return whether this is an ordinary `nn.Linear`: not quantised, not split over ranks, not fetched."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and type(module.weight.data) is Tensor
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def is_plain_or_share(module: object) -> TypeGuard[nn.Linear]:
    """Return whether the module is plain, or DeepSpeed's share of rows for this rank. Such a share is also a plain
    product, because its output is not gathered."""
    is_share = type(module).__name__ == "LinearLayer" and not getattr(module, "gather_output", True)
    return is_plain(module) or is_share


def has_blocked_layout(weight: Tensor) -> bool:
    """Return whether oneDNN's layout is faster for this weight, on the processors where it was measured. In bfloat16
    the layout exists only on processors with AVX-512 or AVX-NE-CONVERT."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def empty_linears(linears: Sequence[nn.Linear]) -> None:
    """Free the weights of layers after another object has taken them."""
    for each in linears:
        each.weight = nn.Parameter(each.weight.data.new_empty(0), requires_grad=False)
