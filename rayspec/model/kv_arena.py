"""One preallocated arena of keys and values. A sequence owns a span of it; rejecting a draft moves a length."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Slots `start` .. `start + capacity` of the arena: position p of its sequence lives in slot `start + p`."""

    start: int
    capacity: int

    @property
    def end(self) -> int:
        return self.start + self.capacity


class SpanAllocator:
    """First-fit bookkeeping of spans, no tensors. Moving a span's content is the caller's work."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: list[tuple[int, int]] = [(0, num_slots)]

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def allocate(self, capacity: int) -> Span | None:
        """A span of `capacity` slots, or None when no hole is large enough."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= capacity:
                self._replace(index, start + capacity, end)
                return Span(start, capacity)
        return None

    def extend(self, span: Span, capacity: int) -> Span | None:
        """The same span grown in place, or None when the slots behind it are taken."""
        for index, (start, end) in enumerate(self._free):
            if start == span.end and end - span.start >= capacity:
                self._replace(index, span.start + capacity, end)
                return Span(span.start, capacity)
        return None

    def release(self, span: Span) -> None:
        insort(self._free, (span.start, span.end))
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def _replace(self, index: int, start: int, end: int) -> None:
        self._free[index : index + 1] = [(start, end)] if start < end else []


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer for one token."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVArena:
    """Keys and values of the attention layers of one stage.

    keys[layer]: [num_heads, num_slots + num_spare, key_dim]; values[layer] likewise. A span is a view. Spare slots take
    what padding rows write.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
    ) -> None:
        self.num_slots = num_slots
        total = num_slots + num_spare
        self.keys = {
            index: torch.zeros(shape.num_heads, total, shape.key_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }
        self.values = {
            index: torch.zeros(shape.num_heads, total, shape.value_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows. slots: [N] int64; keys: [num_heads, N, key_dim]; values: [num_heads, N, value_dim]."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy `length` slots. The ranges may overlap."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor[:, destination : destination + length] = tensor[:, source : source + length].clone()


def bytes_per_slot(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize
