"""The fields that llama.cpp's converter writes for each architecture, with the values of real models."""

import math
from typing import Any

import pytest
from transformers import AutoConfig, LlamaTokenizer

from rayspec.model.gguf_fields import complete, ends_of_turns, fit_tokenizer

_EPS = {"attention.layer_norm_rms_epsilon": 1e-6}
_SIZES = {"context_length": 8192, "block_count": 4, "embedding_length": 64, "feed_forward_length": 96}
_SIZES |= {"attention.head_count": 8, "attention.head_count_kv": 4, "vocab_size": 99}
_LENGTHS = {"attention.key_length": 64, "attention.value_length": 64}
# Of Llama 3.1: theta 500,000, 128 rotary dimensions, factor 8.
_TURNS = [8192 / (2 * math.pi * 5e5 ** (pair / 64)) for pair in range(64)]
_FREQS = [1.0 if each > 4 else 8.0 if each < 1 else 24 / (3 + 7 * (each - 1)) for each in _TURNS]
_GEMMA3 = _LENGTHS | _EPS | {"rope.freq_base": 1e6, "attention.sliding_window": 512}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
_WRITTEN: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"rope.dimension_count": 128, "rope.freq_base": 5e5},
        _LENGTHS | {"rope.dimension_count": 64, "tensor_data_layout": "Meta AI original pth", "rope.scale_linear": 1.0},
        {"rope.dimension_count": 128, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "expert_count": 0},
        {"rope.dimension_count": 128, "rope.scaling.finetuned": False, "attention.causal": True, "logit_scale": 1.0},
    ],
    "qwen2": [{"rope.freq_base": 1e6, "pooling_type": 3}],
    "qwen2_moe": [{"expert_feed_forward_length": 7, "expert_shared_feed_forward_length": 8, "expert_count": 60}],
    "qwen3": [_LENGTHS, _LENGTHS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}],
    "qwen3_moe": [_LENGTHS | {"expert_feed_forward_length": 1536, "expert_count": 128, "expert_gating_func": 1}],
    "gemma2": [_LENGTHS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}],
    "gemma3_text": [
        _GEMMA3,
        _GEMMA3 | {"rope.freq_base_swa": 1e4, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        _GEMMA3 | {"attention.sliding_window_pattern": 6, "final_logit_softcapping": 0.0},
    ],
    "phi3": [{"rope.dimension_count": 96, "attention.sliding_window": 0}],
    "stablelm": [{"rope.dimension_count": 20, "use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5}],
    "starcoder2": [{"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-5}],
    "nemotron": [{"rope.dimension_count": 64, "rope.scaling.type": "none", "attention.layer_norm_epsilon": 1e-5}],
    "minimax_m2": [{"rope.dimension_count": 64, "expert_feed_forward_length": 9, "expert_gating_func": 2}],
    "falcon": [{"tensor_data_layout": "jploski", "attention.layer_norm_epsilon": 1e-5}],
    "gpt2": [{"attention.layer_norm_epsilon": 1e-5}],
    "bloom": [{"attention.layer_norm_epsilon": 1e-5}],
    "mamba": [{"ssm.conv_kernel": 4, "ssm.dt_b_c_rms": False, "feed_forward_length": 0, "attention.head_count": 0}],
}


@pytest.mark.parametrize(
    ("family", "fields"), [(family, fields) for family, several in _WRITTEN.items() for fields in several]
)
def test_files_of_every_architecture_are_read(family: str, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **({"rotary_dim": 64} if family == "minimax_m2" else {}))
    length = {"rope.scaling.original_context_length": 4096}
    assert complete(config, _SIZES | length | fields, {}) == {}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention.causal": False}),
        ("llama", {"attention.key_length": 128, "rope.dimension_count": 64}),  # its rotary positions are of whole heads
        ("llama", {"attention.scale": 0.1}),
        ("llama", {"attention.sliding_window": 512}),
        ("llama", {"attention.value_length": 64}),
        ("llama", {"expert_count": 8}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"of_next_year": 1}),
        ("llama", {"residual_scale": 0.5}),
        ("llama", {"rope.freq_base_swa": 5e5}),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}),
        ("llama", _YARN | {"rope.scaling.yarn_attn_factor": 0.88}),  # of the whole, or of yarn's own?
        ("gemma4_text", {"attention.shared_kv_layers": 20}),
        ("phi3", {"rope.scaling.attn_factor": 1.25}),  # of which factors?
        ("qwen2", {"attention.sliding_window": 512}),  # in which layers?
        ("qwen3_moe", {"expert_weights_scale": 2.5}),
    ],
)
def test_fields_that_change_the_text_and_are_not_read_are_returned(family: str, fields: dict[str, Any]) -> None:
    unread = complete(AutoConfig.for_model(family), _SIZES | fields, {})
    assert unread
    assert unread.items() <= fields.items()


def test_factors_of_positions_are_those_of_llama_3_or_not_read() -> None:
    stated = {"rope.freq_base": 5e5, "rope.dimension_count": 128}
    config = AutoConfig.for_model("llama")
    assert complete(config, stated, {"rope_freqs": _FREQS}) == {}
    assert config.rope_parameters["factor"] == 8
    for factors in ([2.0] * 64, _FREQS[:32]):
        unread = complete(AutoConfig.for_model("llama"), stated, {"rope_freqs": factors})
        assert unread == {"rope_freqs": factors}


def test_the_models_of_27_billion_scale_queries_by_width_and_heads() -> None:
    sizes = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    for num_layers, scalar in ((62, 168), (48, 256)):
        config = AutoConfig.for_model("gemma3_text", num_hidden_layers=num_layers, **sizes)
        complete(config, {"attention.sliding_window": 1024}, {})
        assert config.query_pre_attn_scalar == scalar


def test_files_without_windows_have_none() -> None:
    mistral, gemma2, gemma3 = (AutoConfig.for_model(name) for name in ("mistral", "gemma2", "gemma3_text"))
    for config in (mistral, gemma2, gemma3):
        assert complete(config, {}, {}) == {}
    assert mistral.sliding_window is gemma3.sliding_window is None
    assert set(gemma3.layer_types) == {"full_attention"}
    assert gemma2.sliding_window == 4096
    assert "sliding_attention" in gemma2.layer_types


def test_the_pattern_of_windows_may_be_a_number_or_a_list() -> None:
    for pattern in (2, [True, False] * 2):
        config = AutoConfig.for_model("gemma3_text", num_hidden_layers=4)
        complete(config, {"attention.sliding_window": 9, "attention.sliding_window_pattern": pattern}, {})
        assert config.layer_types == ["sliding_attention", "full_attention"] * 2


def test_a_space_before_the_text_is_left_out_where_the_file_says_so() -> None:
    vocab = {token: number for number, token in enumerate(("<unk>", "<s>", "</s>", "▁", "a", "▁a"))}
    for stated, tokens in (({}, [5, 5]), ({"add_space_prefix": False}, [4, 5])):
        tokenizer = LlamaTokenizer(vocab=vocab, merges=[("▁", "a")])
        assert fit_tokenizer(tokenizer, "llama", {"model": "llama"} | stated, [], [])
        assert tokenizer.encode("a a", add_special_tokens=False) == tokens
        assert tokenizer.decode(tokens) == "a a"


def test_answers_end_at_tokens_by_field_and_by_name() -> None:
    assert ends_of_turns({"eot_token_id": 9, "eos_token_id": 1}, ["a", "<|im_end|>", "<|endoftext|>"]) == [9, 1, 2]
