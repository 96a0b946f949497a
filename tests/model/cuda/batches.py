"""Sequences with random queries, keys and values, and batches of them for `attend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rayspec.model.kv_cache import PAGE_SIZE
from rayspec.model.rows import Path, RowSpan

NO_PAGE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one sequence. query: [n, H, D]; keys, values: [H_kv, context + n, D]; parents: see RowSpan."""

    context: int
    query: Tensor
    keys: Tensor
    values: Tensor
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.query)

    @property
    def num_places(self) -> int:
        return self.context + len(self)

    def paths(self) -> list[Path]:
        if self.parents:
            return RowSpan((), self.context, len(self), self.parents).paths()
        return [Path(self.context, tuple(range(self.context, self.context + row + 1))) for row in range(len(self))]

    def first(self, num_rows: int) -> Rows:
        """Without the others, which follow."""
        end = self.context + num_rows
        return Rows(
            context=self.context, query=self.query[:num_rows], keys=self.keys[:, :end], values=self.values[:, :end],
            parents=self.parents[:num_rows],
        )  # fmt: skip

    def alone(self, row: int) -> Rows:
        """One row of a chain, as a decode has it."""
        end = self.context + row + 1
        query = self.query[row : row + 1]
        return Rows(context=end - 1, query=query, keys=self.keys[:, :end], values=self.values[:, :end])


def random_rows(
    context: int,
    num_rows: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    parents: tuple[int, ...] = (),
    seed: int = 0,
) -> Rows:
    """heads: of queries, of keys."""
    random = torch.Generator().manual_seed(seed + 1000 * context + num_rows)
    num_heads, num_kv_heads = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return Rows(
        context=context, query=normal(num_rows, num_heads, dim), keys=normal(num_kv_heads, context + num_rows, dim),
        values=normal(num_kv_heads, context + num_rows, dim), parents=parents,
    )  # fmt: skip


def lay_out(sequences: Sequence[Rows], *, num_padding: int = 0, spare_pages: int = 3, seed: int = 0) -> dict[str, Any]:
    """The tensors that `attend` takes, with a tree if any sequence has one.

    Pages lie anywhere. Slots that hold no place are NaN. The table ends in numbers that are no pages.
    """
    random = torch.Generator().manual_seed(seed)
    num_pages = [-(-rows.num_places // PAGE_SIZE) for rows in sequences]
    pages = torch.randperm(sum(num_pages) + spare_pages, generator=random)
    table = torch.full((len(sequences), max(num_pages, default=0) + 1), NO_PAGE, dtype=torch.int32)
    num_kv_heads, _, dim = sequences[0].keys.shape
    keys = torch.full((num_kv_heads, len(pages) * PAGE_SIZE, dim), float("nan"), dtype=sequences[0].keys.dtype)
    values = keys.clone()
    ends = list(accumulate(num_pages))
    for index, rows in enumerate(sequences):
        own = pages[ends[index] - num_pages[index] : ends[index]]
        table[index, : len(own)] = own
        slots = (own[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: rows.num_places]
        keys[:, slots], values[:, slots] = rows.keys, rows.values
    padding = torch.full((num_padding, *sequences[0].query.shape[1:]), float("nan"), dtype=keys.dtype)
    return {
        "query": torch.cat([*(rows.query for rows in sequences), padding]),
        "keys": keys,
        "values": values,
        "block_table": table,
        "row_starts": torch.tensor([0, *accumulate(map(len, sequences))], dtype=torch.int32),
        "contexts": torch.tensor([rows.context for rows in sequences], dtype=torch.int32),
        **_trees(sequences, num_padding),
    }


def _trees(sequences: Sequence[Rows], num_padding: int) -> dict[str, Tensor | None]:
    paths = [(rows, path) for rows in sequences for path in rows.paths()]
    none = [0] * num_padding
    positions = torch.tensor([path.position for _, path in paths] + none)
    if not any(rows.parents for rows in sequences):
        return {"positions": positions, "shared": None, "bits": None}
    bits = [sum(1 << (place - rows.context) for place in path.own if rows.parents) for rows, path in paths]
    shared = [path.shared if rows.parents else path.position + 1 for rows, path in paths]
    return {
        "positions": positions,
        "shared": torch.tensor(shared + none, dtype=torch.int32),
        "bits": torch.tensor(bits + none),
    }
