"""Packed ragged attention over the arena, registered with transformers' attention interface as "rayspec".

Rows of many sequences lie side by side; each sequence's rows attend to its own span. No padding, no mask in decode.
Rows may form a tree, whose branches are alternatives: a row sees its ancestors and not its cousins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rayspec.model.kv_arena import KVArena
from rayspec.model.rows import Path, RowSpan

IMPLEMENTATION = "rayspec"
# Up to here the query heads that share a key head are folded into rows, so that keys are read once, not once a head.
_MAX_FOLDED_ROWS = 32


@dataclass(slots=True)
class PackedRows:
    """A packed batch: what attention must know about its N rows.

    positions: [N] int64; slots: [N] int64 where keys and values go. paths: by span, what each of its rows sees where
    the rows are a tree; empty where they see one another causally. Where `slots` is None the rows leave no trace: those
    of a span are alternatives for the one position behind its context, and each sees the context and itself.
    """

    arena: KVArena
    positions: Tensor
    slots: Tensor | None
    spans: Sequence[RowSpan]
    paths: Sequence[Sequence[Path]]
    rope: dict[str, Any] = field(default_factory=dict)
    masks: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)
    views: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


def pack(
    arena: KVArena,
    spans: Sequence[RowSpan],
    *,
    device: torch.device,
    pad_to: int = 0,
    paths: Sequence[Sequence[Path]] | None = None,
) -> PackedRows:
    """Rows that extend sequences. paths: see `PackedRows`; by default what the spans say.

    Rows up to `pad_to` are added that attend to nothing and write to the arena's spare slots.
    """
    paths = [span.paths() for span in spans] if paths is None else paths
    positions: list[int] = []
    slots: list[int] = []
    for span, tree in zip(spans, paths, strict=True):
        end = span.context + span.num_rows
        positions.extend([path.position for path in tree] if tree else range(span.context, end))
        slots.extend(range(span.arena_start + span.context, span.arena_start + end))
    num_padding = max(0, pad_to - len(slots))
    positions.extend([0] * num_padding)
    slots.extend(range(arena.num_slots, arena.num_slots + num_padding))
    where = torch.tensor([positions, slots], device=device)
    return PackedRows(arena, where[0], where[1], spans, paths)


def pack_branches(arena: KVArena, tokens: Sequence[RowSpan], num_branches: int, positions: Tensor) -> PackedRows:
    """`num_branches` alternatives for each of some single rows. positions: [tokens * branches]."""
    spans = [RowSpan(token.arena_start, token.context, num_branches) for token in tokens]
    return PackedRows(arena, positions, None, spans, [()] * len(spans))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature. query: [1, H, N, D]; key, value: [1, H_kv, N, D]; returns [1, N, H, D_v]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = packed.arena.keys[layer], packed.arena.values[layer]
    if packed.slots is not None:
        packed.arena.write(layer, packed.slots, key[0], value[0])
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    end = 0
    for span, paths in zip(packed.spans, packed.paths, strict=True):
        at, end = end, end + span.num_rows
        rows = slice(at, end)
        lowest = min(path.position for path in paths) if paths else span.context
        past = max(0, lowest + 1 - sliding_window) if sliding_window else 0
        seen = slice(span.arena_start + past, span.arena_start + span.context + span.num_rows)
        if packed.slots is None:
            context = slice(seen.start, span.arena_start + span.context)
            mixed = _branches(
                query[0, :, rows], key[0, :, rows], value[0, :, rows], keys[:, context], values[:, context],
                scaling, softcap,
            )  # fmt: skip
        elif paths and span.num_rows == 1:
            view = _view(packed, at, span, paths[0], sliding_window)
            mixed = _causal(query[0, :, rows], keys[:, view], values[:, view], None, scaling, softcap)
        else:
            mask = _mask(packed, at, span, paths, sliding_window, past, query.dtype) if span.num_rows > 1 else None
            mixed = _causal(query[0, :, rows], keys[:, seen], values[:, seen], mask, scaling, softcap)
        output[0, rows] = mixed.transpose(0, 1)
    return output, None


def _mask(
    packed: PackedRows,
    at: int,
    span: RowSpan,
    paths: Sequence[Path],
    sliding_window: int | None,
    past: int,
    dtype: torch.dtype,
) -> Tensor:
    """Of the span whose rows begin at row `at` of the batch: [num_rows, keys], 0 where a row may look and -inf
    elsewhere: boolean masks cost SDPA a conversion in every layer. Layers with the same window share it."""
    name = (at, sliding_window, past)
    if name not in packed.masks:
        device = packed.positions.device
        rows = torch.arange(span.context, span.context + span.num_rows, device=device)[:, None]
        columns = torch.arange(past, span.context + span.num_rows, device=device)
        if paths:
            seen = _seen_in_tree(paths, columns, sliding_window)
        else:
            seen = columns <= rows
            if sliding_window:
                seen &= columns > rows - sliding_window
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        packed.masks[name] = mask.masked_fill_(~seen, float("-inf"))
    return packed.masks[name]


def _seen_in_tree(paths: Sequence[Path], columns: Tensor, sliding_window: int | None) -> Tensor:
    """Which slots of the span, `columns`, each row sees: bool [num_rows, len(columns)]. Windows count positions, which
    are the slots' numbers only in the shared part of a path."""
    device, past = columns.device, int(columns[0])
    lowest = [path.position + 1 - sliding_window if sliding_window else 0 for path in paths]
    bounds = torch.tensor([[path.shared for path in paths], lowest], device=device)[:, :, None]
    seen = (columns < bounds[0]) & (columns >= bounds[1])
    own = [
        (row, slot - past) for row, path in enumerate(paths) for slot in path.own[max(0, lowest[row] - path.shared) :]
    ]
    where = torch.tensor(own, device=device).T
    seen[where[0], where[1]] = True
    return seen


