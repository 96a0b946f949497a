"""Split of a family's decoder layer into an attention and an MLP sublayer, checked on the loaded modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rayspec.model.attention import IMPLEMENTATION
from rayspec.model.kv_cache import LayerShape
from rayspec.model.load_check import (
    LONGEST_MASK,
    CheckRows,
    RecordingRows,
    TransformersLayers,
    boundaries,
    lack_of_memory,
    likeness,
    require_finite,
    sequences,
)
from rayspec.model.sublayers import Decomposition, Sublayer, hiding_window, run
from rayspec.types import CheckpointError, UnsupportedModelError

_NUM_CHECK_TOKENS = 10
_RESCALED_ROPE = ("dynamic", "longrope")
MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")


class NormLayout(NamedTuple):
    """Where a family puts its norms: module names in the decoder layer, None where there is no norm. One name has
    different meanings in different families, so `decompose` checks the layout that it chooses."""

    pre_attention: str | None
    post_attention: str | None
    pre_mlp: str | None
    post_mlp: str | None


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
    # HyperCLOVA X, whose norms after sublayers may be absent
    NormLayout("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    # VaultGemma
    NormLayout("input_layernorm", None, "pre_feedforward_layernorm", None),
    # Apertus
    NormLayout("attention_layernorm", None, "feedforward_layernorm", None),
    # AFMoE
    NormLayout("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
)


@torch.inference_mode()
def decompose(model: PreTrainedModel, *, layers: range | None = None) -> Decomposition:
    """Split `model` and check the result on random input. Switches the model to rayspec's packed attention.

    layers: the span of decoder layers to split, None for all. The span is within the layers that `load_model` loaded.

    Raises UnsupportedModelError with the difference if a layer is not an attention sublayer followed by an MLP
    sublayer; the model is then unchanged. Raises CheckpointError for weights that compute NaN or infinity.
    """
    config = model.config
    before = config._attn_implementation
    try:
        parts = outline(model, layers=layers)
        numbers = list(_distinct_layers(model, parts))
        for number, own in attention_calls(model, parts).items():
            sizes = {(call.key_dim, call.value_dim) for call in own}
            if len(sizes) != 1:
                raise UnsupportedModelError(  # noqa: TRY301
                    f"{config.model_type}: layer {number} calls attention with {len(sizes)} sizes of heads, not one"
                )
            parts.shapes[number] = LayerShape(sum(call.num_heads for call in own), *sizes.pop())
        _check_layers(model, parts, numbers)
        _check_masks(model, parts, numbers)
        _check_ends(model, parts)
    except UnsupportedModelError:
        config._attn_implementation = before
        raise
    except (AttributeError, TypeError, KeyError, RuntimeError, ValueError) as error:
        config._attn_implementation = before
        if (shortage := lack_of_memory(error)) is not None:
            raise CheckpointError(
                f"too little memory is left to check the loaded model ({shortage}): free memory, or set option 'dtype' "
                "or 'offload'"
            ) from error
        raise UnsupportedModelError(
            f"{config.model_type}: the decoder does not run sublayer by sublayer: {error}"
        ) from error
    config._attn_implementation = IMPLEMENTATION
    return parts


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the longest context whose rotary embedding is independent of the rest of the batch; None if unknown or
    unlimited. Of a model with several parts, the language model's."""
    config = config.get_text_config(decoder=True)
    changes = rope_change(config)
    longest: int | None = changes[1] if changes else getattr(config, "max_position_embeddings", None)
    return longest if longest is not None and longest > 0 else None


def rope_change(config: PretrainedConfig) -> tuple[str, int] | None:
    """Return the type of a rotary embedding that changes with the length of the batch, and the length up to which it
    does not; None for other embeddings."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in _of_layer_types(rope) or [rope]:
        if parameters.get("rope_type") in _RESCALED_ROPE:
            original = parameters.get("original_max_position_embeddings")
            limit: int = original or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            return parameters["rope_type"], limit
    return None


def _of_layer_types(rope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of each layer type; [] where all layers have the same. A file may have both forms at once,
    as transformers 5.10 saves Gemma 3: then those of the layer types count."""
    return [parameters for parameters in rope.values() if isinstance(parameters, dict)]


