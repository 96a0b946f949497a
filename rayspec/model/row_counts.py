"""The numbers of rows per pass for which the bits of a row do not depend on the number (batch invariance).

Kernels choose their order of summation by the number of rows. Measured on an AMD EPYC with AVX-512: with the matrices
of bodies, a row has the same bits for any number of rows in bfloat16, and for two or more in float32. The deterministic
mode therefore tests the loaded model. It pads passes to one fixed number of rows only if the test finds no range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayspec.model.architecture import Decomposition
from rayspec.model.attention import pack
from rayspec.model.kv_arena import PAGE_SIZE, KVArena
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Sublayer

_MOST_ROWS = 64
_LEAST_ROWS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Limits of the number of rows in a pass. Padding fills up to `least` rows; rows above `most` need another pass."""

    least: int
    most: int


# The rows of an expert depend on the routing: in a mixture of experts, only passes of a single row have a fixed shape.
SINGLE_ROWS = RowCounts(1, 1)
FIXED = RowCounts(8, 8)


def has_experts(parts: Decomposition) -> bool:
    return any(sublayer.has_experts for sublayer in parts.sublayers)


@torch.inference_mode()
def independent_row_counts(parts: Decomposition) -> RowCounts:
    """Find the widest range of row counts up to 64 in which the bits of a row are the same for every count.

    The result holds for this device and this number of threads. The test runs random rows, in every count, through
    each kind of sublayer, and through the head if this process has it.
    """
    least = max((_least_of_kind(parts, sublayer) for sublayer in _one_of_each_kind(parts)), default=1)
    if parts.lm_head is not None:
        least = max(least, _least_of(parts.head(_rows(parts, count)) for count in _counts()))
    return RowCounts(least, _MOST_ROWS) if least in _LEAST_ROWS else FIXED


def _one_of_each_kind(parts: Decomposition) -> list[Sublayer]:
    """Return one sublayer of each kind. A kind is a curve name with the same kernels: one name may cover bodies and
    modules (fetched weights, layers without rotary embedding), or matrices of several sizes."""
    kinds = zip(parts.curve_names, map(_kernels, parts.sublayers), strict=True)
    return list(dict(zip(kinds, parts.sublayers, strict=True)).values())


def _kernels(sublayer: Sublayer) -> tuple[object, ...]:
    """Return a key that is equal for sublayers whose matrices run the same kernels."""
    sizes = tuple(
        (module.in_features, module.out_features)
        for module in sublayer.block.modules()
        if isinstance(module, nn.Linear)
    )
    return sublayer.body is None, sizes


def _least_of_kind(parts: Decomposition, sublayer: Sublayer) -> int:
    """Return `_least_of` a sublayer's results. Every row is a sequence of one token."""
    arena = KVArena(
        {sublayer.layer: parts.shapes[sublayer.layer]}, _MOST_ROWS * PAGE_SIZE, dtype=parts.dtype, device=parts.device
    )

    def result(count: int) -> Tensor:
        spans = [RowSpan(one_run(row * PAGE_SIZE, PAGE_SIZE), 0, 1) for row in range(count)]
        rows = pack(arena, spans, device=parts.device, by_run=False)
        hidden = _rows(parts, count)
        parts.rotate(hidden, rows)
        return sublayer(hidden, rows)[0]

    return _least_of(result(count) for count in _counts())


def _least_of(results: Iterator[Tensor]) -> int:
    """Return the smallest count from which on all results agree. results: [count, ...], from the largest count to 1."""
    widest = next(results)
    least = len(widest)
    for result in results:
        if not torch.equal(result, widest[: len(result)]):
            break
        least = len(result)
    return least


def _counts() -> range:
    return range(_MOST_ROWS, 0, -1)


def _rows(parts: Decomposition, count: int) -> Tensor:
    """Return the first `count` rows of a fixed random tensor: [1, count, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    size = parts.config.get_text_config().hidden_size
    rows = torch.randn(1, _MOST_ROWS, size, generator=generator)[:, :count]
    return rows.to(parts.device, parts.dtype)
