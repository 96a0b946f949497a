"""Bytes of a model by sublayer, from its config alone: the model is built on the meta device, without weights."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from rayspec.choices import Weights
from rayspec.config import EngineConfig
from rayspec.model.architecture import attention_calls, outline
from rayspec.model.fused import matrices_of
from rayspec.model.kv_cache import LayerShape, bytes_per_slot
from rayspec.model.layer_bytes import Flow, decoder_layers, layer_bytes, layer_flow
from rayspec.model.matrices import can_copy, num_bytes
from rayspec.model.sublayers import Decomposition, Sublayer, window_of
from rayspec.model.weights import format_of_weights, in_one_line, quantiser_settings
from rayspec.types import ConfigError, UnsupportedModelError

Quantization = Literal["fp8", "int8", "int4"]

# int4: 4 bits, and a 32-bit scale for each group of 64, as in bitsandbytes; others have fewer or smaller scales.
BYTES_PER_LINEAR_WEIGHT: dict[Quantization, float] = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 4 / 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes of one decoder layer on one rank.

    sublayer_bytes: weights of attention and of MLP, each with its norms; a single number if the family's layout is
        unknown. expert_bytes: the experts of a mixture among them, in the last sublayer. expert_share: share of them
        that a token goes through. copy_bytes: quantised copies for drafts. kv_bytes_per_token: keys and values.
        state_bytes: recurrent state of a sequence, with the copy that a verify keeps. window: the sliding window in
        tokens, None for full attention.
    """

    sublayer_bytes: tuple[int, ...]
    expert_bytes: int = 0
    expert_share: float = 1.0
    copy_bytes: int = 0
    kv_bytes_per_token: int
    state_bytes: int = 0
    window: int | None

    @property
    def weight_bytes(self) -> int:
        return sum(self.sublayer_bytes)

    def expert_bytes_unread(self, rows: int) -> float:
        """Return the expected bytes of the experts that none of these rows goes through, if each chooses at random."""
        return self.expert_bytes * (1 - self.expert_share) ** rows

    def kv_bytes_read(self, context: int) -> int:
        """Return the KV cache bytes that one decode step reads for a sequence of `context` tokens."""
        return self.kv_bytes_per_token * min(context, self.window or context)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Bytes on one tensor-parallel rank. num_parameters: parameters of the whole model, a tied matrix counted once.

    embedding_bytes: all matrices before the layers. norm_bytes, head_bytes: final norm and LM head. head_bytes counts
    the head's matrix even if it is `tied` to the embedding. head_copy_bytes: the head's copy for drafts. why_whole: why
    stages cannot divide the layers; empty if they can. starts: layers that can begin a stage. embedding_everywhere:
    whether every stage has the embedding, which its layers read.
    """

    num_parameters: int
    embedding_bytes: int
    layers: tuple[LayerSizes, ...]
    norm_bytes: int
    head_bytes: int
    tied: bool
    head_copy_bytes: int = 0
    why_whole: str = ""
    starts: tuple[int, ...]
    embedding_everywhere: bool = False

    @property
    def window(self) -> int | None:
        """The longest sliding window of a layer, in tokens; None if no layer has one."""
        return max((layer.window for layer in self.layers if layer.window), default=None)

    @property
    def splits(self) -> bool:
        """Whether the layout of every layer, attention and MLP, is known. The check at load has the last word."""
        return all(len(layer.sublayer_bytes) == 2 for layer in self.layers)

    def last_stage_bytes(self, num_stages: int) -> int:
        """Return the bytes of final norm and head. A tied head shares the embedding's matrix only with one stage."""
        shared = self.tied and num_stages == 1
        return self.norm_bytes + (0 if shared else self.head_bytes)


def quantisation_of(config: EngineConfig, model: PretrainedConfig, *, on_cpu: bool) -> Quantization | None:
    """Return the type of quantised linear weights after the load, None for plain ones. on_cpu: whether they are loaded
    to a CPU."""
    settings = quantiser_settings(config, model)
    _, is_plain = format_of_weights(settings, on_cpu=on_cpu)
    return None if is_plain else stored_quantisation(settings)


def stored_quantisation(settings: Mapping[str, Any]) -> Quantization | None:
    """Return the type of linear weights in the files of a checkpoint with these settings of its quantizer, None for
    plain ones. Fewer than 4 bits count as int4, unknown formats as int8."""
    if not settings:
        return None
    name, _ = format_of_weights(settings, on_cpu=False)
    said = f"{name} {settings.get('quant_type', '')} {settings.get('weights', '')}".lower()
    has_few_bits = settings.get("load_in_4bit") or settings.get("bits") in (2, 3, 4) or re.search(r"int[24]|fp4", said)
    return "fp8" if "fp8" in name else "int4" if has_few_bits else "int8"