def why_context_ends(config: PretrainedConfig) -> str:
    """Say in words why `max_positions` is the longest context."""
    change = rope_change(config.get_text_config(decoder=True))
    if change is None:
        return f"the model ends at {max_positions(config)}"
    kind, limit = change
    return f"beyond {limit} tokens the model's rotary embedding ({kind}) changes with the length of the whole batch"


def trunk_and_layers(model: PreTrainedModel) -> tuple[Any, nn.ModuleList]:
    """Return the model without its LM head, and the list of its decoder layers. Raises UnsupportedModelError if there
    is no such list, no rotary embedding or no final norm."""
    trunk: Any = model.base_model
    layers = getattr(trunk, "layers", None)
    complete = hasattr(trunk, "rotary_emb") and hasattr(trunk, "norm")
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or not complete:
        raise UnsupportedModelError(
            f"{model.config.model_type}: no list of decoder layers with a rotary embedding and a final norm"
        )
    return trunk, layers


def outline(model: PreTrainedModel, *, layers: range | None = None) -> Decomposition:
    """Split without a check, and without the shapes of keys and values. The model may be without weights (on the meta
    device). Raises UnsupportedModelError for a model that does not split, as far as that shows without weights."""
    config = model.config
    foreign = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModelError(
            f"{config.model_type}: state of {', '.join(sorted(foreign))} layers cannot be cropped"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{config.model_type}: layers share keys and values, so they cannot be skipped")
    trunk, all_layers = trunk_and_layers(model)
    numbers = range(len(all_layers)) if layers is None else layers
    norms = {name for name, _ in all_layers[numbers[0]].named_children() if name.rstrip("12").endswith("norm")}
    layout = next((layout for layout in LAYOUTS if set(filter(None, layout)) == norms), None)
    if layout is None:
        raise UnsupportedModelError(f"{config.model_type}: unknown arrangement of norms {sorted(norms)}")
    typed_rope = bool(_of_layer_types(getattr(config, "rope_parameters", None) or {}))
    sublayers: list[Sublayer] = []
    for number in numbers:
        layer: Any = all_layers[number]
        mlp = next((getattr(layer, name) for name in MLP_NAMES if hasattr(layer, name)), None)
        for index, kind, block, pre, post in (
            (2 * number, "attention", getattr(layer, "self_attn", None), layout.pre_attention, layout.post_attention),
            (2 * number + 1, "mlp", mlp, layout.pre_mlp, layout.post_mlp),
        ):
            if block is None:
                raise UnsupportedModelError(f"{config.model_type}: layer {number} has no {kind} module of a known name")
            sublayers.append(
                Sublayer(
                    index=index,
                    kind=kind,  # type: ignore[arg-type]
                    layer=number,
                    layer_type=config.layer_types[number] if typed_rope else "",
                    block=block,
                    pre_norm=getattr(layer, pre) if pre else None,
                    post_norm=getattr(layer, post) if post else None,
                    residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
                )
            )
        held = {id(weight) for one in sublayers[-2:] for module in one.modules for weight in module.parameters()}
        if not held.issuperset(map(id, layer.parameters())):
            raise UnsupportedModelError(f"{config.model_type}: layer {number} has weights outside attention and MLP")
    is_first, is_last = 0 in numbers, len(all_layers) - 1 in numbers
    return Decomposition(
        config=config,
        embedding=model.get_input_embeddings() if is_first else None,
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0)),
        rotary=trunk.rotary_emb,
        sublayers=tuple(sublayers),
        final_norm=trunk.norm if is_last else None,
        lm_head=model.get_output_embeddings() if is_last else None,  # type: ignore[no-untyped-call]
        logit_scale=float(getattr(config, "logit_scale", 1.0)) / float(getattr(config, "logits_scaling", 1.0)),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        shapes={},
    )


