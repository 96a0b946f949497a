"""How many rows a pass may have so that the bits of each row do not depend on the number.

Kernels choose how they add up by the number of rows. Measured on an AMD EPYC with AVX-512: the matrices of bodies give
a row the same bits with any number of rows in bfloat16, and with two or more in float32. So the deterministic mode asks
the loaded model, and pads rows to one fixed number only where the answer is no.
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
    """Passes have `least` to `most` rows: rows of padding are added, and more rows are several passes."""

    least: int
    most: int


# Experts see as many rows as choose them: in a mixture of experts only single rows have a fixed shape.
SINGLE_ROWS = RowCounts(1, 1)
FIXED = RowCounts(8, 8)


def has_experts(parts: Decomposition) -> bool:
    return any(sublayer.has_experts for sublayer in parts.sublayers)


@torch.inference_mode()
def independent_row_counts(parts: Decomposition) -> RowCounts:
    """The widest range of counts with all of which every row has the same bits, on this device with this number of
    threads. Each kind of sublayer, and the head where it is here, runs random rows of every count up to 64."""
    least = max((_least_of_kind(parts, sublayer) for sublayer in _one_of_each_kind(parts)), default=1)
    if parts.lm_head is not None:
        least = max(least, _least_of(parts.head(_rows(parts, count)) for count in _counts()))
    return RowCounts(least, _MOST_ROWS) if least in _LEAST_ROWS else FIXED


def _one_of_each_kind(parts: Decomposition) -> list[Sublayer]:
    """The same name may stand for a body and for modules (fetched weights, layers that do not rotate), and for other
    sizes: their kernels are others."""
    kinds = zip(parts.curve_names, map(_kernels, parts.sublayers), strict=True)
    return list(dict(zip(kinds, parts.sublayers, strict=True)).values())


def _kernels(sublayer: Sublayer) -> tuple[object, ...]:
    """What decides which kernels its matrices run."""
    sizes = tuple(
        (module.in_features, module.out_features)
        for module in sublayer.block.modules()
        if isinstance(module, nn.Linear)
    )
    return sublayer.body is None, sizes


def _least_of_kind(parts: Decomposition, sublayer: Sublayer) -> int:
    """Every row is a sequence of its own, of one token."""
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
    """The smallest count from which on all agree. results: [count, ...] for counts from the largest down to 1."""
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
    """The first `count` of the same random rows: [1, count, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    size = parts.config.get_text_config().hidden_size
    rows = torch.randn(1, _MOST_ROWS, size, generator=generator)[:, :count]
    return rows.to(parts.device, parts.dtype)
