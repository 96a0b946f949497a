"""The operations in plain torch: the reference in tests of the kernels, and the implementation on a CPU.

Shapes and rounding are those of `operations.py`. Sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    positions: Tensor,
    shared: Tensor | None,
    bits: Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
    page_size: int,
    max_rows: int,
    max_context: int,
) -> Tensor:
    """Compute each row alone, so that its bits are the same regardless of the other rows in the batch."""
    output = torch.zeros_like(query)
    starts = row_starts.tolist()
    for sequence, context in enumerate(contexts.tolist()):
        first, end = starts[sequence], starts[sequence + 1]
        _check_bucket(end - first, context, max_rows, max_context)
        own_positions = positions[first:end]
        slots = _slots(page_table[sequence], context + end - first, page_size)
        for row in range(first, end):
            tree = None if shared is None or bits is None else (int(shared[row]), int(bits[row]))
            places = _places(context, row - first, tree)
            places = _within_window(places, own_positions, context, int(positions[row]), window)
            seen = slots[places]
            output[row] = _mixed(query[row], keys[:, seen], values[:, seen], scaling, softcap)
    return output


def _check_bucket(num_rows: int, context: int, max_rows: int, max_context: int) -> None:
    if num_rows > max_rows:
        raise ValueError(f"a sequence has {num_rows} rows, but max_rows={max_rows}: use a larger bucket")
    if context + num_rows > max_context:
        raise ValueError(
            f"a sequence has {context + num_rows} places, but max_context={max_context}: use a larger bucket"
        )


def _slots(pages: Tensor, num_places: int, page_size: int) -> Tensor:
    """Return the slot of each place of a sequence."""
    places = torch.arange(num_places, device=pages.device)
    return pages.long()[places // page_size] * page_size + places % page_size


def _places(context: int, own: int, tree: tuple[int, int] | None) -> Tensor:
    """Return the places that the row at place context + own sees. tree: number of shared places, and the row's bits."""
    places = torch.arange(context + own + 1)
    if tree is None:
        return places
    shared, bits = tree
    marked = [context + j for j in range(own + 1) if bits >> j & 1]
    return torch.cat([places[:shared], torch.tensor(marked, dtype=torch.int64)])


def _within_window(places: Tensor, own_positions: Tensor, context: int, position: int, window: int) -> Tensor:
    if not window:
        return places
    own = own_positions[(places - context).clamp(min=0)]
    return places[torch.where(places < context, places, own) > position - window]


def _mixed(query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float) -> Tensor:
    """Compute attention of one row. query: [H, D]; keys, values: [H_kv, n, D]; returns [H, D], zeros if n is 0."""
    grouped = query.float().view(len(keys), -1, query.shape[-1])
    scores = grouped @ keys.float().transpose(1, 2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.softmax(-1) @ values.float()).view_as(query).to(query.dtype)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    numbers = hidden.float()
    normal = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset:
        return (normal * (weight_offset + weight.float())).to(hidden.dtype)
    return normal.to(hidden.dtype) * weight


def rotate_and_write(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    num_kv_heads, _, dim = keys.shape
    heads = packed.view(len(packed), -1, dim)
    query, key, value = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    query = query if query_norm is None else rms_norm(query, query_norm, eps, 0.0)
    key = key if key_norm is None else rms_norm(key, key_norm, eps, 0.0)
    keys.index_copy_(1, slots, _rotated(key, cos, sin).transpose(0, 1))
    values.index_copy_(1, slots, value.transpose(0, 1))
    return _rotated(query, cos, sin).contiguous()


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary` numbers of each head. heads: [N, heads, D]; cos, sin: [N, rotary]."""
    turned, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


def int8_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return (rows.float() @ weight.T.float() * scales).to(rows.dtype)


def int4_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    grouped = weight.view(len(weight), len(scales), -1)
    levels = torch.cat([grouped & 15, grouped >> 4], -1).float() - 8
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    matrix = levels * scale[..., None] + zero[..., None]
    return (rows.float() @ matrix.flatten(1).T).to(rows.dtype)


def gated(packed: Tensor, activation: str) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up
