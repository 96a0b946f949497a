"""vLLM's names of arguments, and what each one does here. Data only; `docs/guides/from_vllm.md` shows these tables.

A name that is no option here sets one, or has no effect, or is refused with the remedy. Each says which values ask for
nothing, so that a script that writes vLLM's defaults runs.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayspec.errors import ConfigError

_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of vLLM.

    does: what it does here, or why it is refused and what to do instead. option: the option that it sets, as
    "group.name"; "" if it sets none. neutral: values that ask for nothing. values: what other values become.
    is_refused: other values are refused. is_flag: on a command line it has no value.
    """

    does: str
    option: str = ""
    neutral: tuple[Any, ...] = (None,)
    values: Mapping[Any, Any] = field(default_factory=dict)
    is_refused: bool = False
    is_flag: bool = False

    @property
    def kind(self) -> str:
        """What becomes of it, for the table in the documentation."""
        if self.is_refused:
            return "refused"
        return f"sets `{self.option}`" if self.option else "no effect"


def _refused(does: str, *neutral: Any, is_flag: bool = False) -> Argument:
    return Argument(does=does, neutral=(None, *neutral), is_refused=True, is_flag=is_flag)


def _off(does: str) -> Argument:
    return _refused(does, False, is_flag=True)


def _nothing(does: str, *, is_flag: bool = False) -> Argument:
    return Argument(does=does, is_flag=is_flag)


_ONE_KERNEL = "the kernels and their launches are chosen at load"
_ADAPTERS = "adapters of any rank are loaded with the model, or at the first request that names one"
_NO_POOLING = "rayspec generates text only: use another library for embeddings and scores"
_NO_IMAGES = "models see text only: leave it out"
_LOGS = "there is no such log; statistics are in `LLM.stats` and at /metrics"

