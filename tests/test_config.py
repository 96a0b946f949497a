import re
from typing import Any, get_args, get_type_hints

import pytest
import ray.data.llm
import torch
from typing_extensions import Unpack

from rayspec import config as config_module
from rayspec.batch.processor import ProcessorConfig
from rayspec.choices import FULL, SKIP
from rayspec.config import (
    REPLACED,
    EngineConfig,
    EngineKeywords,
    Options,
    SamplingKeywords,
    SamplingParams,
    Settings,
    SpeculationOptions,
)
from rayspec.decode.work import DecodingParams
from rayspec.types import ConfigError


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def speculation(**options: Any) -> SpeculationOptions:
    return SpeculationOptions(**options)


@pytest.mark.parametrize(("group", "old"), [(group, old) for group, replaced in REPLACED.items() for old in replaced])
def test_an_option_that_is_gone_says_what_replaced_it(group: str, old: str) -> None:
    options: type[Options] = ProcessorConfig if group == "ProcessorConfig" else getattr(config_module, group)
    with pytest.raises(ConfigError, match=f"option '{old}' is (now|gone|refused|not needed)") as raised:
        options(**{old: 1})
    named = re.findall(r"now '(\w+)\.(\w+)'", str(raised.value))
    assert all(name in SpeculationOptions.model_fields for _, name in named)
    assert old not in options.model_fields


def test_every_option_of_ray_data_llm_is_here_or_refused_with_a_remedy() -> None:
    theirs = set(ray.data.llm.vLLMEngineProcessorConfig.model_fields)
    assert theirs <= {*ProcessorConfig.model_fields, *REPLACED["ProcessorConfig"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "option 'max_num_seqs' is 0"),
        ({"max_num_seq": 4}, r"unknown option 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        ({"speculation": {"strategy": "knapspac"}}, r"'strategy' is 'knapspac'.*did you mean 'knapspec'\?"),
        ({"speculation": {"strategy": "static"}}, r"strategy 'static' needs option 'skip'.*: name them"),
        ({"speculation": {"skip": (1,)}}, "'skip' works with strategy 'static' only, not 'auto'"),
        ({"speculation": {"choices": ("skip", "int5")}}, "'choices.1' is 'int5'"),
        ({"dtype": "float8"}, "option 'dtype' is 'float8'"),
        ({"speculation": {"optimise_share": float("nan")}}, "optimise_share"),
        ({"speculation": {"strategi": "ar"}}, "'speculation'.*unknown option 'strategi'; did you mean 'strategy'"),
        ({"strategy": "ar"}, "unknown option 'strategy' here: give speculation={'strategy': 'ar'}"),
        ({"stages": 2}, "give parallel={'stages': 2}"),
        ({"temperature": 0}, r"give SamplingParams\(temperature=0\) to `generate` or `chat`; in a file, .*'sampling'"),
        ({"speculation": {"zzz": 1}}, "unknown option 'zzz'; valid: .*choices, .*gate, "),
        ({"offload": {}, "parallel": {"tensor": 2}}, "'offload' does not work with option 'tensor' 2.*use more stages"),
        ({"speculation": {1: 2}}, r"option 'speculation' is \{1: 2\}: its names must be texts"),
        ({"offload": {True: 2}}, "option 'offload' is {True: 2}: its names must be texts"),
        ({"parallel": "atuo"}, "'parallel' is 'atuo': give a mapping.*only LLM.* takes 'auto'"),
        ({"cuda_graphs": "on", "cuda_kernels": "off"}, "'cuda_graphs' 'on' does not .* option 'cuda_kernels'.*auto"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_an_option_of_the_engine_belongs_to_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_model_len' here: .* engine, as LLM\(...\) takes it"):
        SamplingParams(max_model_len=5)
    with pytest.raises(ConfigError, match=r"give engine_kwargs=\{'dtype': 'float32'\}"):
        ProcessorConfig(model_source="demo", dtype="float32")
    with pytest.raises(
        ConfigError, match=r"'model_source' is missing: give it a folder.*'model' is refused: give 'model_s"
    ):
        ProcessorConfig(model="demo")


def test_a_static_choice_belongs_to_the_static_strategy() -> None:
    assert speculation(strategy="static", static_choice="int4").draft_choices == (FULL, "int4", SKIP)
    assert speculation(strategy="static", skip=(1,)).draft_choices == (FULL, SKIP)
    parts = speculation(strategy="static", static_choice="int8+pages").draft_choices
    assert parts == (FULL, "int8", "pages", "int8+pages", SKIP), "an MLP has no keys, and some attention no copy"
    with pytest.raises(ConfigError, match="'static_choice' works with strategy 'static' only, not 'auto'"):
        speculation(strategy="auto", static_choice="int4")
    with pytest.raises(ConfigError, match="'static_choice' is 'skip', which leaves no draft"):
        speculation(strategy="static", static_choice="skip")
    with pytest.raises(ConfigError, match=r"'static_choice' is 'int4\+window2'.*did you mean 'int4\+window'"):
        speculation(strategy="static", static_choice="int4+window2")


@pytest.mark.parametrize("given", [[{"name": "a", "path": "/x"}], [1], ["a"]])
def test_pairs_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"'lora_modules'.*write it as NAME=VALUE"):
        EngineConfig(model="m", lora_modules=given)


def test_capacity_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def capacity(made: EngineConfig) -> tuple[int, int]:
        return made.num_seqs, made.num_batched_tokens

    unset = EngineConfig(model="m")
    assert capacity(unset.replace(device="cpu")) == (8, 1024)
    assert capacity(unset.replace(device="cuda:1")) == (64, 4096)
    assert capacity(EngineConfig(model="m", device="cuda", max_num_seqs=3)) == (3, 4096)
    for gpu_bytes, expected in ((None, (8, 1024)), (24 * 2**30, (64, 4096)), (79 * 2**30, (256, 8192))):
        made = unset.sized(gpu_bytes)
        assert (made.max_num_seqs, made.max_num_batched_tokens) == expected
        assert made.sized(0) == made
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)
    assert capacity(unset) == (64, 4096)


def test_equal_options_have_equal_hashes() -> None:
    one, same = (SamplingParams(logit_bias=dict(bias)) for bias in ([(1, 1), (2, 2)], [(2, 2), (1, 1)]))
    assert {one, SamplingParams()} == {same, SamplingParams()}


def test_sampling_defaults_are_those_of_vllm() -> None:
    params = DecodingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, ())
    assert not params.greedy
    assert not params.has_penalties
    assert DecodingParams(temperature=1e-6).greedy
    nothing: dict[str, Any] = {"stop_token_ids": None, "logit_bias": None, "stop": "end"}
    asked = SamplingParams(**nothing)
    assert (asked.stop_token_ids, asked.logit_bias, asked.stop) == ((), {}, ("end",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        *(({"logit_bias": {key: 1.0}}, f"'logit_bias'.*{key!r}") for key in ("07", "1_0", " 7", "\u0667", "")),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "option 'stop' is 5: give a text or a list of texts"),
        ({"stop": b"a"}, "option 'stop' is b'a': give a text or a list of texts"),
        ({"min_tokens": 5, "max_tokens": 4}, "option 'min_tokens' is 5: it must not exceed max_tokens, which is 4"),
        ({"seed": 2**64}, r"option 'seed' is \d+: it must fit 64 bits"),
        ({"top_k": 2**63}, r"option 'top_k' is \d+: it must fit 64 bits"),
        ({"stop_token_ids": [1, -(2**70)]}, r"option 'stop_token_ids' is -\d+: it must fit 64 bits"),
        *(({name: True}, f"option '{name}' is True: give a number") for name in ("max_tokens", "n", "temperature")),
        ({"temperature": 1e39}, r"option 'temperature' is 1e\+39: it must be less than or equal to 30+$"),
        ({"stop_token_ids": [3, -1]}, "option 'stop_token_ids' holds -1: give tokens from 0 on"),
        ({"stop_token_ids": [3, True]}, r"option 'stop_token_ids' is \[3, True\]: it has True, which is no number"),
        ({"best_of": 4}, "'best_of' is 4: give n"),
        ({"logits_processors": [print]}, "'logits_processors' is .*: a program cannot run in the sampler"),
        ({"use_beam_search": True}, "'use_beam_search' is True: beams are not samples"),
        (
            {"guided_decoding": {"regex": "a"}},
            "'guided_decoding' is .*: give structured_outputs=StructuredOutputsParams",
        ),
        (
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            "'spaces_between_special_tokens' is False: give True, or leave out skip_special_tokens=False",
        ),
        ({"stop": "a", "detokenize": False}, "'stop' needs texts"),
        ({"allowed_token_ids": []}, "'allowed_token_ids' is empty"),
        ({"bad_words": [""]}, "'bad_words' holds an empty string"),
        ({"truncate_prompt_tokens": 0}, "'truncate_prompt_tokens' is 0"),
    ],
)
def test_sampling_outside_its_limits_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({"strategy": "knapspec", "num_search_tokens": 5}, 5),
        ({"strategy": "clasp", "num_search_tokens": 5}, 1),
        ({"strategy": "asd"}, 8),
        ({"strategy": "swift"}, 32),
    ],
)
def test_as_many_tokens_are_tapped_as_the_strategy_asks_about(options: dict[str, Any], num_tokens: int) -> None:
    assert SpeculationOptions(**options).num_tap_tokens == num_tokens