def rank_counts(config: PretrainedConfig) -> dict[str, int]:
    """Return the numbers of the config that the tensor-parallel ranks of a stage must divide, by what they count."""
    text = config.get_text_config(decoder=True)
    num_heads = getattr(text, "num_attention_heads", None) or 1
    counts = {
        "attention heads": num_heads,
        "key-value heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "MLP columns": getattr(text, "intermediate_size", None),
        "MLP columns of an expert": getattr(text, "moe_intermediate_size", None),
    }
    return {name: count for name, count in counts.items() if isinstance(count, int) and count}


def model_sizes(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    tensor: int = 1,
    draft_weights: Collection[Weights] = (),
    may_split: bool = True,
    on_cpu: bool = False,
) -> ModelSizes:
    """Return the sizes of the causal LM that `config` describes.

    dtype: type of keys, values and all weights. quantization: a smaller type for the matrices of the layers, but for
    modules that the checkpoint excepts; embedding, norms, biases and head stay in dtype.
    tensor: ranks that share the layers' matrices and KV heads evenly. Each rank has all of the other weights.
    draft_weights: types of the quantised copies for drafts; a model with `quantization` gets no copies.
    may_split: whether layers may be split into attention and MLP, if that is possible. on_cpu: whether it is on a CPU,
    where copies are larger than on a GPU.

    Raises UnsupportedModelError if transformers has no causal LM for the config or the model has no list of layers, and
    ConfigError for a `tensor` that does not divide one of `rank_counts`.
    """
    text = config.get_text_config(decoder=True)
    for name, count in rank_counts(config).items():
        if tensor < 1 or count % tensor:
            raise ConfigError(f"option 'tensor' is {tensor}: it must divide the model's {count} {name}")
    model, parts = _meta_model(config, dtype)
    calls: Sequence[Sequence[LayerShape]] | None = None
    kept: Sequence[tuple[int, int]] = ()  # by layer, bytes of every token and of the sequence
    why_whole = ""
    if parts is not None and may_split:
        try:  # the calls that an engine sees when it has loaded the model
            calls = list(attention_calls(model, parts).values())
        except UnsupportedModelError:  # for a call that an engine cannot make
            may_split = False
        except (AttributeError, TypeError, KeyError, RuntimeError, ValueError):
            pass  # code that needs numbers, as a rotary embedding that rescales
    layers, parts = decoder_layers(model, config), parts if may_split else None
    flow = Flow(None, tuple(range(len(layers))), reads_embedding=False)
    if parts is None:
        try:
            kept = layer_bytes(model)
            flow = layer_flow(model)
        except UnsupportedModelError as error:
            why_whole = str(error)
    kept = kept or [  # ranks share the heads of a call
        (bytes_per_slot([replace(call, num_heads=math.ceil(call.num_heads / tensor)) for call in own], dtype), 0)
        for own in calls or _named_calls(layers, text)
    ]
    head = list(model.get_output_embeddings().parameters())
    known = {id(parameter) for parameter in (*layers.parameters(), *head)}
    tied = any(parameter is model.get_input_embeddings().weight for parameter in head)
    ends = [parameter for parameter in model.parameters() if id(parameter) not in known]
    ends += [model.get_input_embeddings().weight] if tied else []
    size = dtype.itemsize
    linear_bytes = BYTES_PER_LINEAR_WEIGHT[quantization] if quantization else size
    excepted = _excepted(model, config) if quantization else set()
    sizes = []
    for number, (layer, (token_bytes, sequence_bytes)) in enumerate(zip(layers, kept, strict=True)):
        sublayers = parts.sublayers[2 * number : 2 * number + 2] if parts is not None else ()
        weights = [[weight for module in one.modules for weight in module.parameters()] for one in sublayers]
        experts, expert_share = _experts(layer, text)
        sizes.append(
            LayerSizes(
                expert_bytes=_bytes_of(experts, size, linear_bytes, tensor, excepted),
                expert_share=expert_share,
                sublayer_bytes=tuple(
                    _bytes_of(each, size, linear_bytes, tensor, excepted)
                    for each in weights or [list(layer.parameters())]
                ),
                copy_bytes=sum(
                    copy_bytes(one, each, tensor=tensor, on_cpu=on_cpu)
                    for one in sublayers
                    for each in (draft_weights if quantization is None else ())
                ),
                kv_bytes_per_token=token_bytes,
                state_bytes=2 * sequence_bytes,
                window=window_of(getattr(layer, "self_attn", None), text),
            )
        )
    return ModelSizes(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_bytes=_bytes_of((parameter for parameter in ends if parameter.ndim > 1), size, size),
        layers=tuple(sizes),
        norm_bytes=_bytes_of((parameter for parameter in ends if parameter.ndim == 1), size, size),
        head_bytes=_bytes_of(head, size, size),
        tied=tied,
        head_copy_bytes=_head_copy_bytes(model.get_output_embeddings(), draft_weights if parts else (), on_cpu=on_cpu),
        why_whole=why_whole,
        starts=flow.starts,
        embedding_everywhere=flow.reads_embedding,
    )


