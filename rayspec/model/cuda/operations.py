"""The torch operators `rayspec::*`: shapes for tracing, plain torch on a CPU, Triton kernels on a GPU.

Importing this module registers them and does not need triton. The functions here are typed wrappers of the operators.
Sizes: N rows, C columns, H query heads, H_kv key heads, D numbers per head, S slots, R sequences, P pages per sequence.
Operators are for inference: they have no gradients.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from rayspec.model.cuda import reference

_SCHEMAS = {
    "attend": (
        "(Tensor query, Tensor keys, Tensor values, Tensor page_table, Tensor row_starts, Tensor contexts, "
        "Tensor positions, Tensor? shared, Tensor? bits, float scaling, int window, float softcap, int page_size, "
        "int max_rows, int max_context) -> Tensor"
    ),
    "rms_norm": "(Tensor hidden, Tensor weight, float eps, float weight_offset) -> Tensor",
    "rotate_and_write": (
        "(Tensor packed, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) keys, Tensor(b!) values, int num_heads, "
        "Tensor? query_norm, Tensor? key_norm, float eps) -> Tensor"
    ),
    "gated": "(Tensor packed, str activation) -> Tensor",
    "int8_product": "(Tensor rows, Tensor weight, Tensor scales) -> Tensor",
    "int4_product": "(Tensor rows, Tensor weight, Tensor scales) -> Tensor",
}
_LIBRARY = torch.library.Library("rayspec", "DEF")  # type: ignore[no-untyped-call]


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
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    page_size: int,
    max_rows: int,
    max_context: int,
) -> Tensor:
    """Compute attention of ragged rows over pages. Returns [N, H, D], zeros for padding rows.

    query: [N, H, D]. keys, values: [H_kv, S, D], last stride 1. They already hold the rows' own keys and values, and
    finite numbers in every place of a sequence; other slots may hold any data.
    page_table: int32 [R, P]; place p of sequence r is slot page_table[r, p // page_size] * page_size + p % page_size.
    row_starts: int32 [R + 1]; sequence r has the rows row_starts[r] .. row_starts[r + 1], none if they are equal. Rows
    from row_starts[R] on are padding. contexts: int32 [R], places filled before the rows; row i of a sequence is in
    place contexts[r] + i. positions: int32 or int64 [N]; a row's position is never larger than its place.

    A row sees all places up to its own. In a tree (shared: int32 [N]; bits: int64 [N]; at most 63 rows per sequence) it
    sees only the first shared[row] <= contexts[r] of them, and contexts[r] + j if bit j of bits[row] is set.
    window: if not 0, a row at position p sees only places of position > p - window; the position of a place of the
    context is its number. softcap: if not 0, scores are softcap * tanh(score / softcap).

    max_rows, max_context: the bucket, the most rows and the most places of a sequence, including its rows' places. On a
    CPU a larger sequence raises ValueError; on a GPU there is no check.

    Batch invariance (the company rule of docs/gpu.md): the bits of a row's result depend on its query, the keys and
    values that it sees, their places, and the bucket. They do not depend on other rows or sequences, or on the pages.
    """
    return cast(
        Tensor,
        torch.ops.rayspec.attend(
            query, keys, values, page_table, row_starts, contexts, positions, shared, bits, scaling, window, softcap,
            page_size, max_rows, max_context,
        ),
    )  # fmt: skip


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Compute an RMS norm of hidden, [N, C] in and out. weight: [C], of the same type.

    Rounds as transformers does. With weight_offset 0, as in LlamaRMSNorm, the normalised numbers are rounded and then
    multiplied by the weight. Else, as in Gemma's norm, they are multiplied by weight_offset + weight in float32 and
    rounded once. On a GPU the squares are summed in another order than torch's: a result may differ by one unit in the
    last place.
    """
    return cast(Tensor, torch.ops.rayspec.rms_norm(hidden, weight, eps, weight_offset))


def rotate_and_write(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return rotated queries [N, H, D]; write rotated keys, and values, to their slots.

    packed: [N, (H + 2 * H_kv) * D]: query, key and value heads. cos, sin: [N, rotary], of the type of packed; rotary is
    even, and a head's numbers after the first `rotary` do not change. slots: int64 [N]. keys, values: [H_kv, S, D].
    query_norm, key_norm: [D], weights of an RMS norm with `eps` of each head before its rotation.

    Rounds both products and their sum to the type of packed, as eager torch does. Without norms the result is bit-equal
    to transformers'; with norms it may differ as `rms_norm` does.
    """
    return cast(
        Tensor,
        torch.ops.rayspec.rotate_and_write(packed, cos, sin, slots, keys, values, num_heads, query_norm, key_norm, eps),
    )


def gated(packed: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up: [N, I]. packed: [N, 2 * I], gate first. activation: "silu" or "gelu_tanh".

    Rounds the activation to the type of packed before the product, as eager torch does.
    """
    return cast(Tensor, torch.ops.rayspec.gated(packed, activation))


def int8_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return rows times the transposed matrix weight * scales[:, None]: [N, M], of the type of rows.

    rows: [N, C]. weight: int8 [M, C], contiguous. scales: float32 [M].

    Sums in float32. On a GPU there are two orders of summation: one for N up to 16, one for larger N.
    """
    return cast(Tensor, torch.ops.rayspec.int8_product(rows, weight, scales))


def int4_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Do as `int8_product`, with a matrix whose numbers are (level - 8) * scale + zero.

    weight: uint8 [M, C / 2], contiguous. In a row's group of `size` columns, byte i holds the level of column i in its
    low four bits, and that of column i + size / 2 in its high four bits. scales: [groups of a row, M, 2], contiguous:
    scale and zero. A group has at least 32 columns.
    """
    return cast(Tensor, torch.ops.rayspec.int4_product(rows, weight, scales))


def _shape_of_attend(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


def _shape_of_rms_norm(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _shape_of_rotate_and_write(
    packed: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, num_heads: int, *_: Any
) -> Tensor:
    return packed.new_empty(packed.shape[0], num_heads, keys.shape[-1])


def _shape_of_gated(packed: Tensor, activation: str) -> Tensor:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(reference.ACTIVATIONS)}")
    return packed.new_empty(packed.shape[0], packed.shape[1] // 2)


def _shape_of_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))


_SHAPES = {
    "attend": _shape_of_attend,
    "rms_norm": _shape_of_rms_norm,
    "rotate_and_write": _shape_of_rotate_and_write,
    "gated": _shape_of_gated,
    "int8_product": _shape_of_product,
    "int4_product": _shape_of_product,
}


class _OnGpu:
    """An operation of `launches.py`. Imports this module at the first call only, because it needs triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any) -> Tensor:
        launches = importlib.import_module("rayspec.model.cuda.launches")
        with torch.cuda.device(arguments[0].device):  # Triton launches on the current device
            return cast(Tensor, getattr(launches, self._name)(*arguments).run())


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, getattr(reference, name), "CPU")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, _OnGpu(name), "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"rayspec::{name}", _SHAPES[name], lib=_LIBRARY)


_register()
