"""Count the launches and bytes of a large model's step on the meta device, without weights or arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.device.launches import LaunchRecorder, num_kernels, record_forward
from benchmarks.device.ledger import StepLedger
from benchmarks.device.models import Prepared, prepare
from benchmarks.roofline import ModelShape
from rayspec.choices import FULL, SKIP, Choices
from rayspec.model.attention import AttentionKind, Heads
from rayspec.model.cuda.operations import gated
from rayspec.model.fused import FusedLayer
from rayspec.model.kv_cache import PAGE_SIZE, LayerShape
from rayspec.model.matrices import Matrix, RmsNorm
from rayspec.model.rows import RowSpan, one_run
from rayspec.model.sublayers import Decomposition, Sublayer

_EPS = 1e-6
_META = torch.device("meta")


class ByteCounter(LaunchRecorder):  # type: ignore[no-untyped-call]
    """Records launches, and counts the bytes that they read and write. Keys and values of attention are not counted:
    their number depends on the contexts, which are values on the device, not shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def note(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        if name == "aten::embedding":
            self.num_bytes += 2 * _size(made)
        elif name == "rayspec::attend":
            self.num_bytes += _size([given[0], *made])
        elif name == "rayspec::rotate_and_write":
            packed, cos, sin, slots = given[:4]
            self.num_bytes += 2 * _size([packed]) + _size([cos, sin, slots])
        else:
            self.num_bytes += _size([*given, *made])


@dataclass(frozen=True, slots=True)
class _Count:
    num_kernels: int
    num_bytes: int


def step_ledger(shape: ModelShape, batch: int, *, num_ranks: int = 1) -> StepLedger:
    """Count a step of one token for each of `batch` sequences, on one GPU. num_ranks: GPUs that share every matrix and
    all-reduce the outputs of the blocks. One layer is counted and multiplied by the number of layers."""
    own = share_of(shape, num_ranks)
    prepared = prepare(
        meta_layer(own),
        is_static=True,
        num_slots=batch * PAGE_SIZE,
        max_rows=batch,
        max_sequences=batch,
        max_places=PAGE_SIZE,
    )
    ends, with_layer = (_count(prepared, batch, choices) for choices in ((SKIP, SKIP), (FULL, FULL)))
    layers = shape.num_layers
    return StepLedger(
        batch=batch,
        num_kernels=ends.num_kernels + layers * (with_layer.num_kernels - ends.num_kernels),
        num_bytes=ends.num_bytes + layers * (with_layer.num_bytes - ends.num_bytes),
        kv_bytes_per_place=layers * own.kv_bytes_per_token,
        resident_bytes=2 * own.num_parameters,
        num_all_reduces=2 * layers if num_ranks > 1 else 0,
    )


def share_of(shape: ModelShape, num_ranks: int) -> ModelShape:
    """Return the shape of the part of the model that the first rank has. The head is not divided."""
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=shape.num_kv_heads // num_ranks,
        mlp_size=shape.mlp_size // num_ranks,
    )


def meta_layer(shape: ModelShape, device: torch.device = _META) -> Decomposition:
    """Return a model of one layer in bfloat16, with the bodies that `fuse` makes with operators.

    `fuse` itself compares numbers, which the meta device does not have; a test compares these bodies with its bodies.
    """
    has_head_norms = shape.name.startswith("Qwen3")
    config = AutoConfig.for_model(
        "qwen3" if has_head_norms else "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131072,
    )
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]
    layer, trunk = model.model.layers[0], model.model
    return Decomposition(
        config=config,
        embedding=trunk.embed_tokens,
        embedding_scale=1.0,
        rotary=trunk.rotary_emb,
        sublayers=(_attention(layer, shape), _mlp(layer)),
        final_norm=_norm(trunk.norm),
        lm_head=model.lm_head,
        logit_scale=1.0,
        logit_softcap=None,
        shapes={0: LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)},
    )


def _attention(layer: Any, shape: ModelShape) -> Sublayer:
    block = layer.self_attn
    sublayer = _sublayer(0, "attention", block, layer.input_layernorm)
    has_norms = hasattr(block, "q_norm")
    heads = Heads(
        layer=0,
        layer_type="",
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norms=(_norm(block.q_norm), _norm(block.k_norm)) if has_norms else None,
        kind=AttentionKind(shape.head_dim**-0.5, None, None),
    )
    body = FusedLayer(
        sublayer=sublayer,
        pre_norm=_norm(layer.input_layernorm),
        first=Matrix([block.q_proj, block.k_proj, block.v_proj], blocked=False),
        between=lambda projected, rows: rows.attend_projected(heads, projected).flatten(1),
        last=Matrix([block.o_proj], blocked=False),
    )
    return replace(sublayer, body=body)


def _mlp(layer: Any) -> Sublayer:
    block = layer.mlp
    sublayer = _sublayer(1, "mlp", block, layer.post_attention_layernorm)
    body = FusedLayer(
        sublayer=sublayer,
        pre_norm=_norm(layer.post_attention_layernorm),
        first=Matrix([block.gate_proj, block.up_proj], blocked=False),
        between=lambda gate_up, _: gated(gate_up, "silu"),
        last=Matrix([block.down_proj], blocked=False),
    )
    return replace(sublayer, body=body)


def _sublayer(index: int, kind: Any, block: nn.Module, pre_norm: nn.Module) -> Sublayer:
    return Sublayer(
        index=index,
        kind=kind,
        layer=0,
        layer_type="",
        block=block,
        pre_norm=pre_norm,
        post_norm=None,
        residual_scale=1.0,
    )


def _norm(norm: Any) -> RmsNorm:
    return RmsNorm(norm.weight, _EPS, 0.0)


def _count(prepared: Prepared, batch: int, choices: Choices) -> _Count:
    """Count a pass of one row for each sequence."""
    spans = [RowSpan(one_run(index * PAGE_SIZE, PAGE_SIZE), 3, 1) for index in range(batch)]
    counter = ByteCounter()
    record_forward(prepared, counter, spans, [0] * batch, choices)
    return _Count(num_kernels(counter.launches), counter.num_bytes)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
