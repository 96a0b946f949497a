"""What the decoder layers of a model keep of a sequence, and whether stages can divide them: by passes of the model
without weights, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rayspec.types import UnsupportedModelError

META_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_COUNTS = (2, 4)  # tokens of the passes: fewer than any sliding window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChain:
    """The decoder layers, one after another. token_bytes, state_bytes: what each keeps in the cache for every token,
    and for the sequence. num_outputs: length of the tuple that a layer returns; 0 if it returns a tensor. after: the
    modules with weights between the last layer and the head. why_whole: why stages cannot divide the layers; empty if
    they can."""

    layers: nn.ModuleList
    token_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    num_outputs: int
    after: tuple[nn.Module, ...]
    why_whole: str


def decoder_layers(model: Any, config: PretrainedConfig) -> nn.ModuleList:
    """Return the decoder layers of the language model, which may be a part of the model."""
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    for module in [*model.get_decoder().modules(), *model.modules()]:
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{config.model_type}: no list of {count} decoder layers")


def cached_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a cache, or in a layer of one."""
    if isinstance(value, Tensor):
        return value.nbytes
    if type(value).__name__.endswith(("Cache", "Layer")):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(cached_bytes, parts))


def layer_chain(model: Any) -> LayerChain:
    """Return the layers of a model on the meta device. Raises UnsupportedModelError for a model that cannot run there,
    or whose cache has no layers."""
    layers = decoder_layers(model, model.config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others have no kernel for every dtype, or read numbers
    try:
        (few, _), (many, events) = (_traced(model, layers, count) for count in _COUNTS)
    except META_ERRORS as error:
        raise UnsupportedModelError(f"{model.config.model_type}: it does not run without weights: {error}") from error
    if not len(few) == len(many) == len(layers):
        raise UnsupportedModelError(f"{model.config.model_type}: its cache does not have a part for each layer")
    of_token = [(after - before) // (_COUNTS[1] - _COUNTS[0]) for before, after in zip(few, many, strict=True)]
    after, why_whole = _after_the_chain(model, layers, events)
    return LayerChain(
        layers=layers,
        token_bytes=tuple(of_token),
        state_bytes=tuple(before - _COUNTS[0] * each for before, each in zip(few, of_token, strict=True)),
        num_outputs=len(output) if isinstance(output := events[1].output, tuple) else 0,
        after=after,
        why_whole=why_whole,
    )


@dataclass(slots=True)
class _Call:
    module: nn.Module
    given: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Any = None


def _traced(model: Any, layers: nn.ModuleList, num_tokens: int) -> tuple[list[int], list[_Call]]:
    """Run a pass. Return the bytes in each layer of the cache, and the calls of modules with weights of their own
    outside of layers, and of layers, in order."""
    inside = {id(module) for layer in layers for module in layer.modules()} - {id(layer) for layer in layers}
    noted = [
        each
        for each in model.modules()
        if id(each) not in inside and (each in list(layers) or any(True for _ in each.parameters(recurse=False)))
    ]
    calls: list[_Call] = []

    def begun(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(_Call(module, given, named))

    def ended(module: nn.Module, _: Any, output: Any) -> None:
        next(call for call in reversed(calls) if call.module is module).output = output

    handles = [
        handle
        for each in noted
        for handle in (each.register_forward_pre_hook(begun, with_kwargs=True), each.register_forward_hook(ended))
    ]
    try:
        output = model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device="meta"), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    cache = next(getattr(output, name) for name in ("past_key_values", "cache_params") if hasattr(output, name))
    return [cached_bytes(each) for each in cache.layers], calls


def _after_the_chain(model: Any, layers: nn.ModuleList, calls: list[_Call]) -> tuple[tuple[nn.Module, ...], str]:
    """Return the modules with weights after the layers, and why stages cannot divide the layers."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    first, *others = [call for call in calls if call.module is not head]
    chain, after = others[: len(layers)], tuple(call.module for call in others[len(layers) :])
    if first.module is not embedding or [call.module for call in chain] != list(layers):
        return after, "other weights than the embedding come before its layers, or a layer does not run once"
    weights = [{id(weight) for weight in layer.parameters()} for layer in layers]
    if sum(map(len, weights)) != len(set[int]().union(*weights)):
        return after, "its layers share weights"
    return after, _other_ways(chain)


def _other_ways(chain: list[_Call]) -> str:
    """Return what else than the hidden states goes from layer to layer; empty for nothing."""
    states: Any = None
    made: list[Any] = []
    for call in chain:
        hidden, *others = [*call.given, *call.named.values()]
        if states is not None and hidden is not states:
            return "the model changes the hidden states between layers"
        if any(isinstance(each, dict | list) for each in others):
            return "layers share a record of their own"
        if any(isinstance(each, Tensor) and each.is_floating_point() and each.shape == hidden.shape for each in others):
            return "layers get more states than those of the layer before"
        if any(each is one for each in others for one in made):
            return "a layer gets more from another layer than hidden states"
        states, *more = call.output if isinstance(call.output, tuple) else (call.output,)
        made += [each for each in more if each is not None]
    return ""
