"""Copies of matrices with 8 or 4 bits a weight, for drafts, which read less memory so.

Measured on two cores with AMX and VNNI (docs/tried.md): int8 weights times int8 rows are as fast as weights alone in
int8 for one row, and faster from two rows on, so a matrix is stored in that one layout. The int4 kernel's time grows
with every row from the fourth on: with more than about six rows the full bfloat16 matrix is faster.
"""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rayspec.choices import Weights
from rayspec.model.matrices import LinearMap, joined_weight

# Columns that share a scale, the first that divides their number: what the kernels take.
_GROUP_SIZES = (128, 64, 32)
# The int4 kernel's layout is made of blocks of 64 rows, the last one of a multiple of 16.
_BLOCK_ROWS = 64
_ROW_MULTIPLE = 16
# Weights that are quantised at a time: their float32 copies stay in the cache.
_CHUNK_WEIGHTS = 2**18
# Rows are scaled to this, not to 127: in bfloat16 the largest number may come out half a percent larger.
_LARGEST_INPUT = 126
_SMALLEST_SCALE = 1e-30


class _QuantisedMatrix(LinearMap):
    """Weights, and the scales that make them numbers."""

    _weight: Tensor
    _scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes

    def forward(self, rows: Tensor) -> Tensor:
        product = self._product(rows.reshape(-1, self.num_columns).contiguous())
        product = product.view(*rows.shape[:-1], self.num_rows)
        return product if self._bias is None else product.add_(self._bias)

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor:
        """[N, num_columns] -> [N, num_rows], new."""


class Int8Matrix(_QuantisedMatrix):
    """Symmetric, a scale for each row of the matrix.

    With oneDNN, rows are made int8 too, each with a scale of its own, so that no row depends on the others.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        weight = joined_weight(linears)
        quantised = torch.empty_like(weight, dtype=torch.int8)
        scales = weight.new_empty(len(weight), dtype=torch.float32)
        for chunk in _chunks(weight):
            quantised[chunk], scales[chunk] = _int8(weight[chunk])
        self._has_int8_rows = has_int8_products(weight.device)
        if self._has_int8_rows:
            self._weight = torch.ops.onednn.qlinear_prepack(quantised, None)
            self._scales = scales / _LARGEST_INPUT
        else:
            self._weight, self._scales = quantised, scales.to(weight.dtype)

    def _product(self, rows: Tensor) -> Tensor:
        if not self._has_int8_rows:
            return torch._weight_int8pack_mm(rows, self._weight, self._scales)
        # float16 cannot hold the product before it is scaled.
        numbers = rows.float() if rows.dtype == torch.float16 else rows
        row_scales = torch.linalg.vector_norm(numbers, torch.inf, -1, keepdim=True).clamp_(min=_SMALLEST_SCALE)
        quantised = (numbers * (_LARGEST_INPUT / row_scales)).round_().to(torch.int8)
        product = torch.ops.onednn.qlinear_pointwise(
            quantised, 1.0, 0, self._weight, self._scales, None, None, 1.0, 0, numbers.dtype, "none", [], ""
        )
        return cast(Tensor, product.mul_(row_scales).to(rows.dtype))


class Int4Matrix(_QuantisedMatrix):
    """A scale and a zero for each group of columns of a row; rows in full precision.

    Raises ValueError for a number of columns that has no groups.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        weight = joined_weight(linears)
        self._group_size = group_size(self.num_columns)
        weight = pad(weight, (0, 0, 0, -self.num_rows % _ROW_MULTIPLE))
        packed, scales = [], []
        for chunk in _chunks(weight):
            levels, scale, zero = _int4(weight[chunk], self._group_size)
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1))
            scales.append(torch.stack([scale.T, zero.T], -1))
        self._weight = torch.cat(packed)
        self._scales = torch.cat(scales, 1)  # [groups of a row, rows, 2]

    def _product(self, rows: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return cast(Tensor, multiply(rows, self._weight, self._group_size, self._scales)[:, : self.num_rows])


QUANTISED: Mapping[Weights, Callable[[Sequence[nn.Linear]], LinearMap]] = {"int8": Int8Matrix, "int4": Int4Matrix}


def has_int8_products(device: torch.device) -> bool:
    """Whether oneDNN multiplies int8 by int8 there exactly: older processors saturate."""
    return (
        device.type == "cpu"
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cpu._is_vnni_supported()
    )


def has_kernels(weights: Weights, device_type: str) -> bool:
    """Whether such copies can be multiplied on a device of this type, as "cpu" or "cuda"."""
    return weights == "int8" or device_type == "cpu"


def group_size(num_columns: int) -> int:
    """Columns of an int4 matrix that share a scale. Raises ValueError where no size fits."""
    size = next((size for size in _GROUP_SIZES if num_columns % size == 0), None)
    if size is None:
        raise ValueError(f"{num_columns} columns cannot be quantised to int4 in groups of {_GROUP_SIZES}")
    return size


def num_bytes(weights: Weights, num_rows: int, num_columns: int, *, dtype: torch.dtype) -> int:
    """Of a copy of a matrix of `dtype`. Raises ValueError for a number of columns that has no groups, as int4."""
    if weights == "int8":
        return num_rows * (num_columns + torch.float32.itemsize)
    num_groups = num_columns // group_size(num_columns)
    padded_rows = num_rows + -num_rows % _ROW_MULTIPLE
    return padded_rows * (num_columns // 2 + num_groups * 2 * dtype.itemsize)


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Of rows; whole blocks but for the last one."""
    step = max(1, _CHUNK_WEIGHTS // (weight.shape[1] * _BLOCK_ROWS)) * _BLOCK_ROWS
    return (slice(start, start + step) for start in range(0, len(weight), step))


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N]: their product is near the weight."""
    numbers = weight.float()
    scales = (numbers.abs().amax(1) / 127).clamp_(min=_SMALLEST_SCALE)
    return (numbers / scales[:, None]).round_().to(torch.int8), scales


def _int4(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels 0 to 15 [N, K]; scales and zeros [N, K / size] of the weight's type.

    (level - 8) * scale + zero is near the weight.
    """
    numbers = weight.float().view(len(weight), -1, size)
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    zero = (low + scale.float() * 8).to(weight.dtype)
    levels = ((numbers - zero) / scale + 8).round_().clamp_(0, 15)
    return levels.flatten(1), scale.squeeze(-1), zero.squeeze(-1)