def _view(packed: PackedRows, at: int, span: RowSpan, path: Path, sliding_window: int | None) -> Tensor:
    """The slots that a single row of a tree, row `at` of the batch, sees, in order of position: int64. Its attention is
    then that of a single row anywhere, to the bit. Layers with the same window share it."""
    name = (at, sliding_window)
    if name not in packed.views:
        lowest = max(0, path.position + 1 - sliding_window) if sliding_window else 0
        seen = [*range(lowest, path.shared), *path.own[max(0, lowest - path.shared) :]]
        packed.views[name] = torch.tensor(seen, device=packed.positions.device) + span.arena_start
    return packed.views[name]


def _causal(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """query: [H, m, D]; keys, values: [H_kv, n, D]; mask: [m, n] or None; returns [H, m, D_v]."""
    num_heads, num_rows, dim = query.shape
    num_shared = num_heads // keys.shape[0]
    if num_rows <= _MAX_FOLDED_ROWS or softcap:
        query = query.reshape(keys.shape[0], num_shared * num_rows, dim)
        mask = mask.repeat(num_shared, 1) if mask is not None else None
        if softcap:
            scores = torch.tanh(query @ keys.transpose(1, 2) * (scaling / softcap)) * softcap
            scores = scores if mask is None else scores + mask
            mixed = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ values
        else:
            mixed = scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=scaling)[0]
        return mixed.reshape(num_heads, num_rows, values.shape[-1])
    return scaled_dot_product_attention(
        query[None], keys[None], values[None], mask, scale=scaling, enable_gqa=num_shared > 1
    )[0]


def _branches(
    query: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Each row sees the shared context and itself. query: [H, m, D]; own: [H_kv, m, D]; keys: [H_kv, n, D]."""
    num_kv_heads, num_rows, _ = own_key.shape
    folded = query.reshape(num_kv_heads, -1, num_rows, query.shape[-1])
    shared = folded.flatten(1, 2) @ keys.transpose(1, 2)
    own = (folded * own_key[:, None]).sum(-1).reshape(num_kv_heads, -1, 1)
    scores = torch.cat([shared, own], -1).float() * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores, -1).to(values.dtype)
    mixed = (weights[..., :-1] @ values).reshape(num_kv_heads, -1, num_rows, values.shape[-1])
    mixed = mixed + weights[..., -1:].reshape(num_kv_heads, -1, num_rows, 1) * own_value[:, None]
    return mixed.reshape(query.shape[0], num_rows, values.shape[-1])


AttentionInterface.register(IMPLEMENTATION, packed_attention)
