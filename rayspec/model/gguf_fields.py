"""What the fields of a GGUF file say of a model and its tokenizer. transformers reads each field for some architectures
only. For the others it takes the family's default, without a message."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Punctuation, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

# Fields, without the name of the architecture, and the names that a config may have for their value.
_NORM_EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": _NORM_EPS,
    "attention.layer_norm_rms_epsilon": _NORM_EPS,
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
# Fields that change no text, or that say what the tensors say, too: a model of another size does not load.
_HARMLESS = {
    *("attention.head_count", "attention.head_count_kv", "block_count", "context_length", "embedding_length"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_used_count", "feed_forward_length"),
    *("classifier.output_labels", "pooling_type", "tensor_data_layout", "use_parallel_residual", "vocab_size"),
    *("rope.dimension_sections", "rope.scaling.finetuned", "rope.scaling.original_context_length"),
}
_BY_RULE = {"attention.sliding_window", "rope.dimension_count"}  # transformers may read these wrongly
# Fields that change no text at these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("expert_count", "expert_shared_count", "expert_weights_norm", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "ssm.dt_b_c_rms"), (0,)),
    **dict.fromkeys(("attention.output_scale", "embedding_scale", "logit_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "interleave_moe_layer_step", "leading_dense_block_count"), (0, 1)),
    **dict.fromkeys(("moe_every_n_layers", "rope.scale_linear"), (0, 1)),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
# Fields of scaled positions, and transformers' names for them. What yarn_attn_factor means depends on the file's age.
_SCALING = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Layers of the models of 27 billion weights, which scale queries in another way. llama.cpp knows them so, too.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def complete(text: Any, stated: Mapping[str, Any], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Give a language model's config what the file says. Return the fields that change the text, and that neither
    transformers nor this function reads.

    stated: the fields of the architecture, without its name. factors: the tensors that scale positions, by name.
    """
    read: Any = GGUF_CONFIG_MAPPING.get(text.model_type.removesuffix("_text"))
    if read is None:  # of transformers' newer reader, which reads all fields
        return {}
    known = _HARMLESS | {name for name, attribute in read.items() if attribute is not None} - _BY_RULE
    if getattr(text, "is_heterogeneous", False):  # as of Gemma 4, whose layers have configs of their own
        return {name: value for name, value in stated.items() if name not in known}
    left = dict(stated)
    for name, attributes in _ATTRIBUTES.items():
        held = [each for each in attributes if name in left and hasattr(text, each)]
        value = left.pop(name) if held else None
        for attribute in held:
            if getattr(text, attribute) != value:  # some are properties
                setattr(text, attribute, None if value == 0.0 and "softcapping" in name else value)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // (getattr(text, "num_attention_heads", None) or 1)
    _set_windows(text, left)
    _set_positions(text, left, factors, head_dim)
    if text.num_hidden_layers == _LAYERS_OF_27B.get(text.model_type):
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads
    neutral = _NEUTRAL | dict.fromkeys(("attention.key_length", "attention.value_length"), (head_dim,))
    return {name: value for name, value in left.items() if name not in known and value not in neutral.get(name, ())}


def _set_windows(text: Any, left: dict[str, Any]) -> None:
    """Set the sliding window, and the layers that have it. A file without the field has no window; early ones of
    Gemma 2 have the family's."""
    window = left.pop("attention.sliding_window", 0 if text.model_type != "gemma2" else text.sliding_window)
    pattern = left.pop("attention.sliding_window_pattern", None)
    types = getattr(text, "layer_types", None) or []
    if types and pattern is not None:
        slides = pattern if isinstance(pattern, list) else [(n + 1) % max(1, pattern) for n in range(len(types))]
        types = ["sliding_attention" if each else "full_attention" for each in slides[: len(types)]]
    if not window:
        types = ["full_attention" if each == "sliding_attention" else each for each in types]
    if types and types != text.layer_types:
        text.layer_types = types
    if window and not (hasattr(text, "sliding_window") and (not types or "sliding_attention" in types)):
        if window < (getattr(text, "max_position_embeddings", None) or math.inf):
            left["attention.sliding_window"] = window  # the config cannot say in which layers
    elif window or getattr(text, "sliding_window", None):
        text.sliding_window = window or None


