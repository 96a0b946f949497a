"""How a family's decoder layer splits into an attention and an MLP sublayer, checked on the real modules at load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rayspec.model.attention import IMPLEMENTATION, PackedRows, pack
from rayspec.model.kv_arena import KVArena, LayerShape
from rayspec.model.sublayers import Sublayer, run
from rayspec.types import CheckpointError, UnsupportedModelError

_NUM_CHECK_TOKENS = 10
_RESCALED_ROPE = ("dynamic", "longrope")
_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True, slots=True)
class NormLayout:
    """Where a family puts its norms: module names in the decoder layer, None where there is no norm.

    The same name has different meanings in different families, so a layout counts only once the check has passed.
    """

    pre_attention: str | None
    post_attention: str | None
    pre_mlp: str | None
    post_mlp: str | None

    @property
    def names(self) -> list[str]:
        return [n for n in (self.pre_attention, self.post_attention, self.pre_mlp, self.post_mlp) if n is not None]


LAYOUTS = (
    # GLM4
    NormLayout("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # Gemma2, Gemma3
    NormLayout(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    # OLMo2
    NormLayout(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    # Llama, Qwen2, Qwen3, Mistral, Phi3, GLM, SmolLM3, Granite, Qwen3-MoE, Mixtral
    NormLayout("input_layernorm", None, "post_attention_layernorm", None),
)


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A causal LM as embedding, sublayers and head. All hidden states are [1, N, hidden_size]."""

    config: PretrainedConfig
    embedding: nn.Module
    embedding_scale: float
    rotary: nn.Module
    sublayers: tuple[Sublayer, ...]
    final_norm: nn.Module
    lm_head: nn.Module
    logit_scale: float
    logit_softcap: float | None
    shapes: dict[int, LayerShape]

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return next(self.final_norm.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.final_norm.parameters()).device

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [N] -> [1, N, hidden_size]."""
        hidden: Tensor = self.embedding(token_ids[None])
        return hidden if self.embedding_scale == 1 else hidden * self.embedding_scale

    def rotate(self, hidden: Tensor, rows: PackedRows) -> None:
        """Fill `rows.rope`: cos and sin of the rows' positions, by layer type where the family tells them apart."""
        for layer_type in dict.fromkeys(sublayer.layer_type for sublayer in self.sublayers):
            typed = (layer_type,) if layer_type else ()
            rows.rope[layer_type] = self.rotary(hidden, rows.positions[None], *typed)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab_size] of [1, N, hidden_size]."""
        logits: Tensor = self.lm_head(self.final_norm(hidden))[0]
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @property
    def curve_names(self) -> list[str]:
        """What each sublayer costs like: sublayers of one name are the same work."""
        names = [_cost_name(sublayer) for sublayer in self.sublayers]
        kinds = {kind: len({n for n in names if n.startswith(kind)}) for kind in ("attention", "mlp")}
        return [name if kinds[s.kind] > 1 else s.kind for name, s in zip(names, self.sublayers, strict=True)]


@torch.inference_mode()
def decompose(model: PreTrainedModel) -> Decomposition:
    """Split `model` and prove it on random input. Switches the model to rayspec's packed attention.

    Raises UnsupportedModelError, saying what differs, for a family whose layers are not an attention sublayer followed
    by an MLP sublayer; the model is then as it was. Raises CheckpointError for weights that compute NaN.
    """
    config = model.config
    before = config._attn_implementation
    try:
        _require_croppable_attention(config)
        trunk, layers = _trunk(model)
        shapes = _layer_shapes(layers, model)
        layout = _matching_layout(layers[0], config)
        parts = _assemble(model, trunk, layers, layout, shapes)
        _check_layers(model, layers, parts)
        _check_ends(model, trunk, parts)
    except UnsupportedModelError:
        config._attn_implementation = before
        raise
    except (AttributeError, TypeError, KeyError, RuntimeError, ValueError) as error:
        config._attn_implementation = before
        raise UnsupportedModelError(
            f"{config.model_type}: the decoder does not run sublayer by sublayer: {error}"
        ) from error
    config._attn_implementation = IMPLEMENTATION
    return parts


def _cost_name(sublayer: Sublayer) -> str:
    window = getattr(sublayer.block, "sliding_window", None)
    return f"{sublayer.kind}:{type(sublayer.block).__name__}" + (f":window{window}" if window else "")


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest context whose rotary embedding does not depend on the length of the rest of the batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(v, dict) for v in rope.values()) else [rope]:
        if isinstance(parameters, dict) and parameters.get("rope_type") in _RESCALED_ROPE:
            original = parameters.get("original_max_position_embeddings")
            limit: int = original or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            return limit
    return getattr(config, "max_position_embeddings", None)


def _require_croppable_attention(config: PretrainedConfig) -> None:
    foreign = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModelError(
            f"{config.model_type}: state of {', '.join(sorted(foreign))} layers cannot be cropped"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{config.model_type}: layers share keys and values, so they cannot be skipped")


def _trunk(model: PreTrainedModel) -> tuple[Any, Any]:
    trunk: Any = model.base_model
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or not hasattr(trunk, "rotary_emb"):
        raise UnsupportedModelError(f"{model.config.model_type}: no list of decoder layers with a rotary embedding")
    return trunk, layers


def _layer_shapes(layers: Any, model: PreTrainedModel) -> dict[int, LayerShape]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shapes = {}
    for layer in layers:
        dim = int(layer.self_attn.head_dim)
        shapes[int(layer.self_attn.layer_idx)] = LayerShape(heads, dim, dim)
    return shapes


def _matching_layout(layer: nn.Module, config: PretrainedConfig) -> NormLayout:
    norms = {name for name, _ in layer.named_children() if name.endswith("norm")}
    for layout in LAYOUTS:
        if norms == set(layout.names):
            return layout
    raise UnsupportedModelError(f"{config.model_type}: unknown arrangement of norms {sorted(norms)}")


def _assemble(
    model: PreTrainedModel, trunk: Any, layers: Any, layout: NormLayout, shapes: dict[int, LayerShape]
) -> Decomposition:
    config = model.config
    typed_rope = all(isinstance(v, dict) for v in (getattr(config, "rope_parameters", None) or {"": None}).values())
    sublayers: list[Sublayer] = []
    for number, layer in enumerate(layers):
        mlp = next(getattr(layer, name) for name in _MLP_NAMES if hasattr(layer, name))
        for kind, block, pre, post in (
            ("attention", layer.self_attn, layout.pre_attention, layout.post_attention),
            ("mlp", mlp, layout.pre_mlp, layout.post_mlp),
        ):
            sublayers.append(
                Sublayer(
                    index=len(sublayers),
                    kind=kind,  # type: ignore[arg-type]
                    layer=number,
                    layer_type=config.layer_types[number] if typed_rope else "",
                    block=block,
                    pre_norm=getattr(layer, pre) if pre else None,
                    post_norm=getattr(layer, post) if post else None,
                    residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
                )
            )
    return Decomposition(
        config=config,
        embedding=model.get_input_embeddings(),
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0)),
        rotary=trunk.rotary_emb,
        sublayers=tuple(sublayers),
        final_norm=trunk.norm,
        lm_head=model.get_output_embeddings(),  # type: ignore[no-untyped-call]
        logit_scale=float(getattr(config, "logit_scale", 1.0)) / float(getattr(config, "logits_scaling", 1.0)),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        shapes=shapes,
    )


def _check_layers(model: PreTrainedModel, layers: Any, parts: Decomposition) -> None:
    """Each kind of layer must equal its two sublayers, attention included, on random hidden states."""
    dtype, device = parts.dtype, parts.device
    arena = KVArena(parts.shapes, _NUM_CHECK_TOKENS, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _NUM_CHECK_TOKENS, model.config.hidden_size, generator=generator).to(device, dtype)
    rows = pack(arena, [(0, 0, _NUM_CHECK_TOKENS)], device=device)
    parts.rotate(hidden, rows)
    for number in _distinct_layers(layers, model.config):
        attention, mlp = parts.sublayers[2 * number : 2 * number + 2]
        with _attention_implementation(model, "eager"):
            window = getattr(layers[number].self_attn, "sliding_window", None)
            expected = layers[number](
                hidden_states=hidden,
                position_embeddings=rows.rope[attention.layer_type],
                position_ids=rows.positions[None],
                attention_mask=_causal_mask(hidden, window),
            )
        with _attention_implementation(model, IMPLEMENTATION):
            actual = run((attention, mlp), hidden, rows)
        _require_equal(expected, actual, f"{model.config.model_type}: layer {number} is not attention, then MLP")


def _check_ends(model: PreTrainedModel, trunk: Any, parts: Decomposition) -> None:
    """The model without layers must equal embedding, final norm and head: finds scales and caps we do not know."""
    device = parts.device
    token_ids = torch.arange(_NUM_CHECK_TOKENS, device=device) % model.config.vocab_size
    layers, trunk.layers = trunk.layers, nn.ModuleList()
    try:
        expected = model(input_ids=token_ids[None], use_cache=False).logits[0]
    finally:
        trunk.layers = layers
    actual = parts.head(parts.embed(token_ids))
    _require_equal(expected, actual, f"{model.config.model_type}: embedding, norm and head differ from the model's")


def _distinct_layers(layers: Any, config: PretrainedConfig) -> list[int]:
    types: Sequence[str] = getattr(config, "layer_types", None) or [""] * len(layers)
    first: dict[tuple[Any, ...], int] = {}
    for number, layer in enumerate(layers):
        parts = tuple(type(module).__name__ for module in layer.children())
        first.setdefault((type(layer), types[number], parts), number)
    return list(first.values())


def _causal_mask(hidden: Tensor, window: int | None) -> Tensor:
    """[1, 1, N, N], 0 where a token may look and the dtype's minimum elsewhere."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    seen = positions[None] <= positions[:, None]
    if window:
        seen &= positions[None] > positions[:, None] - window
    mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
    return mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)[None, None]


def _require_equal(expected: Tensor, actual: Tensor, message: str) -> None:
    if not bool(expected.isfinite().all()):
        raise CheckpointError(
            f"the model computes NaN or infinity on plain input in {expected.dtype}: "
            "its weights are damaged, or overflow; try bfloat16 or float32"
        )
    scale = expected.float().abs().max().clamp(min=1.0)
    difference = float((expected.float() - actual.float()).abs().max() / scale)
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    if not difference <= tolerance:
        raise UnsupportedModelError(f"{message} (largest difference {difference:.1e}): speculation is off for it")


@contextmanager
def _attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