ENGINE: Mapping[str, Argument] = {
    # options that are called otherwise here
    "tensor_parallel_size": Argument(does="ranks of each stage", option="parallel.tensor", neutral=(None, 1)),
    "pipeline_parallel_size": Argument(does="pipeline stages", option="parallel.stages", neutral=(None, 1)),
    "data_parallel_size": Argument(
        does="copies of the model; of an endpoint: `deployment_config.num_replicas`",
        option="parallel.replicas",
        neutral=(None, 1),
    ),
    "enforce_eager": Argument(
        does="no CUDA graphs", option="cuda_graphs", neutral=(None, False), values={True: "off"}, is_flag=True
    ),
    "seed": _refused(
        "only `LLM(seed=...)` takes it, whose `generate` and `chat` derive a seed for each request without one; "
        "elsewhere give a seed in each request",
        0,
    ),
    "hf_token": _refused("set the environment variable HF_TOKEN instead"),
    "load_format": _refused(
        "safetensors, PyTorch and GGUF files are found without it: leave it out", "auto", "hf", "safetensors"
    ),
    "quantization": _refused(
        "the quantisation of a checkpoint is found without it: leave it out; to quantise while loading, give "
        "quantization_config, which transformers reads"
    ),
    "speculative_config": Argument(
        does='{"method": "ngram"} sets strategy "lookup" and {"method": "suffix"} strategy "auto", both with '
        "num_speculative_tokens as `speculation.max_draft_tokens`; other methods need a second model, and are refused: "
        "leave it out, as the model drafts for itself by default",
        option="speculation",
    ),
    # without effect
    "swap_space": _nothing("preempted sequences are computed again"),
    "enable_chunked_prefill": Argument(
        does="prompts always run in chunks of `max_num_batched_tokens`: leave it out, or raise that option",
        neutral=(None, True),
        is_refused=True,
        is_flag=True,
    ),
    "block_size": _nothing("pages have a fixed size"),
    "disable_log_stats": _nothing(_LOGS, is_flag=True),
    "disable_log_requests": _nothing(_LOGS, is_flag=True),
    "enable_log_requests": _nothing(_LOGS, is_flag=True),
    "max_log_len": _nothing(_LOGS),
    "uvicorn_log_level": _nothing(_LOGS),
    "disable_uvicorn_access_log": _nothing(_LOGS, is_flag=True),
    "max_seq_len_to_capture": _nothing("captured graphs do not depend on lengths"),
    "disable_custom_all_reduce": _nothing("there is no such kernel", is_flag=True),
    "compilation_config": _nothing(_ONE_KERNEL),
    "optimization_level": _nothing(_ONE_KERNEL),
    "attention_backend": _nothing(_ONE_KERNEL),
    "async_scheduling": _nothing("the scheduler has one form", is_flag=True),
    "use_v2_block_manager": _nothing("the scheduler has one form", is_flag=True),
    "num_scheduler_steps": _nothing("the scheduler has one form"),
    "max_num_partial_prefills": _nothing("the scheduler has one form"),
    "preemption_mode": _nothing("preempted sequences are computed again"),
    "distributed_executor_backend": _nothing("one process, or Ray where `parallel` is given"),
    "max_parallel_loading_workers": _nothing("each process loads its own layers"),
    "use_tqdm_on_load": _nothing("transformers shows a bar", is_flag=True),
    "structured_outputs_config": _nothing("llguidance compiles all schemas"),
    "guided_decoding_backend": _nothing("llguidance compiles all schemas"),
    "prefix_caching_hash_algo": _nothing("pages are found by one hash"),
    "model_impl": _refused("models are those of transformers: leave it out", "auto", "transformers"),
    "tokenizer_revision": _refused("the tokenizer has the model's revision: give `revision`"),
    "max_logprobs": _refused("the limit is 20: ask for no more", *range(21)),
    "served_model_name": _nothing("of `rayspec serve`: the name of the model in requests"),
    # refused
    "task": _refused(_NO_POOLING, "auto", "generate"),
    "runner": _refused(_NO_POOLING, "auto", "generate"),
    "convert": _refused(_NO_POOLING, "auto", "none"),
    "pooler_config": _refused(_NO_POOLING),
    "override_pooler_config": _refused(_NO_POOLING),
    "enable_lora": _nothing(_ADAPTERS, is_flag=True),
    "max_loras": _nothing(_ADAPTERS),
    "max_lora_rank": _nothing(_ADAPTERS),
    "max_cpu_loras": _nothing(_ADAPTERS),
    "tokenizer_mode": _refused("the tokenizer is that of transformers: leave it out", "auto", "hf"),
    "skip_tokenizer_init": _off(
        "the tokenizer is always loaded: leave it out; SamplingParams(detokenize=False) returns token ids only"
    ),
    "cpu_offload_gb": _refused("give a share instead: offload={'to': 'cpu', 'share': 0.5}", 0),
    "kv_cache_dtype": _refused("keys and values have the model's dtype: leave it out", "auto"),
    "calculate_kv_scales": _off("keys and values have the model's dtype: leave it out"),
    "kv_cache_memory_bytes": _refused("give the number of tokens instead: kv_cache_tokens"),
    "num_gpu_blocks_override": _refused("give the number of tokens instead: kv_cache_tokens"),
    "download_dir": _refused("set the environment variable HF_HOME instead"),
    "code_revision": _refused("remote code has the model's revision: give `revision`"),
    "config_format": _refused("configs are those of transformers: leave it out", "auto", "hf"),
    "hf_config_path": _refused("edit config.json in a folder of your own, and give the folder as the model"),
    "hf_overrides": _refused("edit config.json in a folder of your own, and give the folder as the model", {}),
    "rope_scaling": _refused("edit config.json in a folder of your own, and give the folder as the model", {}),
    "rope_theta": _refused("edit config.json in a folder of your own, and give the folder as the model"),
    "override_generation_config": _refused(
        "give the values as SamplingParams, or edit generation_config.json in a folder of your own", {}
    ),
    "disable_sliding_window": _off("windows are part of the model: leave it out, and lower max_model_len"),
    "disable_cascade_attn": _nothing(_ONE_KERNEL, is_flag=True),
    "enable_expert_parallel": _off("experts are not divided among GPUs: give tensor_parallel_size"),
    "enable_sleep_mode": _off("an engine keeps its memory: leave it out, and end the process"),
    "limit_mm_per_prompt": _refused(_NO_IMAGES, {}),
    "mm_processor_kwargs": _refused(_NO_IMAGES, {}),
    "allowed_local_media_path": _refused(_NO_IMAGES, ""),
    "scheduling_policy": _refused("requests run in the order of their arrival: leave it out", "fcfs"),
    "logits_processors": _refused(
        "a program cannot run in the sampler: use logit_bias, bad_words or allowed_token_ids of SamplingParams", [], ()
    ),
    "kv_transfer_config": _refused("prefill and decoding run in the same engine: leave it out"),
    "worker_cls": _refused("workers have one form: leave it out", "auto"),
    "worker_extension_cls": _refused("workers have one form: leave it out", ""),
    "additional_config": _refused("it is for plugins of vLLM: leave it out", {}),
    # of `vllm serve` only
    "chat_template": _refused("put it into the model's folder as chat_template.jinja"),
    "chat_template_content_format": _refused("content is text: leave it out", "auto", "string"),
    "response_role": _refused("answers have the role assistant: leave it out", "assistant"),
    "allowed_origins": _refused("give --cors instead, once for each origin", [], ()),
    "enable_auto_tool_choice": _nothing("a request with tools has them without it", is_flag=True),
    "ssl_keyfile": _refused("put a proxy with TLS in front"),
    "ssl_certfile": _refused("put a proxy with TLS in front"),
    "root_path": _refused("put a proxy in front that removes the prefix"),
    "middleware": _refused("put a proxy in front", [], ()),
    "return_tokens_as_token_ids": _off("give return_token_ids in a request instead"),
    "enable_prompt_tokens_details": _nothing("usage always has them", is_flag=True),
    "enable_force_include_usage": _off("give stream_options.include_usage in a request instead"),
    "enable_server_load_tracking": _off("the load is at /status and /metrics: leave it out"),
    "api_server_count": _refused("one process answers HTTP: leave it out", 1),
}
"""Arguments of `LLM(...)`, and flags of `vllm serve`, that are no options of EngineConfig, or have other values."""

