"""The KV cache of one process: keys and values of its attention layers, in pages of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayspec.choices import Keys
from rayspec.model.key_budgets import KeyBudgets

# Slots of a page: of one token each.
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer for one token."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVArena:
    """Keys and values of the attention layers of one stage.

    keys[layer]: [num_heads, num_slots + num_spare, key_dim]; values[layer] likewise. Slots side by side are a view.
    Spare slots take what padding rows write. budgets: of drafts that read few keys.

    looked_at: int32 [layers, pages, budgets.pages.looked_at], None unless `notes_pages`. By a page that a sequence is
    about to write to: the pages of the sequence at which its newest row looked most, see `page_scores`. They are
    numbered as the sequence has them; a negative number is none. Sequences that share pages have notes of their own,
    for they write to different pages. A page's note takes 4 bytes a number in a layer, 64 bytes by default, where its
    keys and values take kilobytes.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_spare: int = 0,
        budgets: KeyBudgets | None = None,
        notes_pages: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.budgets = budgets or KeyBudgets()
        self.place_of_layer = {index: place for place, index in enumerate(layers)}
        self.looked_at: Tensor | None = None
        if notes_pages:
            shape = (len(layers), -(-num_slots // PAGE_SIZE), self.budgets.pages.looked_at)
            self.looked_at = torch.full(shape, -1, dtype=torch.int32, device=device)
        total = num_slots + num_spare
        self.keys = {
            index: torch.zeros(shape.num_heads, total, shape.key_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }
        self.values = {
            index: torch.zeros(shape.num_heads, total, shape.value_dim, dtype=dtype, device=device)
            for index, shape in layers.items()
        }

    @property
    def supported_keys(self) -> tuple[Keys, ...]:
        """What rows can read here."""
        return ("all", "window") if self.looked_at is None else ("all", "window", "pages")

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


def whole_pages(num_slots: int) -> int:
    """Slots of the pages that hold so many."""
    return -(-num_slots // PAGE_SIZE) * PAGE_SIZE
