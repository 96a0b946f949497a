"""Every group of options survives `replace`, and what is dumped is read back: nothing depends on what was given."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

import rayspec.batch.commands  # noqa: F401 - it has options of its own
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.processor import ProcessorConfig
from rayspec.bench.options import BenchOptions, TuneOptions
from rayspec.command.settings import make_settings
from rayspec.config import (
    EngineConfig,
    OffloadOptions,
    Options,
    ParallelOptions,
    SamplingParams,
    Settings,
    SpeculationOptions,
)
from rayspec.decode.work import DecodingParams
from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.plan.options import LoadOptions, PlacementOptions, PlanOptions
from rayspec.serve.options import LLMConfig, ModelLoadingConfig, ServeOptions
from rayspec.types import ConfigError

MODEL = {"model_loading_config": {"model_id": "m"}}
REQUIRED: dict[type[Options], dict[str, Any]] = {
    BenchOptions: {"engine": EngineConfig(model="m")},
    TuneOptions: {"engine": EngineConfig(model="m"), "output": Path("a.json"), "input": ("b",)},
    EngineConfig: {"model": "m"},
    LLMConfig: MODEL,
    ModelLoadingConfig: {"model_id": "m"},
    LoadOptions: {"gpus": "1xH100"},
    PlacementOptions: {"gpus": "1xH100"},
    PlanOptions: {"gpus": "1xH100"},
    ProcessorConfig: {"model_source": "m"},
    RenderOptions: {"kind": "service", "model": "demo", "cpus": 1},
    ServeOptions: {"llm_configs": [MODEL]},
}
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": {"type": "object", "properties": {"é": {"const": None}}}}},
    {"structured_outputs": {"choice": ("yes", "no: off"), "disable_any_whitespace": True}},
]
# Options that go together only, or whose values are like no other's.
TOGETHER: dict[type[Options], list[dict[str, Any]]] = {
    EngineConfig: [{"lora_modules": {"a": "b"}, "adapter": "a"}],
    LongDocumentOptions: [{"long": "refine", "chunk_tokens": 100, "overlap_tokens": 2, "level_tokens": (8, 4)}],
    DecodingParams: [{"bad_words_ids": ((1, 2), (3,))}, {"sequence_bias": (((1, 2), -5.0),)}, *FORMS],
    SamplingParams: FORMS,
    LLMConfig: [{"engine_kwargs": {"parallel": {"stages": 2, "topology": {"ray.io/node-id": "STRICT_PACK"}}}}],
    ModelLoadingConfig: [{"model_source": "a", "tokenizer_source": "b"}],
    ProcessorConfig: [{"engine_kwargs": {"max_num_seqs": 3}}],
    RenderOptions: [
        {"kind": "job", "output": "out", "inputs": ("in",), "retries": 3, "long": "refine"},
        {"gpus": "1xH100", "cpus": None},
        {"redis_address": "redis:6379"},
        {"replicas": 2, "max_replicas": 3},
    ],
    ServeOptions: [{"cors": ("*",)}, {"ingress_deployment_config": {"autoscaling_config": {}}}],
    SpeculationOptions: [
        {"strategy": "static", "skip": (1, 3)},
        {"strategy": "static", "static_choice": "int4"},
        {"strategy": "self-sd", "warm_start": "plans.json"},
    ],
}


def groups() -> list[type[Options]]:
    found: list[type[Options]] = [Options]
    for group in found:
        found += [one for one in group.__subclasses__() if one not in found and one.__module__.startswith("rayspec.")]
    return found[1:]


def values(annotation: Any) -> list[Any]:
    """Return some values of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return list(arguments)
    if origin in (Union, UnionType):
        return [value for one in arguments if one is not type(None) for value in values(one)]
    if origin is tuple:
        return [
            (value,)
            for value in values(get_args(arguments[0])[0] if get_origin(arguments[0]) is Annotated else arguments[0])
        ]
    if origin is dict:
        return [{key: value} for key in values(arguments[0])[:1] for value in values(arguments[1])[:1]]
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation(**given) for given in asked_for(annotation)]
    plain: dict[Any, list[Any]] = {bool: [True, False], int: [1, 3, 2048, 2**20], float: [0.25, 1.0]}
    plain |= {str: ["a"], Any: ["a"], Path: [Path("a")]}
    return plain.get(annotation, [])


def asked_for(group: type[Options]) -> list[dict[str, Any]]:
    """Return the required options, alone and with each other option in turn."""
    required = REQUIRED.get(group, {})
    more = [{name: value} for name, info in group.model_fields.items() for value in values(info.annotation)]
    more += [one for base, several in TOGETHER.items() if issubclass(group, base) for one in several]
    return [required, *(required | one for one in more if is_taken(group, required | one))]


def is_taken(group: type[Options], given: dict[str, Any]) -> bool:
    try:
        group(**given)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("group", groups())
def test_a_group_survives_replace_and_a_dump(group: type[Options]) -> None:
    untouched = set(group.model_fields)
    for given in asked_for(group):
        options = group(**given)
        assert options.replace() == options
        assert group(**options.model_dump()) == options
        assert group(**options.model_dump(exclude_defaults=True)) == options
        assert group(**yaml.safe_load(yaml.safe_dump(options.model_dump(mode="json")))) == options
        untouched -= {name for name in untouched if getattr(options, name) != group.model_fields[name].default}
    assert not untouched, "no value above is another than their default"


@pytest.mark.parametrize("name", ["parallel", "speculation", "offload", "sampling"])
def test_saved_options_are_given_back(name: str, tmp_path: Path) -> None:
    groups = {"parallel": ParallelOptions, "speculation": SpeculationOptions, "offload": OffloadOptions}
    for number, given in enumerate(asked_for(groups.get(name, SamplingParams))):
        if name == "sampling":
            params = SamplingParams(**given | {"n": 1, "prompt_logprobs": None, "detokenize": True})
            settings = Settings(engine=EngineConfig(model="m"), sampling=params)
        else:
            settings = Settings(engine=EngineConfig(model="m", **{name: given}), sampling=SamplingParams())
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(settings.resolved()), encoding="utf-8")
        assert make_settings(file=file) == settings