@torch.inference_mode()
def attention_calls(model: PreTrainedModel, parts: Decomposition) -> dict[int, list[LayerShape]]:
    """Return the keys and values that each layer passes to its attention calls. Works on the meta device, too, except
    for code that needs numbers, as a rotary embedding that rescales. Errors of the model's own code are not caught."""
    hidden = random_hidden(parts)
    calls: dict[int, list[LayerShape]] = {}
    for number, alike in _distinct_layers(model, parts).items():
        rows = RecordingRows(torch.arange(hidden.shape[1], device=parts.device))
        parts.rotate(hidden, rows)
        with _replaced(model.config, {"_attn_implementation": IMPLEMENTATION}):
            run([one for one in parts.sublayers if one.layer == number and one.kind == "attention"], hidden, rows)
        calls |= {each: [shape for shape, _ in rows.calls] for each in alike}
    return dict(sorted(calls.items()))


def _check_layers(model: PreTrainedModel, parts: Decomposition, numbers: Sequence[int]) -> None:
    """Require that each of these layers is its two sublayers, one after the other, in all rows of a check. The MLP gets
    the states that the layer itself has after attention, in calls of the same shape: a router of experts would turn a
    difference in rounding into another expert."""
    rows = check_rows(parts, with_chunks=True)
    pairs = {number: [one for one in parts.sublayers if one.layer == number] for number in numbers}
    between = {number: mlp.block if mlp.pre_norm is None else mlp.pre_norm for number, (_, mlp) in pairs.items()}
    with _replaced(model.config, {"_attn_implementation": "eager"}):
        entering, after, calls = TransformersLayers(model.base_model, numbers).states(rows, between)
    inputs = rows.in_passes(entering)
    for number, (attention, mlp) in pairs.items():
        message = f"{model.config.model_type}: layer {number} is not attention, then MLP"
        for each in rows.passes:
            each.calls.clear()  # they tell the windows of this layer
        with _replaced(model.config, {"_attn_implementation": IMPLEMENTATION}):
            actual = rows.outputs(number, attention, hidden=inputs)
        # Some families have the window in the mask only, which packed attention does not use. Pages outside the window
        # would also be given back too early.
        (passed,) = {window for _, window, *_ in rows.passes[0].calls}
        if hiding_window(passed, model.config) != parts.windows.get(number):
            raise UnsupportedModelError(
                f"{model.config.model_type}: attention is called with sliding window {passed}, but the config says "
                f"{parts.windows.get(number)}"
            )
        _require_equal(torch.cat(rows.in_passes(after[number]), 1), actual, message)
        for before, leaving in calls[number]:
            _require_equal(leaving, mlp(before.flatten(0, 1)[None], rows.passes[0]).view_as(leaving), message)


