"""vLLM's names: each is an option here, or the table says what becomes of it, and the documentation shows the table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from rayspec import LLM, SamplingParams
from rayspec.command.settings import make_settings
from rayspec.config import EngineConfig
from rayspec.llm import LLMKeywords
from rayspec.serve.options import LLMConfig
from rayspec.types import ConfigError
from rayspec.vllm_names import CALLS, ENGINE, METHODS, SAME_NAME, SAMPLING, Argument
from tests.demo_model import demo_tokenizer

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "from_vllm.md"
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_tokens": 512}
# What a script may write that asks for nothing: vLLM's own defaults.
DEFAULTS: dict[str, Any] = {
    "tokenizer": None, "tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": False,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "dtype": "auto", "quantization": None, "revision": None,
    "tokenizer_revision": None, "seed": 0, "swap_space": 4, "cpu_offload_gb": 0, "enforce_eager": False,
    "max_seq_len_to_capture": 8192, "disable_custom_all_reduce": False, "max_model_len": None,
    "gpu_memory_utilization": None, "max_num_seqs": None, "max_num_batched_tokens": None, "enable_prefix_caching": None,
    "enable_chunked_prefill": None, "kv_cache_dtype": "auto", "load_format": "auto", "download_dir": None,
    "disable_log_stats": True, "speculative_config": None, "hf_overrides": None, "served_model_name": None,
    "task": "auto", "runner": "auto", "convert": "auto", "distributed_executor_backend": "mp", "enable_lora": False,
    "compilation_config": {"level": 3}, "model_impl": "auto", "allowed_methods": ["*"],
    "default_chat_template_kwargs": None, "enable_log_deltas": True, "fingerprint_mode": "full", "ssl_cert_reqs": 0,
    "tool_parser_plugin": "", "tokens_only": False,
}  # fmt: skip


def _config(**options: Any) -> EngineConfig:
    return EngineConfig(model="demo", **options)


def test_vllms_defaults_ask_for_nothing() -> None:
    assert _config(**DEFAULTS) == _config()
    assert _config(enable_lora=True, max_loras=1, max_lora_rank=8) == _config()


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, {"parallel": {"tensor": 2, "stages": 3}}),
        ({"data_parallel_size": 2, "parallel": None}, {"parallel": {"replicas": 2}}),
        ({"enforce_eager": True}, {"cuda_graphs": "off"}),
        ({"generation_config": "vllm", "max_model_len": -1}, {"generation_config": "none"}),
        ({"speculative_config": {"method": "suffix"}}, {"speculation": {"strategy": "auto"}}),
        ({"spec_method": "ngram", "spec_tokens": 5}, {"speculation": {"strategy": "lookup", "max_draft_tokens": 5}}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
            {"speculation": {"strategy": "lookup", "max_draft_tokens": 5}},
        ),
    ],
)
def test_names_of_options_that_are_called_otherwise_here(given: dict[str, Any], ours: dict[str, Any]) -> None:
    """In Python, in a file, and in the options of an endpoint."""
    assert _config(**given) == _config(**ours)
    if "data_parallel_size" not in given:
        loading = {"model_id": "m", "model_source": "demo"}
        assert LLMConfig(model_loading_config=loading, engine_kwargs=given).engine == _config(**ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2, "parallel": {"stages": 2}}, "'tensor_parallel_size' is given, and 'parallel' too"),
        ({"enforce_eager": True, "cuda_graphs": "off"}, "'enforce_eager' is given, and 'cuda_graphs' too: remove one"),
        ({"quantization": "awq"}, "'quantization' is 'awq': the quantisation of a checkpoint is found without it"),
        ({"cpu_offload_gb": 4}, "'cpu_offload_gb' is 4: give a share instead: offload="),
        ({"task": "embed"}, "'task' is 'embed': models generate text only"),
        ({"runner": "pooling"}, "'runner' is 'pooling': models generate text only"),
        ({"seed": 5}, "'seed' is 5: only `LLM"),
        ({"speculative_config": {"model": "m"}}, "'speculative_config' is .*: the model drafts for itself"),
        ({"spec_method": "eagle3", "spec_model": "m"}, "'spec_model' is 'm': the model drafts for itself"),
        ({"spec_method": "eagle3"}, r"in 'speculation': option 'strategy' is 'eagle3'.*\('spec_method' sets it\)$"),
        ({"enforce_eager": 3}, r"option 'cuda_graphs' is 3: .*\('enforce_eager' sets it\)$"),
        ({"tensor_parallel_sise": 2}, "unknown option 'tensor_parallel_sise'; did you mean 'tensor_parallel_size'"),
        ({"max_model_len": "16k"}, "^option 'max_model_len' is '16k': it must be a valid integer[^;]*$"),
        (
            {"tensor_parallel_size": "two"},
            r"in 'parallel': option 'tensor' is 'two'.*\('tensor_parallel_size' sets it\)$",
        ),
        (
            {"tensor_parallel_size": 2, "parallel": {"stages": 0}},
            "'tensor_parallel_size' is given, and 'parallel' too: ",
        ),
        ({"enforce_eager": True, "parallel": {"stages": 0}}, "in 'parallel': option 'stages' is 0: [^(]*$"),
    ],
)
def test_what_is_refused_says_why_and_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**options)
    if "seed" not in options:  # which only `LLM` has
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **options)


def test_sampling_parameters_that_ask_for_nothing() -> None:
    given: dict[str, Any] = {"best_of": 1, "logits_processors": None, "extra_args": None, "output_kind": 2, "seed": -1}
    given |= {"stream_interval": 1, "thinking_token_budget": -1}
    given |= {"logprob_token_ids": None, "repetition_detection": None}
    assert SamplingParams(**given) == SamplingParams()


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("demo", seed=7, speculation={"strategy": "ar"}, swap_space=4, **OPTIONS) as one:  # type: ignore[call-arg]
        yield one


def _texts(llm: LLM, count: int = 3) -> list[str]:
    outputs = llm.generate(["The report"] * count, SamplingParams(temperature=1.0, max_tokens=8))
    return [output.outputs[0].text for output in outputs]


def test_a_seed_of_the_llm_makes_a_script_repeatable(llm: LLM) -> None:
    first = _texts(llm)
    assert len({*first, *_texts(llm)}) > 3, "each request has its own seed"
    with LLM("demo", seed=7, speculation={"strategy": "lookup"}, **OPTIONS) as again:
        assert _texts(again) == first


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_not_here_say_why(llm: Any, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError) as raised:
        getattr(llm, name)
    assert METHODS[name] in str(raised.value)


def test_methods_that_vllm_has_too(llm: LLM) -> None:
    assert llm.get_tokenizer()("a")["input_ids"] == demo_tokenizer()("a")["input_ids"]
    assert llm.get_default_sampling_params() == llm.default_sampling_params


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools[0]['function']['name'] }} {% endif %}{% if shout %}LOUD {% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_conversation_is_rendered_as_asked(llm: LLM) -> None:
    """By a template of the caller's, with tools and variables, and going on with the last message."""
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The fee"}]
    short = SamplingParams(temperature=0, max_tokens=2)

    def prompt(**arguments: Any) -> str:
        (output,) = llm.chat(conversation, short, chat_template=TEMPLATE, **arguments)
        if output.error is not None:
            return str(output.error)
        return str(llm.tokenizer.decode(list(output.prompt_token_ids), skip_special_tokens=True))

    base = "user: Hi\nassistant: The fee\n"
    assert prompt() == f"{base}assistant: "
    assert prompt(chat_template_kwargs={"shout": True}) == f"{base}LOUD assistant: "
    assert prompt(tools=[{"type": "function", "function": {"name": "mul"}}]) == f"{base}mul assistant: "
    assert prompt(add_generation_prompt=False, continue_final_message=True) == "user: Hi\nassistant: The fee"
    unknown = "the model's chat template has no variable 'whisper': leave it out"
    assert prompt(chat_template_kwargs={"whisper": 1}) == unknown
    (refused,) = llm.chat(conversation, short, tools=[{}])
    assert str(refused.error) == "the model's chat template has no tools: leave them out"