def _set_positions(text: Any, left: dict[str, Any], factors: Mapping[str, list[float]], head_dim: int) -> None:
    """Set the base of rotary positions, their share of a head, and their scaling."""
    rope = getattr(text, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    if "rope_theta" not in full:
        return
    full["rope_theta"] = left.pop("rope.freq_base", full["rope_theta"])
    local = rope.get("sliding_attention", full)
    if local is not full or left.get("rope.freq_base_swa") == full["rope_theta"]:
        local["rope_theta"] = left.pop("rope.freq_base_swa", local["rope_theta"])
    share = min(1.0, left.get("rope.dimension_count", head_dim) / head_dim)
    if "partial_rotary_factor" in full and "rope.dimension_count" in left:
        full["partial_rotary_factor"] = share
    if "partial_rotary_factor" in full or share == 1:
        left.pop("rope.dimension_count", None)
    kind = left.get("rope.scaling.type", "linear")
    values = {attribute: left[name] for name, attribute in _SCALING.items() if left.get(name)}
    scaling = _scaling(kind, values, factors, full["rope_theta"], int(head_dim * share))
    if scaling is None:
        left |= factors
        return
    for name in ("rope.scaling.type", *_SCALING):
        left.pop(name, None)
    full.update(scaling)
    if "original_max_position_embeddings" in scaling and hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = scaling["original_max_position_embeddings"]


def _scaling(
    kind: str, values: dict[str, Any], factors: Mapping[str, list[float]], theta: float, num_dims: int
) -> dict[str, Any] | None:
    """Return transformers' parameters for a scaling of positions; None for an unknown one. values: its fields, by
    transformers' names."""
    is_plain = kind == "none" or (kind == "linear" and values.get("factor", 1) == 1)
    if not factors:
        if is_plain and values.get("attention_factor", 1) == 1:
            return {}
        if kind == "linear" and not is_plain:
            return {"rope_type": kind, "factor": values["factor"]}
        is_yarn = kind == "yarn" and {"factor", "original_max_position_embeddings"} <= values.keys()
        return {"rope_type": kind, **values} if is_yarn else None
    if is_plain and "rope_freqs" in factors:  # of Llama 3.1 and later, whose other fields llama.cpp has as constants
        found, factor = factors["rope_freqs"], max(factors["rope_freqs"])
        expected = _llama3_factors(theta, num_dims, factor)
        is_known = len(found) == len(expected) and all(map(_are_close, found, expected))
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3} if is_known else None
    long, short = factors.get("rope_factors_long"), factors.get("rope_factors_short")
    if long and short and "original_max_position_embeddings" in values and (is_plain or kind == "longrope"):
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **values}
    return None


