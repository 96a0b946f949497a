"""The KV cache of one process: keys and values of its attention layers, in pages of equal size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayspec.choices import Keys

# Slots per page. A slot holds the keys and values of one token.
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudget:
    """Numbers of pages of the KV cache that a row reads. sink: the first pages of the sequence. newest: pages right
    before the row's own page. looked_at: pages between these that got most attention in the last verify. The row's own
    page is read up to the row, in addition to these.

    Raises `ValueError` if a number is negative, or `newest` is 0.
    """

    sink: int = 1
    newest: int
    looked_at: int = 0

    def __post_init__(self) -> None:
        if min(self.sink, self.newest - 1, self.looked_at) < 0:
            raise ValueError(f"{self}: newest must be at least 1, sink and looked_at at least 0")

    @property
    def num_pages(self) -> int:
        """Number of pages that a row reads, its own page included."""
        return self.sink + self.looked_at + self.newest + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBudgets:
    """Budget of each way to read few keys. `window` has more of the newest pages, because it has no scored ones."""

    window: KeyBudget = field(default=KeyBudget(newest=16))
    pages: KeyBudget = field(default=KeyBudget(newest=4, looked_at=16))

    def of(self, keys: Keys) -> KeyBudget | None:
        """Return the budget of these keys, or None for `all`."""
        return {"all": None, "window": self.window, "pages": self.pages}[keys]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the keys and values of one attention layer for one token. num_heads: the key heads of all attention
    calls of the layer, one call after another."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Slots of a KV cache. num_windowed_slots: slots of a second, smaller store for layers with a sliding window. If it
    is 0, these layers have the slots of the others."""

    num_slots: int
    num_windowed_slots: int = 0

    def slots_of(self, window: int | None) -> int:
        """Return the slots of a layer with this sliding window."""
        return self.num_windowed_slots if window and self.num_windowed_slots else self.num_slots


class KVCache:
    """Keys and values of the attention layers of one stage.

    keys[layer]: [num_heads, slots + num_spare, key_dim]; values[layer] has value_dim instead. Padding rows write to the
    spare slots. keeps_finite: store 0 in place of NaN and infinity, because a masked slot with NaN makes a result NaN.
    windowed_layers: layers with a sliding window, if they have a smaller store of `num_windowed_slots` slots of their
    own, in which a sequence keeps only the pages in its window.

    looked_at: int32 [layers, pages, budgets.pages.looked_at], None unless `notes_pages`. By page that a sequence is
    about to write to, the pages that got most attention of its newest row, see `few_keys`. They are numbered in the
    sequence, not in the cache; a negative number is empty.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_slots: int,
        *,
        num_windowed_slots: int = 0,
        windowed_layers: Collection[int] = (),
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        budgets: KeyBudgets | None = None,
        notes_pages: bool = False,
        keeps_finite: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.num_windowed_slots = num_windowed_slots
        self.windowed_layers = frozenset(windowed_layers) & layers.keys() if num_windowed_slots else frozenset()
        self._keeps_finite = keeps_finite
        self.budgets = budgets or KeyBudgets()
        self.place_of_layer = {index: place for place, index in enumerate(layers)}
        self.looked_at: Tensor | None = None
        if notes_pages:
            shape = (len(layers), -(-max(num_slots, num_windowed_slots) // PAGE_SIZE), self.budgets.pages.looked_at)
            self.looked_at = torch.full(shape, -1, dtype=torch.int32, device=device)
        sizes = {
            index: num_spare + (num_windowed_slots if index in self.windowed_layers else num_slots) for index in layers
        }
        self.keys = {
            index: torch.zeros(shape.num_heads, sizes[index], shape.key_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }
        self.values = {
            index: torch.zeros(shape.num_heads, sizes[index], shape.value_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }

    def heads(self, layer: int, first_head: int, num_heads: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of these heads of the layer, as views."""
        heads = slice(first_head, first_head + num_heads)
        return self.keys[layer][heads], self.values[layer][heads]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, *, first_head: int = 0) -> None:
        """Store keys [H, N, key_dim] and values [H, N, value_dim] in slots [N], int64, as H heads from `first_head`."""
        for cached, new in zip(self.heads(layer, first_head, len(keys)), (keys, values), strict=True):
            cached.index_copy_(1, slots, new.nan_to_num(0.0, 0.0, 0.0) if self._keeps_finite else new)

    def move(self, source: int, destination: int, length: int, *, in_windowed_store: bool = False) -> None:
        """Copy `length` slots in the layers of one store. The ranges may overlap."""
        for layer in self.keys:
            if (layer in self.windowed_layers) == in_windowed_store:
                for tensor in (self.keys[layer], self.values[layer]):
                    tensor[:, destination : destination + length] = tensor[:, source : source + length].clone()


def bytes_per_slot(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in layers) * dtype.itemsize


def whole_pages(num_slots: int) -> int:
    """Round a number of slots up to whole pages."""
    return -(-num_slots // PAGE_SIZE) * PAGE_SIZE
