"""What fused layers multiply by: weights of linear layers in the memory layout that is fastest on the device (on a CPU
oneDNN's), copies with 8 or 4 bits per weight by which drafts read less memory, and RMS norms as a single operator.

docs/tried.md has measurements: int8 products are fastest with int8 rows; with more than about six rows the full
bfloat16 matrix is faster than int4.
"""

from __future__ import annotations

import copy
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from rayspec.choices import Weights
from rayspec.model.cuda.operations import product, rms_norm
from rayspec.model.cuda.reference import packed_levels


class LinearMap(nn.Module, ABC):
    """Several linear layers with the same input as one matrix, which has the rows of the first layer first.
    has_own_bits: it has the int4 weights of a checkpoint of 4 bits."""

    has_own_bits = False

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.num_rows = sum(len(each.weight) for each in linears)
        self.num_columns = linears[0].weight.shape[1]
        biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias.data for each in linears]
        self._bias = None if all(each.bias is None for each in linears) else torch.cat(biases)

    @abstractmethod
    def forward(self, rows: Tensor) -> Tensor:
        """Apply the map to the last dimension: [..., num_columns] -> [..., num_rows]."""

    def plus(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Return residual + forward(rows) as a new tensor."""
        return residual.add(self(rows))

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Add forward(rows) to the residual in place, and return the residual. Both tensors must be contiguous."""
        return residual.add_(self(rows))


class OperatorMatrix(LinearMap):
    """A `LinearMap` whose product is the operator `rayspec::product`, for up to `most` rows, or any number if it is
    None. weight, scales: of the operator."""

    def __init__(
        self, linears: Sequence[nn.Linear], weight: Tensor, scales: Tensor | None = None, *, most: int | None = None
    ) -> None:
        super().__init__(linears)
        self._weight, self._scales, self._most = weight, scales, most

    def in_one_order(self) -> OperatorMatrix | None:
        """Return the same map, by the same weights, in which a row has the same bits among up to `ONE_ORDER` rows.
        Return None for quantised weights."""
        if self._scales is not None:
            return None
        twin = copy.copy(self)
        twin._most = ONE_ORDER
        return twin

    def forward(self, rows: Tensor) -> Tensor:
        if not self._has_kernel(rows):
            return linear(rows, self._weight, self._bias)
        return self._product(rows.new_empty(*rows.shape[:-1], self.num_rows), rows, adds=False)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._has_kernel(rows):
            return self._product(residual, rows, adds=True)
        return _add_product(residual, rows, self._weight, self._bias)

    def _has_kernel(self, rows: Tensor) -> bool:
        return self._most is None or rows.numel() <= self._most * self.num_columns

    def _product(self, output: Tensor, rows: Tensor, *, adds: bool) -> Tensor:
        flat = rows.reshape(-1, self.num_columns)
        product(output.view(-1, self.num_rows), flat, self._weight, self._scales, self._bias, adds)
        return output


class Matrix(LinearMap):
    """A `LinearMap` with weights in full precision, whose product is torch's.

    It copies the weights, except for a single layer that is not blocked. `empty_linears` frees the layers' own weights.
    blocked: store the weights in oneDNN's layout.
    """

    def __init__(self, linears: Sequence[nn.Linear], *, blocked: bool) -> None:
        super().__init__(linears)
        weight = joined_weight(linears)
        self._is_blocked = blocked
        # Not a parameter: a blocked matrix cannot be read, saved or moved.
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if blocked else weight

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
        return _add_product(residual, rows, self._weight, self._bias)


def full_matrix(linears: Sequence[nn.Linear], *, use_operators: bool) -> LinearMap:
    """Return the linear layers as a matrix in full precision, whose products are the fastest on their device.
    use_operators: multiply few rows in 16 bits by the operator `rayspec::product`."""
    if use_operators and linears[0].weight.dtype.itemsize == 2:
        return OperatorMatrix(linears, joined_weight(linears).contiguous(), most=FEW_ROWS_ON_GPU)
    return Matrix(linears, blocked=not use_operators and has_blocked_layout(linears[0].weight))


def _add_product(residual: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    residual.view(-1, len(weight)).addmm_(rows.view(-1, weight.shape[1]), weight.T)
    return residual if bias is None else residual.add_(bias)


class Bfloat16Matrix(LinearMap):
    """A copy of float32 layers in bfloat16. The product of float32 rows is float32. Processors without instructions
    for bfloat16 are fast at products of one row only, so there each row has its own."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        weight = joined_weight(linears).bfloat16()
        self._is_blocked = has_blocked_layout(weight)
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_blocked else weight

    def forward(self, rows: Tensor) -> Tensor:
        if self._is_blocked:
            product = torch.ops.mkldnn._linear_pointwise(rows.bfloat16(), self._weight, None, "none", [], "")
        else:
            product = torch.cat([linear(row, self._weight) for row in torch.split(rows.bfloat16(), 1, -2)], -2)
        product = cast(Tensor, product.to(rows.dtype))
        return product if self._bias is None else product.add_(self._bias)


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


def has_matrix(module: object) -> TypeGuard[nn.Linear]:
    """Return whether a product with a matrix computes what the module does: it is plain, or a `SummedLinear`."""
    return is_plain(module) or type(module) is SummedLinear


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


def random_rows(linear: nn.Linear) -> Tensor:
    """Return a few rows for a test of the layer, the same in every call: [1, N, in_features]."""
    return torch.randn(1, 4, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight)


def empty_linears(linears: Sequence[nn.Linear]) -> None:
    """Free the weights of layers after another object has taken them. They are then matrices without rows."""
    for each in linears:
        each.weight = nn.Parameter(each.weight.data[:0].clone(), requires_grad=False)


# Columns of a row with the same scale in an int4 copy. On a GPU, tiles are measured for the large groups, of which the
# first that divides the number of columns is used. The share of a group's range that the levels span at first has the
# smallest squared error, both on random numbers and on a trained model.
_GROUP, _GPU_GROUPS = 32, (128, 64, 32)
_SPANS = {128: 0.93, 64: 0.96, 32: 0.98}
# How often levels and scales are then fitted to each other, and what a column counts at least, as a share of the mean.
_NUM_FITS, _LEAST_IMPORTANCE = 2, 0.01
# Weights that have 4 bits already: checkpoints have groups of 32, or of several times 32. How many steps at least the
# numbers of a group span, how far they are from a level at most, in steps, and the share of such groups.
_FEWEST_STEPS, _OFF_LEVEL, _MOST = 5, 0.05, 0.9
# The int4 kernel's layout has blocks of 64 rows; the last block has a multiple of 16 rows.
_BLOCK_ROWS = 64
_ROW_MULTIPLE = 16
# With more rows an int4 product is no faster than one in full (measured on a CPU; for a GPU see docs/gpu.md).
FEW_ROWS, FEW_ROWS_ON_GPU = 4, 16
# Up to so many rows, the sums of `rayspec::product` in full have the same order.
ONE_ORDER = 64
# Tokens whose logits a draft's head computes again. On SmolLM2 and Gemma 3 270M the head's likeliest token is among
# them in 99 to 100 % of positions; it is the likeliest of the int4 copy in 83 to 85 %.
_SHORTLIST = 8
# Weights that are quantised at a time: enough for several threads, but no more than fits their caches.
_CHUNK_WEIGHTS = 2**20
# Rows are scaled to 126, not 127: in bfloat16, rounding may make the largest number half a percent larger.
_LARGEST_INPUT, _ZERO_INPUT = 126, 128
_SMALLEST_SCALE = 1e-30


class QuantisedMatrix(LinearMap):
    """Quantised weights and their scales on a CPU. multiply: returns the product of rows [N, num_columns] with weight
    and scales, as a new tensor [N, num_rows + padding]."""

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        weight: Tensor,
        scales: Tensor,
        multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(linears)
        self._weight, self._scales, self._multiply = weight, scales, multiply

    def forward(self, rows: Tensor) -> Tensor:
        product = self._multiply(rows.reshape(-1, self.num_columns).contiguous(), self._weight, self._scales)
        product = product[:, : self.num_rows].view(*rows.shape[:-1], self.num_rows)
        return product if self._bias is None else product.add_(self._bias)


def int8_matrix(linears: Sequence[nn.Linear], *, use_operators: bool = False) -> LinearMap:
    """Return a copy of the linear layers in int8 with one scale per row of the matrix. use_operators: multiply by the
    operator `rayspec::product`. oneDNN quantises input rows to int8 too, each by a scale of its own."""
    weight = joined_weight(linears)
    quantised = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(len(weight), dtype=torch.float32)
    for chunk in _chunks(weight):
        numbers = weight[chunk].float()
        scales[chunk] = (numbers.abs().amax(1) / 127).clamp_(min=_SMALLEST_SCALE)
        quantised[chunk] = (numbers / scales[chunk, None]).round_().to(torch.int8)
    if use_operators:
        return OperatorMatrix(linears, quantised, scales)
    if has_int8_products(weight.device):
        packed = torch.ops.onednn.qlinear_prepack(quantised, None)
        return QuantisedMatrix(linears, packed, scales, _product_of_int8_rows)
    return QuantisedMatrix(
        linears,
        quantised,
        scales,
        lambda rows, levels, scale: torch._weight_int8pack_mm(rows, levels, scale.to(rows.dtype)),
    )


def int4_matrix(
    linears: Sequence[nn.Linear], *, use_operators: bool = False, mean_squares: Tensor | None = None
) -> LinearMap:
    """Return a copy of the linear layers in int4 with a scale and a zero for each group of columns of a row. Weights of
    a dequantised checkpoint of 4 bits stay as they are. Input rows have full precision; on a CPU bfloat16, for which
    torch's kernel is fast.

    use_operators: as in `int8_matrix`. mean_squares: of each column of the input, [num_columns]; errors weigh as much
    in the product. By default the columns are alike. Raises ValueError for a number of columns that no group size
    divides.
    """
    weight = joined_weight(linears)
    num_columns, has_own_bits = weight.shape[1], False
    if num_columns % _GROUP == 0:  # nearly all groups of the first rows have 16 levels with equal steps
        steps = _steps(weight[:_BLOCK_ROWS].float().reshape(-1, _GROUP))
        has_own_bits = float((steps > 0).float().mean()) > _MOST
    sizes = (_GROUP,) if has_own_bits or not use_operators else _GPU_GROUPS
    size = next((each for each in sizes if num_columns % each == 0), None)
    if size is None:
        raise ValueError(f"{num_columns} columns cannot be quantised to int4 in groups of {', '.join(map(str, sizes))}")
    if mean_squares is None:
        mean_squares = torch.ones(num_columns, device=weight.device)
    if not use_operators:
        weight = pad(weight, (0, 0, 0, -len(weight) % _ROW_MULTIPLE))
    packed, scales = [], []
    quantised = partial(
        _int4,
        importance=mean_squares.float().view(-1, size),
        have_4_bits=has_own_bits,
        zero_level=-16 if use_operators else 8,
        dtype=weight.dtype if use_operators else torch.bfloat16,
    )
    for levels, scale, zero in (quantised(weight[chunk]) for chunk in _chunks(weight)):
        if use_operators:
            packed.append(packed_levels(levels, size))
        else:
            packed.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1))
        scales.append(torch.stack([scale.T, zero.T], -1))
    # Scales are [groups of a row, rows, 2].
    arguments = linears, torch.cat(packed), torch.cat(scales, 1)

    def multiply(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.bfloat16(), weight, size, scales)
        return cast(Tensor, product.to(rows.dtype))

    made = OperatorMatrix(*arguments) if use_operators else QuantisedMatrix(*arguments, multiply)
    made.has_own_bits = has_own_bits
    return made


class SummedLinear(nn.Linear):
    """This rank's columns of a linear layer, whose output is the sum of all ranks' products. total: sums a tensor over
    the ranks, in place, and returns it. bias: given on one rank only."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight, self.bias = weight, bias  # type: ignore[assignment]
        self.total = total

    def forward(self, rows: Tensor) -> Tensor:
        return self.total(super().forward(rows))


class SummedMatrix(LinearMap):
    """A matrix of this rank's columns, whose products are summed over the ranks. total: as of `SummedLinear`."""

    def __init__(self, own: LinearMap, total: Callable[[Tensor], Tensor]) -> None:
        nn.Module.__init__(self)
        self.num_rows, self.num_columns, self.has_own_bits = own.num_rows, own.num_columns, own.has_own_bits
        self._own, self._total = own, total

    def forward(self, rows: Tensor) -> Tensor:
        return self._total(self._own(rows))


class FewRows(LinearMap):
    """Multiplies up to `most` rows by a copy of a matrix, and more rows by the matrix itself."""

    def __init__(self, full: LinearMap, copy: LinearMap, *, most: int = FEW_ROWS) -> None:
        nn.Module.__init__(self)
        self.num_rows, self.num_columns = full.num_rows, full.num_columns
        self._full, self._copy, self._most = full, copy, most

    def _matrix(self, rows: Tensor) -> LinearMap:
        return self._copy if rows.numel() <= self._most * self.num_columns else self._full

    def forward(self, rows: Tensor) -> Tensor:
        return cast(Tensor, self._matrix(rows)(rows))

    def plus(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._matrix(rows).plus(residual, rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._matrix(rows).add_to(residual, rows)


class Shortlist(LinearMap):
    """An LM head for drafts. A quantised copy gives the logits; those of the likeliest tokens are computed again from
    the head's own weights, so that the likeliest of all is nearly always the head's. weight: [num_rows, num_columns],
    the head's, in any floating type."""

    def __init__(self, head: nn.Linear, copy: LinearMap, weight: Tensor) -> None:
        super().__init__([head])
        self._copy, self._weight = copy, weight

    def forward(self, rows: Tensor) -> Tensor:
        logits = self._copy(rows)
        tokens = logits.topk(min(_SHORTLIST, self.num_rows)).indices
        exact = (self._weight[tokens].to(rows.dtype) @ rows[..., None]).squeeze(-1)
        return cast(Tensor, logits.scatter_(-1, tokens, exact if self._bias is None else exact + self._bias[tokens]))


def has_int8_products(device: torch.device) -> bool:
    """Return whether oneDNN multiplies int8 by int8 exactly on this device: older processors saturate."""
    return (
        device.type == "cpu"
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cpu._is_vnni_supported()
    )


def num_bytes(weights: Weights, num_rows: int, num_columns: int, *, on_cpu: bool) -> int:
    """Return the bytes of a quantised copy of a matrix that `can_copy`. On a GPU, where the int4 copy has fewer groups
    and no padding, it is in 16 bits: in float32 its scales are larger."""
    if weights == "int8":
        return num_rows * (num_columns + torch.float32.itemsize)
    num_groups = num_columns // next(size for size in ((_GROUP,) if on_cpu else _GPU_GROUPS) if num_columns % size == 0)
    num_rows += -num_rows % _ROW_MULTIPLE if on_cpu else 0
    return num_rows * (num_columns // 2 + num_groups * 2 * torch.bfloat16.itemsize)


def can_copy(weights: Weights, num_columns: int) -> bool:
    """Return whether a matrix with so many columns can have a copy."""
    return weights != "int4" or num_columns % _GROUP == 0


def _product_of_int8_rows(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Quantise the rows to int8 and multiply. weight: in oneDNN's layout. scales: float32 [num_rows]."""
    # float16 cannot hold the product before it is scaled.
    numbers = rows.float() if rows.dtype == torch.float16 else rows
    row_scales = (numbers.abs().amax(-1, keepdim=True) / _LARGEST_INPUT).clamp_(min=_SMALLEST_SCALE)
    # Unsigned: for signed rows oneDNN has no kernel on processors with VNNI but without AMX, where it takes 300 times
    # as long.
    quantised = (numbers / row_scales).round_().add_(_ZERO_INPUT).to(torch.uint8)
    product = torch.ops.onednn.qlinear_pointwise(
        quantised, 1.0, _ZERO_INPUT, weight, scales, None, None, 1.0, 0, numbers.dtype, "none", [], ""
    )
    return cast(Tensor, product.mul_(row_scales).to(rows.dtype))


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows: whole blocks of `_BLOCK_ROWS` rows, except the last slice."""
    step = max(1, _CHUNK_WEIGHTS // (weight.shape[1] * _BLOCK_ROWS)) * _BLOCK_ROWS
    return (slice(start, start + step) for start in range(0, len(weight), step))


def _int4(
    weight: Tensor, importance: Tensor, *, have_4_bits: bool, zero_level: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to levels 0 to 15 [N, K], and scales and zeros [N, K / size] of `dtype`. importance: [K / size, size],
    how much the squared error of a column counts in its group. (level - zero_level) * scale + zero is near the
    weight."""
    size = importance.shape[1]
    numbers = weight.float().view(len(weight), -1, size)
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)  # `aminmax` is six times as slow.
    step = (high - low) * (_SPANS[size] / 15)
    lowest = (low + high) / 2 - 7.5 * step  # the middle of the range is between levels 7 and 8
    if have_4_bits:
        found = _steps(numbers.flatten(0, 1)).view_as(step)
        step, lowest = torch.where(found > 0, found, step), torch.where(found > 0, low, lowest)
    else:
        shares = importance + importance.mean().clamp(min=_SMALLEST_SCALE) * _LEAST_IMPORTANCE
        shares = shares / shares.sum(-1, keepdim=True)
        for _ in range(_NUM_FITS):
            levels = _levels(numbers, step, lowest)
            middle, middle_level = (each.mul(shares).sum(-1, keepdim=True) for each in (numbers, levels))
            weights = (levels - middle_level).mul_(shares)
            spread = weights.mul(levels).sum(-1, keepdim=True)
            step = weights.mul_(numbers).sum(-1, keepdim=True) / torch.where(spread > 0, spread, 1)
            step = step.clamp_(min=0).to(dtype).float()
            lowest = middle - middle_level * step
    scale = step.to(dtype)
    zero = (lowest + zero_level * scale.float()).to(dtype)
    levels = _levels(numbers, scale.float(), zero.float() - zero_level * scale.float())
    return levels.flatten(1), scale.squeeze(-1), zero.squeeze(-1)


def _levels(numbers: Tensor, step: Tensor, lowest: Tensor) -> Tensor:
    """Return the nearest levels 0 to 15 of the numbers [N, groups, size], as floats."""
    return ((numbers - lowest) / torch.where(step > 0, step, 1)).round_().clamp_(0, 15)


def _steps(groups: Tensor) -> Tensor:
    """Return the largest step [G] of which all numbers of a group [G, size] are multiples, from the lowest on. Return 0
    for a group that takes more than 15 steps, or has equal numbers."""
    steps, left = groups.new_zeros(len(groups)), torch.arange(len(groups), device=groups.device)
    low = groups.amin(-1, keepdim=True)
    span = groups.amax(-1, keepdim=True) - low
    for count in range(15, _FEWEST_STEPS - 1, -1):
        multiples = (groups[left] - low[left]) / span[left] * count
        fits = ((multiples - multiples.round()).abs() < _OFF_LEVEL).all(-1)
        steps[left[fits]] = span[left[fits], 0] / count
        left = left[~fits]
        if not len(left):
            break
    return steps


Norm: TypeAlias = Callable[[Tensor], Tensor]


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
    rows = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    expected = norm(rows)
    for weight_offset in (0.0, 1.0):
        operator = RmsNorm(weight, eps, weight_offset)
        if torch.allclose(operator(rows), expected, rtol=2 * torch.finfo(weight.dtype).eps, atol=0):
            return operator
    return norm