SAME_NAME: Mapping[str, Mapping[Any, Any]] = {
    "generation_config": {"vllm": "none"},
    "max_model_len": {-1: None, "auto": None},
}
"""Options of vLLM's name, with values of vLLM's that are called otherwise here."""

_NONE_IS_DEFAULT = ("dtype", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "trust_remote_code")

CALLS: Mapping[str, Argument] = {
    "priority": _refused("requests run in the order of their arrival: leave it out"),
    "tokenization_kwargs": _refused("tokenize the prompt yourself, and give {'prompt_token_ids': [...]}", {}),
    "chat_template_content_format": _refused("content is text: leave it out", "auto", "string"),
    "mm_processor_kwargs": _refused(_NO_IMAGES, {}),
}
"""Arguments of `generate` and `chat`."""

SAMPLING: Mapping[str, Argument] = {
    "best_of": _refused("give n, and choose among the outputs by cumulative_logprob", 1),
    "use_beam_search": _off("beams are not samples, and drafts cannot verify them: leave it out"),
    "length_penalty": _refused("it is for beams: leave it out", 1.0),
    "early_stopping": _refused("it is for beams: leave it out", False),
    "logits_processors": _refused(
        "a program cannot run in the sampler: use logit_bias, bad_words or allowed_token_ids", [], ()
    ),
    "output_kind": _refused("`LLM` returns whole outputs; Request(stream=True) streams: leave it out", 0, 2),
    "extra_args": _refused("it is for plugins of vLLM: leave it out", {}),
    "flat_logprobs": _off("log-probabilities are a list of mappings: leave it out"),
    "skip_clone": _nothing("SamplingParams cannot change, so nobody copies them", is_flag=True),
}
"""Fields of vLLM's SamplingParams that ours has not."""

