"""Attention of one row by its definition, in float64, and batches of random rows over caches of random content."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rayspec.model.attention import PackedRows, packed_attention
from rayspec.model.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")
LAYER = 3
_MODULE: Any = SimpleNamespace(layer_idx=LAYER)


def weights_of(query: Tensor, keys: Tensor, scaling: float | None = None, softcap: float | None = None) -> Tensor:
    """Of the keys that a row sees. query: [H, D]; keys: [H_kv, n, D]; returns [H, n]."""
    keys = keys.double().repeat_interleave(len(query) // len(keys), 0)
    scores = (keys @ query.double()[:, :, None])[..., 0] * (scaling or query.shape[-1] ** -0.5)
    return (softcap * torch.tanh(scores / softcap) if softcap else scores).softmax(-1)


def attention_of(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """[H, D_v]. values: [H_kv, n, D_v]; the others and the options are those of `weights_of`."""
    values = values.double().repeat_interleave(len(query) // len(values), 0)
    return (weights_of(query, keys, **options)[:, None] @ values)[:, 0].to(query.dtype)


def random_cache(shape: LayerShape, num_slots: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> KVCache:
    """One with another, smaller layer, too."""
    cache = KVCache({1: LayerShape(1, 4, 4), LAYER: shape}, num_slots, dtype=dtype, device=CPU, **options)
    torch.manual_seed(0)
    for tensor in (cache.keys[LAYER], cache.values[LAYER]):
        tensor.copy_(torch.randn_like(tensor) * 2)
    return cache


def attend(rows: PackedRows, *, num_heads: int = 4, seed: int = 1, **options: Any) -> tuple[Tensor, ...]:
    """Query [H, N, D], key [H_kv, N, D] and value [H_kv, N, D_v] of random rows, and what the rows saw, [N, H, D_v]."""
    torch.manual_seed(seed)
    keys, values = rows.cache.keys[LAYER], rows.cache.values[LAYER]
    shapes = ((num_heads, keys.shape[-1]), (len(keys), keys.shape[-1]), (len(keys), values.shape[-1]))
    own = [torch.randn(heads, len(rows.positions), size).to(keys.dtype) for heads, size in shapes]
    return *own, again(rows, *own, **options)


def again(rows: PackedRows, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """What the rows see with these queries, keys and values."""
    return packed_attention(_MODULE, query[None], key[None], value[None], None, packed=rows, **options)[0][0]