def _check_masks(model: PreTrainedModel, parts: Decomposition, numbers: Sequence[int]) -> None:
    """Require that transformers' masks hide no other keys than packed attention does, around every length that the
    config names."""
    lengths = boundaries(model.config, max_positions(model.config))
    layers = TransformersLayers(model.base_model, numbers)
    for length in lengths:
        context = max(0, min(length - _NUM_CHECK_TOKENS // 2, lengths[-1] - _NUM_CHECK_TOKENS))
        if context > LONGEST_MASK:
            break
        hidden = random_hidden(parts)
        with _replaced(model.config, {"_attn_implementation": "eager"}):
            masks = layers.mask(context, hidden)
        for number, mask in masks.items():
            window, is_same = parts.windows.get(number), False
            if mask is not None:
                num_rows, num_keys = mask.shape
                rows = torch.arange(context, context + num_rows, device=mask.device)[:, None]
                keys = torch.arange(context + num_rows - num_keys, context + num_rows, device=mask.device)
                lowest = rows - window if window else torch.full_like(rows, -1)
                is_complete = bool((lowest + 1).clamp(min=0).min() >= keys[0])
                is_same = is_complete and torch.equal(mask, (keys <= rows) & (keys > lowest))
            if not is_same:
                raise UnsupportedModelError(
                    f"{model.config.model_type}: from token {context} on, the mask of layer {number} hides other keys "
                    f"than the layer's sliding window, which is {window}"
                )


def _check_ends(model: PreTrainedModel, parts: Decomposition) -> None:
    """Require that the model without layers equals the span's embedding and head. Finds unknown scales and softcaps."""
    if parts.embedding is None and parts.lm_head is None:
        return
    trunk: Any = model.base_model
    stubs: dict[str, nn.Module] = {"layers": nn.ModuleList()}
    if parts.final_norm is None:
        stubs["norm"] = nn.Identity()
    if parts.embedding is not None:
        token_ids = torch.arange(_NUM_CHECK_TOKENS, device=parts.device) % model.config.vocab_size
        inputs, hidden = {"input_ids": token_ids[None]}, parts.embed(token_ids)
    else:
        embedded = random_hidden(parts)
        inputs, hidden = {"inputs_embeds": embedded}, embedded * parts.embedding_scale
    with _replaced(trunk, stubs):
        if parts.lm_head is None:
            expected, actual = trunk(**inputs, use_cache=False).last_hidden_state, hidden
        else:
            expected, actual = model(**inputs, use_cache=False).logits[0], parts.head(hidden)
    _require_equal(expected, actual, f"{model.config.model_type}: embedding, norm and head differ from the model's")
    with _replaced(trunk, stubs | {"norm": _Doubling()}):
        expected = trunk(**inputs, use_cache=False).last_hidden_state
    _require_equal(expected, 2 * hidden, f"{model.config.model_type}: the final norm does not run only at the end")


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return how far two computations of the same sublayer may differ, as a share of its largest output."""
    return 1e-4 if dtype == torch.float32 else 5e-2


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected number."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def random_hidden(parts: Decomposition) -> Tensor:
    """Return a few random rows that are the same in every call: [1, N, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _NUM_CHECK_TOKENS, parts.config.hidden_size, generator=generator)
    return hidden.to(parts.device, parts.dtype)


def check_rows(parts: Decomposition, *, with_chunks: bool, dtype: torch.dtype | None = None) -> CheckRows:
    """Return the rows on which computations of the parts' sublayers are compared. with_chunks: see `sequences`. dtype:
    of the rows, by default that of the parts."""
    lengths = boundaries(parts.config, max_positions(parts.config))
    return CheckRows(parts, sequences(lengths, with_chunks=with_chunks), dtype=dtype)


def _distinct_layers(model: PreTrainedModel, parts: Decomposition) -> dict[int, list[int]]:
    """Return the first layer of each kind, with all layers of the kind: they differ in their weights only."""
    _, layers = trunk_and_layers(model)
    types: Sequence[str] | None = getattr(model.config, "layer_types", None)
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for number in dict.fromkeys(sublayer.layer for sublayer in parts.sublayers):
        kinds.setdefault((types[number] if types else "", likeness(layers[number])), []).append(number)
    return {alike[0]: alike for alike in kinds.values()}


def _require_equal(expected: Tensor, actual: Tensor, message: str) -> None:
    """Raise UnsupportedModelError if the results differ by more than rounding."""
    require_finite(expected)
    difference = largest_difference(actual, expected)
    if not difference <= rounding_tolerance(expected.dtype):
        raise UnsupportedModelError(f"{message} (largest difference {difference:.1e})")


class _Doubling(nn.Module):
    """Stands in for a norm, because a norm after itself changes nothing where it has no weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


@contextmanager
def _replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