METHODS: Mapping[str, str] = {
    "beam_search": "beams are not samples, and drafts cannot verify them: use generate() with n, or transformers' "
    "generate(num_beams=...)",
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _NO_POOLING),
    **dict.fromkeys(("sleep", "wake_up"), "an engine keeps its memory: use shutdown(), and load the model again"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model's processes run no other programs: use `engine`"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use `stats`, or `rayspec profile`"),
    "reset_prefix_cache": "give enable_prefix_caching=False, or load the model again",
    "llm_engine": "use `engine`, or `stream` to add requests while others run",
    "get_metrics": "use `stats`",
}
"""Methods and attributes of vLLM's LLM that ours has not, and why."""


def from_vllm(given: Mapping[str, Any], table: Mapping[str, Argument], own: Collection[str]) -> dict[str, Any]:
    """Return the options with vLLM's names replaced by ours. own: names of our options, which stay. Raises ConfigError
    for an argument that is refused, and for one whose option is given too."""
    options = {name: value for name, value in given.items() if name not in table or name in own}
    for name, values in SAME_NAME.items():
        if name in own and _lookup(options.get(name, _ABSENT), values) is not _ABSENT:
            options[name] = _lookup(options[name], values)
    for name in _NONE_IS_DEFAULT:
        if name in own and options.get(name, _ABSENT) is None:
            del options[name]
    for name, value in given.items():
        if name not in table or name in own:
            continue
        argument = table[name]
        if _is_in(value, argument.neutral):
            continue
        if argument.is_refused:
            raise ConfigError(f"option {name!r} is {reprlib.repr(value)}: {argument.does}")
        if argument.option:
            _set(options, argument.option, _value_of(name, value, argument), given=name)
    return options


def _value_of(name: str, value: Any, argument: Argument) -> Any:
    if name == "speculative_config":
        return _speculation(value)
    found = _lookup(value, argument.values)
    return value if found is _ABSENT else found


def _set(options: dict[str, Any], option: str, value: Any, *, given: str) -> None:
    group, _, name = option.rpartition(".")
    if not group:
        if option in options:
            raise ConfigError(f"option {given!r} is given, and {option!r} too: remove one of them")
        options[option] = value
        return
    if options.get(group) is None:
        options[group] = _Made()
    made = options[group]
    if not isinstance(made, _Made):
        raise ConfigError(f"option {given!r} is given, and {group!r} too: put it there, as {name!r}")
    made[name] = value


class _Made(dict[str, Any]):
    """A group of options that vLLM's names have made."""


def _speculation(config: Any) -> dict[str, Any]:
    method = config.get("method") if isinstance(config, Mapping) else None
    strategy = {"ngram": "lookup", "suffix": "auto"}.get(method) if isinstance(method, str) else None
    if strategy is None:
        raise ConfigError(
            f"option 'speculative_config' is {reprlib.repr(config)}: the model drafts for itself, without a second "
            "model; leave it out, or give method 'ngram' or 'suffix'; see option 'speculation'"
        )
    count = config.get("num_speculative_tokens")
    return {"strategy": strategy} | ({} if count is None else {"max_draft_tokens": count})


def _is_in(value: Any, some: Collection[Any]) -> bool:
    """Return whether the value is one of these; 0 is not False here, nor 1 True."""
    return any(_is_same(one, value) for one in some)


def _lookup(value: Any, values: Mapping[Any, Any]) -> Any:
    return next((found for one, found in values.items() if _is_same(one, value)), _ABSENT)


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
