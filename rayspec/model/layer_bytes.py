"""What the decoder layers of a model keep of a sequence: by passes of the model without weights, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rayspec.types import UnsupportedModelError

META_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
_COUNTS = (2, 4)  # tokens of the passes: fewer than any sliding window


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
    except META_ERRORS as error:
        raise UnsupportedModelError(f"{model.config.model_type}: it does not run without weights: {error}") from error
    if not len(few) == len(many) == len(layers):
        raise UnsupportedModelError(f"{model.config.model_type}: its cache does not have a part for each layer")
    of_token = [(after - before) // (_COUNTS[1] - _COUNTS[0]) for before, after in zip(few, many, strict=True)]
    return [(each, before - _COUNTS[0] * each) for each, before in zip(of_token, few, strict=True)]


def _bytes_after(model: Any, num_tokens: int) -> list[int]:
    output = meta_pass(model, num_tokens)
    names = ("cache", "past_key_values", "cache_params")  # of transformers from 5.24 on, and before
    cache = next(getattr(output, name) for name in names if hasattr(output, name))
    return [cached_bytes(each) for each in cache.layers]


def meta_pass(model: Any, num_tokens: int) -> Any:
    """Return the output of a pass of a model on the meta device. Raises one of `META_ERRORS` if it cannot run there."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the others have no kernel for every dtype, or read numbers
    return model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device="meta"), use_cache=True)