def quantised_bytes(
    config: PretrainedConfig, weights: Weights, *, tensor: int = 1, on_cpu: bool = False
) -> tuple[int, ...]:
    """Return the bytes of each sublayer's quantised copy, in order, on one of `tensor` ranks, 0 for a layout without;
    nothing for a model that does not split. The check at load may leave out copies. Raises as `model_sizes`."""
    _, parts = _meta_model(config)
    sublayers = parts.sublayers if parts is not None else ()
    return tuple(copy_bytes(one, weights, tensor=tensor, on_cpu=on_cpu) for one in sublayers)


def copy_bytes(sublayer: Sublayer, weights: Weights, *, tensor: int = 1, on_cpu: bool) -> int:
    """Return the bytes of a sublayer's quantised copies on one of `tensor` ranks, 0 if its layout has none. Ranks share
    the rows of the first matrix and the columns of the last."""
    try:
        first, last = matrices_of(sublayer.block, sublayer.kind)
        sizes = [(sum(len(each.weight) for each in first) // tensor, first[0].weight.shape[1])]
        if isinstance(last, nn.Linear):
            sizes.append((last.out_features, last.in_features // tensor))
    except AttributeError:
        return 0
    return sum(num_bytes(weights, *size, on_cpu=on_cpu) for size in sizes if can_copy(weights, size[1]))


def _excepted(model: nn.Module, config: PretrainedConfig) -> set[int]:
    """Return the ids of the weights that a quantised checkpoint has in full. Names are matched as transformers does."""
    settings = quantiser_settings(EngineConfig(model="sized"), config)
    names = settings.get("modules_to_not_convert") or settings.get("llm_int8_skip_modules") or ()
    is_named = re.compile(rf"(?:{'|'.join(names)})(?:(?<=\.)|(?=\.|$))").match
    return {
        id(weight)
        for name, module in model.named_modules()
        if names and (is_named(name) or name.endswith(tuple(names)))
        for weight in module.parameters(recurse=False)
    }


def _head_copy_bytes(head: nn.Module, draft_weights: Collection[Weights], *, on_cpu: bool) -> int:
    """Return the bytes of the LM head's copy for drafts, which has the smallest type that they have; on a CPU also of
    the head in another memory layout. 0 if it has none."""
    weights: Weights = "int4" if "int4" in draft_weights else "int8"
    if not (draft_weights and isinstance(head, nn.Linear) and can_copy(weights, head.in_features)):
        return 0
    laid_out = head.weight.nbytes if on_cpu else 0
    return laid_out + num_bytes(weights, head.out_features, head.in_features, on_cpu=on_cpu)


def _experts(layer: nn.Module, text: PretrainedConfig) -> tuple[list[nn.Parameter], float]:
    """Return the weights of the layer's experts, and the share of them that a token goes through."""
    modules = [module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    weights = [weight for module in modules for weight in module.parameters()]
    count = next((len(weight) for weight in weights if weight.ndim > 2), 0)
    chosen = getattr(text, "num_experts_per_tok", None)
    return (weights, min(1.0, chosen / count)) if count and isinstance(chosen, int) else ([], 1.0)


def _bytes_of(
    parameters: Iterable[nn.Parameter],
    itemsize: int,
    linear_bytes: float,
    num_ranks: int = 1,
    excepted: Collection[int] = (),
) -> int:
    """Return the bytes on a rank: linear_bytes for each number of a matrix, which ranks share; itemsize for each of a
    vector, which every rank holds in full. excepted: ids of matrices with itemsize for each number."""
    return sum(
        math.ceil(each.numel() * (itemsize if id(each) in excepted else linear_bytes) / num_ranks)
        if each.ndim > 1
        else each.numel() * itemsize
        for each in parameters
    )


def _meta_model(config: PretrainedConfig, dtype: torch.dtype | None = None) -> tuple[Any, Decomposition | None]:
    """Build the model without weights, and split it; None for a model that does not split."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # before transformers lists all its model types
        raise UnsupportedModelError(f"{config.model_type}: by this config alone, not a causal LM in transformers")
    try:
        with torch.device("meta"):  # unlike accelerate's init_empty_weights it leaves tied matrices tied
            own = copy.deepcopy(config)  # transformers writes the dtype into it
            model: Any = AutoModelForCausalLM.from_config(own, dtype=dtype)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, ArithmeticError) as error:
        raise UnsupportedModelError(
            f"{config.model_type}: not a causal LM that can be built: {in_one_line(error)}"
        ) from error
    try:
        return model, outline(model)
    except UnsupportedModelError:
        return model, None


def _named_calls(layers: nn.ModuleList, text: PretrainedConfig) -> Sequence[Sequence[LayerShape]]:
    """Return one call for each layer, with the heads that the config names."""
    if not getattr(text, "num_attention_heads", None):
        raise UnsupportedModelError(f"{text.model_type}: its layers have no attention heads, so no keys and values")
    num_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    usual_dim = text.hidden_size // text.num_attention_heads
    dims = [int(getattr(getattr(layer, "self_attn", None), "head_dim", None) or usual_dim) for layer in layers]
    return [[LayerShape(num_heads, dim, dim)] for dim in dims]
