"""What the decoder layers of a model keep of a sequence, and which states they read: by passes of the model without
weights, on the meta device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from rayspec.types import UnsupportedModelError

MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_COUNTS = (2, 4)  # tokens of the passes: fewer than any sliding window
_NUM_FLOWING = 5  # tokens of a pass, unlike the usual numbers of states of a token


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


def layer_bytes(model: Any) -> list[tuple[int, int]]:
    """Return what each decoder layer of a model on the meta device keeps in the cache: bytes of every token, and of the
    sequence. Raises UnsupportedModelError for a model that cannot run there, or whose cache has no layers."""
    layers = decoder_layers(model, model.config)
    try:
        few, many = (_bytes_after(model, count) for count in _COUNTS)
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(f"{model.config.model_type}: it does not run without weights: {error}") from error
    if not len(few) == len(many) <= len(layers):
        raise UnsupportedModelError(f"{model.config.model_type}: its cache does not have a part for each layer")
    of_token = [(after - before) // (_COUNTS[1] - _COUNTS[0]) for before, after in zip(few, many, strict=True)]
    found = [(each, before - _COUNTS[0] * each) for each, before in zip(of_token, few, strict=True)]
    return found + [(0, 0)] * (len(layers) - len(found))  # the last layers may read the keys of earlier ones


def _bytes_after(model: Any, num_tokens: int) -> list[int]:
    output = meta_pass(model, num_tokens)
    names = ("cache", "past_key_values", "cache_params")  # of transformers from 5.24 on, and before
    cache = next(getattr(output, name) for name in names if hasattr(output, name))
    return [cached_bytes(each) for each in cache.layers]


def meta_pass(model: Any, num_tokens: int) -> Any:
    """Return the output of a pass of a model on the meta device. Raises one of `MODEL_ERRORS` if it cannot."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others have no kernel for every dtype, or read numbers
    # Without a cache, some models look for several texts in a row, for which they read numbers.
    caches = {"past_key_values": DynamicCache(config=model.config)} if model._supports_default_dynamic_cache() else {}
    return model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device="meta"), use_cache=True, **caches)


class Flow(NamedTuple):
    """How states pass through the decoder layers of a model.

    num_nones: values that a layer returns after the states, for no other layer; None if it returns no tuple. starts:
    layers that can begin a stage, because no layer from there on reads what an earlier one computed, except its
    output. reads_embedding: whether layers after the first read the embeddings of the tokens.
    """

    num_nones: int | None
    starts: tuple[int, ...]
    reads_embedding: bool


@torch.enable_grad()
def layer_flow(model: Any) -> Flow:
    """Return the flow of a model on the meta device. Its states are cut before every layer, so that a derivative shows
    what else a layer reads. Raises UnsupportedModelError for a model that cannot run there, or whose layers do not
    each run once, on the output of the layer before, and before final norm and head, or whose states are not
    [..., tokens, numbers], as those of hyper-connections."""
    layers = list(decoder_layers(model, model.config))
    ends = [getattr(model.base_model, "norm", None), model.get_output_embeddings()]
    seen: list[tuple[nn.Module, Tensor]] = []  # modules that run, and the states that they get
    gets: set[int] = set()  # whatever else layers get
    embedded: list[Tensor] = []
    leaves: list[Tensor] = []
    outputs: list[Any] = []

    def cut(states: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(states.detach().requires_grad_())
        return kept[-1] * 1  # the model may write into it

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        hidden = given[0] if given else named["hidden_states"]
        seen.append((module, hidden))
        if module not in layers:
            return None
        gets.update(id(each) for each in (*given, *named.values()) if each is not hidden)
        own = cut(hidden, leaves)
        return ((own, *given[1:]), named) if given else (given, named | {"hidden_states": own})

    def is_all_of(states: Tensor, before: Tensor) -> bool:
        return states is before or (states._base is before and states.shape == before.shape)

    embedding = model.get_input_embeddings()
    handles = [embedding.register_forward_hook(lambda _module, _given, output: cut(output, embedded))]
    handles += [each.register_forward_pre_hook(enter, with_kwargs=True) for each in {*layers, *filter(None, ends)}]
    handles += [each.register_forward_hook(lambda _module, _given, output: outputs.append(output)) for each in layers]
    try:
        logits = meta_pass(model, _NUM_FLOWING).logits
        rows = [output if isinstance(output, tuple) else (output,) for output in outputs]
        is_chain = (
            [module for module, _ in seen[: len(layers)]] == layers
            and len(outputs) == len(layers)
            and all(is_all_of(hidden, before[0]) for (_, hidden), before in zip(seen[1:], rows[:-1], strict=False))
            and not any(id(other) in gets for output in rows for other in output[1:] if other is not None)
        )
        if not is_chain or any(_NUM_FLOWING in output[0].shape[:-2] for output in rows):
            why = "pass on several states of a token" if is_chain else "do not simply follow one another"
            raise UnsupportedModelError(f"{model.config.model_type}: its layers {why}")
        firsts, reads_embedding = [], False  # the first layer whose states each layer, and the head, reads
        for number, states in enumerate([*(output[0] for output in rows[1:]), logits], start=1):
            own = leaves[: min(number, len(layers) - 1)]
            found = torch.autograd.grad(states.sum(), [*own, *embedded], retain_graph=True, allow_unused=True)
            reads_embedding |= any(each is not None for each in found[len(own) :])
            firsts.append(next((at for at, each in enumerate(found[: len(own)]) if each is not None), number))
    except MODEL_ERRORS as error:
        raise UnsupportedModelError(f"{model.config.model_type}: it does not run without weights: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    starts = [at for at in range(len(layers)) if all(first >= at for first in firsts[max(0, at - 1) :])]
    num_nones = len(rows[0]) - 1 if isinstance(outputs[0], tuple) else None
    return Flow(num_nones, tuple(starts), reads_embedding)
