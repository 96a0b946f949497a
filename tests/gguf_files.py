"""Writes GGUF files of tiny models, as llama.cpp's converter names their tensors and fields."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rayspec import demo

ARCHITECTURES = {"gemma3_text": "gemma3"}  # those with another name than transformers' model type


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    matrices: str = "Q8_0",
    *,
    head: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """matrices: the type of tensors with two dimensions. head: another type for the LM head. fields: further fields, or
    other values; names without the architecture's."""
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers + 1)  # a test may write one more
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    _add_what_decides(writer, config)
    _add_tokenizer(writer)
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    for name, value in (fields or {}).items():
        full = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        kinds[type(value)](full, value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        found = names.get_name(stem)
        assert found is not None, name
        numbers = weight.float().numpy()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        kind = "F32" if weight.ndim == 1 else head if head and name == "lm_head.weight" else matrices
        quantised = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{found}.{suffix}", quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_what_decides(writer: gguf.GGUFWriter, config: Any) -> None:
    """Norms, positions, windows and soft caps."""
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(int(config.head_dim * rope.get("partial_rotary_factor", 1)))
    _add_scaling(writer, config, rope)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if len(types := set(getattr(config, "layer_types", None) or [])) > 1:
            assert types == {"sliding_attention", "full_attention"}
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    if getattr(config, "final_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_scaling(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", torch.tensor(rope[f"{name}_factor"]).numpy())
    if kind == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / ROPE_INIT_FUNCTIONS[kind](config)[0]).numpy())


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The bundled tokenizer and its chat template."""
    folder = Path(demo.model_path())
    known = json.loads((folder / "tokenizer.json").read_text())
    vocab = known["model"]["vocab"] | {each["content"]: each["id"] for each in known["added_tokens"]}
    special = {each["content"] for each in known["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in known["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