def _llama3_factors(theta: float, num_dims: int, factor: float) -> list[float]:
    """Return by what Llama 3.1 divides the frequency of each pair of rotary dimensions."""
    low, high, length = _LLAMA3.values()
    turns = [length / (2 * math.pi * theta ** (2 * pair / num_dims)) for pair in range(num_dims // 2)]
    shares = [min(1.0, max(0.0, (each - low) / (high - low))) for each in turns]
    return [1 / ((1 - share) / factor + share) for share in shares]


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


# Names, in addition to the fields, of tokens that end an answer of a chat. llama.cpp has the same and more.
_END_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def ends_of_turns(stated: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Return the tokens that end an answer of a chat, by fields that transformers does not read or, as in llama.cpp,
    by name. stated: the fields of the tokenizer. tokens: its vocabulary."""
    fields = [stated[name] for name in ("eot_token_id", "eom_token_id") if name in stated]
    return fields + [tokens.index(text) for text in _END_NAMES if text in tokens]


# How the models' own tokenizers, as llama.cpp, split a text into words, by values of tokenizer.ggml.pre. transformers
# splits as GPT-2 if it does not know a value.
_GPT2, _BYTES = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)
_DIGIT, _NUMBER = Digits(individual_digits=True), Digits(individual_digits=False)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_SPLITS: dict[tuple[str, ...], list[Any]] = {
    ("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "mellum", "mpt"): [_GPT2],
    ("olmo", "phi-2", "trillion"): [_GPT2],
    ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"): [_DIGIT, _GPT2],
    ("grok-2", "hunyuan", "solar-open", "stablelm2"): [Split(Regex(_QWEN2), "isolated"), _BYTES],
    ("bloom", "gpt3-finnish", "poro-chat"): [Split(Regex(_BLOOM), "isolated"), _BYTES],
    ("falcon",): [Punctuation("contiguous"), _GPT2, _NUMBER, Split(Regex("[0-9][0-9][0-9]"), "isolated")],
}
# Values of tokenizer.ggml.pre by which a word of the vocabulary is one token, and texts begin with the BOS token.
_WHOLE_WORDS = ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken")
_COMPOSED = ("qwen2", "qwen35")  # accents and letters become one character
_CONTROL, _OF_USERS = 3, 4  # kinds of tokens that texts may hold whole


def fit_tokenizer(
    tokenizer: Any, architecture: str, stated: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> bool:
    """Let the tokenizer make the tokens of the model's own. Return False for a way to split texts that is unknown.
    stated: the fields of the tokenizer. tokens: its vocabulary. kinds: of the tokens, by llama.cpp's numbers."""
    kind, pre = stated.get("model"), stated.get("pre")
    if kind == "gpt2":
        _set_tokens(tokenizer, tokens, kinds)
    backend = tokenizer.backend_tokenizer
    is_by_family = architecture.startswith(("gemma", "phi3"))  # transformers has tokenizers of their own for these
    if kind == "llama" and stated.get("add_space_prefix") is False and not is_by_family:
        backend.normalizer, backend.pre_tokenizer = None, Metaspace("\u2581", "never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    if kind != "gpt2" or pre in (None, "default"):
        return True
    if pre in _COMPOSED:
        backend.normalizer = NFC()
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if "add_bos_token" not in stated:
            tokenizer.add_bos_token = True
    for names, parts in _SPLITS.items():
        if pre in names:
            backend.pre_tokenizer = Steps(parts)
            return True
    if find_spec("transformers.integrations.gguf") is None:  # an early version, which splits by architecture
        return True
    mapping = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    return pre in getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", (pre,))  # absent as of 5.17


def _set_tokens(tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Let the tokenizer have the tokens of the file, and no others. transformers spells control tokens and tokens of
    users in bytes, where no text has them, if they have characters as of DeepSeek's. It adds tokens in their place."""
    alphabet = frozenset(ByteLevel.alphabet())
    marked = (number for number, kind in enumerate(kinds) if kind in (_CONTROL, _OF_USERS))
    whole = {number: tokens[number] for number in marked if not alphabet.issuperset(tokens[number])}
    if not whole and len(tokenizer) <= len(tokens):
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    spelled = {number: word for word, number in state["model"]["vocab"].items()}
    state["model"]["vocab"] = {
        token if number in whole or alphabet.issuperset(token) else spelled.get(number, token): number
        for number, token in enumerate(tokens)
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    old = (each for each in state["added_tokens"] if each["id"] < len(tokens))
    added = [each for each in old if each["id"] not in whole]
    added += [flags | {"id": n, "content": token, "special": kinds[n] == _CONTROL} for n, token in whole.items()]
    state["added_tokens"] = sorted(added, key=itemgetter("id"))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.update_post_processor()
