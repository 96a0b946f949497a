"""Makes wider models that compute the same function, to measure speed with a text that can be checked."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@torch.no_grad()
def widen(model: PreTrainedModel, k: int) -> PreTrainedModel:
    """Make a new model, `k` times as wide in hidden size, heads, KV heads and MLP, that gives the same logits.

    Every hidden unit, head and MLP unit occurs k times; depth, head size, device and data type stay. Logits differ only
    by rounding, by about 1e-5 in float32; in bfloat16 weights are exact where k is a power of two. Raises `ValueError`
    if k < 1, for families other than Llama, Mistral, Qwen2 and Qwen3, and for quantized or tensor-parallel weights.
    """
    if k < 1:
        raise ValueError(f"k={k}: a model can be widened by 1 or more")
    if (of_model := model.config.model_type) not in _FAMILIES:
        raise ValueError(f"model_type={of_model!r} cannot be widened: only {', '.join(_FAMILIES)} can")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("a quantized model cannot be widened: load it without quantization_config")
    if {type(parameter.data) for parameter in model.parameters()} != {Tensor}:
        raise ValueError("only plain tensors can be widened: load the model without tp_plan and without quantization")
    config = copy.deepcopy(model.config)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for size in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, size, getattr(config, size) * k)
    family: Any = type(model)
    with torch.device(model.device), no_init_weights():
        wide: PreTrainedModel = family._from_config(
            config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
    wide.tie_weights()
    narrow_parameters = dict(model.named_parameters())
    for name, parameter in wide.named_parameters():
        parameter.copy_(_widened(name, narrow_parameters[name], k))
    wide.generation_config = copy.deepcopy(model.generation_config)
    wide.train(model.training)
    return wide


def _widened(name: str, weight: Tensor, k: int) -> Tensor:
    """Return the wide model's parameter for a parameter of the narrow model."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return weight.repeat(1, k)
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # over a head's units, whose number is the same
        return weight
    if weight.ndim == 1:
        is_final_norm = name.endswith("model.norm.weight")
        return weight.repeat(k) / (k if is_final_norm else 1)
    return weight.repeat(k, k).div_(k)
