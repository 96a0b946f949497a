"""Engines from their options: which choices drafts have, where copies are not allowed, not wanted or not possible."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec.choices import FULL, SKIP, Choice
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.loading import allowed_copies, choices_here, copies_for_drafts
from rayspec.local_engine import load_engine
from rayspec.model.fused import draft_head_bytes
from rayspec.model.sizes import quantised_bytes
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from rayspec.types import CheckpointError, ConfigError
from tests.engines import complete, tokens_of
from tests.exhaustive import few_of
from tests.families import FAMILIES, cases, checkpoint, int4_checkpoints, modules_of, packed_checkpoints, small_config
from tests.strategy_cases import saved_plan

PARAMS = SamplingParams(temperature=0, max_tokens=16)
INT4: dict[str, Any] = {"strategy": "static", "static_choice": "int4", "max_draft_tokens": 4}


def config(family: str = "llama", *, folder: Path | None = None, **speculation: Any) -> EngineConfig:
    cache = str(folder) if folder else None
    return small_config(checkpoint(family), max_model_len=256, profile_cache=cache, speculation=speculation)


def require_tokens(engine: Engine, family: str = "llama") -> None:
    known = cases(checkpoint(family), (37, 3, 90), 16)
    assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected


def ways_in(engine: Engine) -> set[Choice]:
    """By which drafts of the engine may run a sublayer."""
    runner = engine.stages.runner  # type: ignore[attr-defined]
    return {choice for ways in runner.choices_by_kind.values() for choice in ways}


def test_copies_are_taken_as_long_as_they_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert allowed_copies({"int4": 10, "int8": 20}, None) == ["int4", "int8"]
    assert allowed_copies({"int4": 10, "int8": 20}, 30) == ["int4", "int8"]
    assert not caplog.messages
    assert allowed_copies({"int4": 10, "int8": 20}, 29) == ["int4"]
    assert caplog.messages == ["drafts have no int8 weights: they take 20 bytes, extra_weight_bytes leaves 19"]
    assert allowed_copies({"int4": 30, "int8": 20}, 20) == ["int8"]
    assert allowed_copies({"int4": 10}, 0) == []


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("model.weights._load", "'offload' or 'parallel'"),
        ("model.weights.PreTrainedModel.to", "'offload' or 'parallel'"),
        ("decode.loading.has_kernels", "'offload' or 'parallel'"),
        ("decode.loading.make_graphs", "lower kv_cache_share"),
    ],
)
def test_a_model_that_is_too_large_is_an_error_with_a_remedy(
    place: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(f"rayspec.{place}", lacks)
    with pytest.raises(CheckpointError, match=f"too small for this model .CUDA out of memory.*{remedy}"):
        load_engine(config(), with_tokenizer=False)


def test_a_span_has_copies_of_its_own_sublayers() -> None:
    parts = modules_of(checkpoint("llama"))
    sizes = quantised_bytes(parts.config, "int4", on_cpu=True)
    most = draft_head_bytes(parts, "int4") + sum(sizes) // 2
    half = config(choices=("int4",), extra_weight_bytes=most)
    assert copies_for_drafts(half, parts) == []
    assert copies_for_drafts(half, replace(parts, sublayers=parts.sublayers[4:])) == ["int4"]


def test_drafts_in_static_buffers_read_all_keys_or_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = modules_of(checkpoint("llama"))
    assert "int4+pages" in choices_here(config(), parts)
    monkeypatch.setattr("rayspec.decode.loading.has_kernels", lambda config, parts: True)
    assert choices_here(config(), parts) == (FULL, "int4", "window", "int4+window", SKIP)


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, {FULL, "int4", "window", "pages", "int4+window", "int4+pages"}),
        ({"choices": ("int8", "window")}, {FULL, "int8", "window", "int8+window"}),
        (INT4, {FULL, "int4"}),
    ],
)
def test_engines_have_the_choices_that_are_allowed(speculation: dict[str, Any], expected: set[Choice]) -> None:
    engine = load_engine(config(**speculation), with_tokenizer=False)
    assert ways_in(engine) == expected
    require_tokens(engine)


@pytest.mark.parametrize("family", few_of(FAMILIES, ["qwen3_moe"]))
def test_every_family_decodes_with_default_options(family: str) -> None:
    require_tokens(load_engine(config(family, optimise_share=1.0, gate=False), with_tokenizer=False), family)


@pytest.mark.parametrize("family", few_of(FAMILIES, ["phi3", "mixtral"]))
def test_static_drafts_run_by_the_nearest_choice_that_there_is(family: str) -> None:
    engine = load_engine(config(family, **(INT4 | {"static_choice": "int4+pages"})), with_tokenizer=False)
    plan = engine._planner.strategy.choose(None).plan  # type: ignore[arg-type]
    sublayers = engine.stages.runner.parts.sublayers  # type: ignore[attr-defined]
    for sublayer, choice in zip(sublayers, plan.choices, strict=True):
        is_attention, has_copy = sublayer.kind == "attention", "int4" in sublayer.quantised
        expected = {(True, True): "int4+pages", (False, True): "int4", (True, False): "pages", (False, False): FULL}
        assert choice == expected[is_attention, has_copy]
    require_tokens(engine, family)
    assert engine.stats.num_accepted_tokens > 0


def test_static_drafts_without_any_copy_are_not_made(caplog: pytest.LogCaptureFixture) -> None:
    engine = load_engine(config(**INT4, extra_weight_bytes=0), with_tokenizer=False)
    require_tokens(engine)
    assert engine.stats.num_draft_tokens == 0
    assert "there are no drafts: no sublayer can run by option 'static_choice' 'int4'" in caplog.messages


def test_saved_plans_go_by_the_choices_that_there_are(tmp_path: Path) -> None:
    """Found where copies were allowed, used where they are not."""
    choices: tuple[Choice, ...] = ("int4+pages", "int4", SKIP, "int8", "window", FULL, "pages", "int4")
    path = tmp_path / "plans.json"
    SavedPlans(model=ModelIdentity.of(config(), 8), plans=(saved_plan(choices=choices),)).save(path)
    options: dict[str, Any] = {"strategy": "self-sd", "warm_start": str(path), "gate": False}
    engine = load_engine(config(folder=tmp_path, choices=("skip", "pages"), **options), with_tokenizer=False)
    require_tokens(engine)
    assert engine.stats.num_draft_tokens > 0
    plan = engine._planner.strategy.choose(None).plan  # type: ignore[arg-type]
    assert plan.choices == ("pages", FULL, SKIP, FULL, FULL, FULL, "pages", FULL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "choice"),
    list(product(["float16", "bfloat16"], ["int4", "int8+pages"])),
)
def test_other_data_types_draft_by_copies(dtype: str, choice: Choice) -> None:
    """In fixed shapes, so that drafts change no bit."""
    known = cases(checkpoint("llama"), (37, 3, 90), 16)
    tokens = []
    for speculation in ({"strategy": "ar"}, INT4 | {"static_choice": choice}):
        options = config(**speculation).replace(dtype=dtype, deterministic=True)
        engine = load_engine(options, with_tokenizer=False)
        tokens.append(tokens_of(complete(engine, known.prompts, PARAMS)))
    assert tokens[0] == tokens[1]
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("name", "make"),
    [("compressed-tensors", int4_checkpoints), ("gptq", packed_checkpoints)],
    ids=("compressed-tensors", "gptq"),
)
def test_a_checkpoint_of_4_bits_drafts_as_a_plain_one(
    name: str, make: Callable[[str, Path], tuple[Path, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    packed, plain = map(str, make("llama", tmp_path))
    known = cases(plain, (37, 3, 90), 16)
    for more in ({"strategy": "static", "skip": (2,)}, INT4):
        engine = load_engine(small_config(packed, max_model_len=256, speculation=more), with_tokenizer=False)
        assert tokens_of(complete(engine, known.prompts, PARAMS)) == known.expected
        assert engine.stats.num_accepted_tokens > 0
        assert engine.stats.weights == f"{name}: become plain matrices at load"
    assert "became plain matrices in float32" in caplog.text


def test_a_cache_that_does_not_fit_is_an_error_of_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    monkeypatch.setattr("rayspec.decode.loading.KVCache", full)
    with pytest.raises(
        ConfigError, match=r"'kv_cache_tokens' is \d+, which do not fit \(.*can't allocate.*\): lower it"
    ):
        load_engine(config(), with_tokenizer=False)