def test_flags_of_vllm_serve_become_options() -> None:
    flags = {"tensor_parallel_size": "2", "swap_space": "4", "load_format": "auto", "enforce_eager": True, "seed": "0"}
    assert make_settings(flags={"model": "demo", **flags}).engine == _config(parallel={"tensor": 2}, cuda_graphs="off")


def test_the_table_knows_our_options() -> None:
    for argument in ENGINE.values():
        group, _, name = argument.option.rpartition(".")
        home: Any = type(getattr(_config(parallel={}), group)) if group else EngineConfig
        assert not argument.option or name in home.model_fields
    assert not ENGINE.keys() & EngineConfig.model_fields.keys()
    assert not SAMPLING.keys() & SamplingParams.model_fields.keys()
    assert SAME_NAME.keys() <= EngineConfig.model_fields.keys()
    mapped = {name for name, argument in ENGINE.items() if argument.option}
    assert set(get_type_hints(LLMKeywords)) - EngineConfig.model_fields.keys() == mapped


def _rows(table: Mapping[str, Argument]) -> list[str]:
    rows = []
    for name, one in table.items():
        kind = "refused" if one.is_refused else f"sets `{one.option}`" if one.option else "no effect"
        rows.append(f"| `{name}` | {kind} | {one.does[:1].upper()}{one.does[1:]} |")
    return rows


def test_the_guide_shows_the_tables() -> None:
    """The lines to put there are in the message."""
    text = GUIDE.read_text()
    for title, lines in (
        ("arguments", _rows(dict(sorted(ENGINE.items())))),
        ("calls", _rows(CALLS)),
        ("sampling", _rows(SAMPLING)),
        ("methods", [f"| `{name}` | {why[:1].upper()}{why[1:]} |" for name, why in METHODS.items()]),
    ):
        wanted = "\n".join(lines)
        assert wanted in text, f"{title}:\n{wanted}"
    for name in sorted(SamplingParams.model_fields):
        assert f"`{name}`" in text