def test_the_keywords_of_llm_are_the_options_of_the_engine() -> None:
    keywords, options = get_type_hints(EngineKeywords), get_type_hints(EngineConfig)
    assert keywords.keys() == EngineConfig.model_fields.keys() - {"model"}
    groups = {"speculation", "offload", "parallel"}
    assert {name: kind for name, kind in keywords.items() if name not in groups} == {
        name: options[name] for name in keywords if name not in groups
    }
    for name in groups:
        assert set(get_args(options[name]) or (options[name],)) < set(get_args(keywords[name]))


def test_the_keywords_of_sampling_params_are_its_fields() -> None:
    keywords, fields = get_type_hints(SamplingKeywords), get_type_hints(SamplingParams)
    given_otherwise = {"stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs"}
    assert list(keywords) == list(SamplingParams.model_fields)
    assert all(keywords[name] == fields[name] for name in keywords.keys() - given_otherwise)
    assert get_type_hints(SamplingParams.__init__)["values"] == Unpack[SamplingKeywords], "as type checkers read it"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
    ],
)
def test_data_types_have_the_names_of_vllm_and_torch_too(given: Any, dtype: str) -> None:
    assert EngineConfig(model="demo", dtype=given).dtype == dtype
    with pytest.raises(ConfigError, match="'float8': it must be"):
        EngineConfig(model="demo", dtype="float8")  # type: ignore[arg-type]


def test_options_that_round_otherwise_decide_texts() -> None:
    changes: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"deterministic": True}, {"own_bits": True}]
    engines = [EngineConfig(model="demo", **change) for change in changes]
    deciding = [str(Settings(engine=engine, sampling=SamplingParams()).deciding) for engine in engines]
    assert len(set(deciding)) == len(changes)
