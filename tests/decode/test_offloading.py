"""Weights on disk under a whole engine: no token changes, and plans skip what is slow to fetch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec import LLM, demo
from rayspec.choices import SKIP, Choices
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.engine import Engine
from rayspec.decode.loading import least_needed, load_weights, offload_weights
from rayspec.decode.runner import Runner
from rayspec.local_engine import load_engine
from rayspec.model.architecture import Decomposition, decompose
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, one_run
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.auto import Auto
from rayspec.types import ConfigError
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.families import cases, checkpoint, modules_of

OFFLOADED = (5, 13, 15, 17, 18, 25)
KNAPSPEC = {"strategy": "knapspec", "gate": False, "optimise_share": 1.0, "num_search_tokens": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=60)
Tokens = list[tuple[int, ...]]


def config(model: str, folder: Path, *, offload: Any = None, **options: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_tokens": 1024, "num_threads": 1,
        "profile_cache": str(folder), "speculation": {"strategy": "ar"},
    }  # fmt: skip
    where = None if offload is None else {"to": "disk", "folder": str(folder), **offload}
    return EngineConfig(model=model, offload=where, **(values | options))


def load(model: str, folder: Path, **options: Any) -> Engine:
    return load_engine(config(model, folder, **options), with_tokenizer=False)


@cache
def prompts() -> list[list[int]]:
    return demo_prompts(2, 6)


@cache
def resident(dtype: str, *, deterministic: bool = False) -> Tokens:
    """Of the demo model with all its weights in memory, decoding plainly."""
    engine = engine_with(demo_parts(dtype), deterministic=deterministic, eos=(EOS,), max_num_batched_tokens=1024)
    return tokens_of(complete(engine, prompts(), PARAMS))


@pytest.mark.parametrize("speculation", [{"strategy": "ar"}, KNAPSPEC], ids=["ar", "knapspec"])
def test_tokens_are_those_of_the_model_in_memory(speculation: dict[str, Any], tmp_path: Path) -> None:
    engine = load(demo.model_path(), tmp_path, offload={"sublayers": OFFLOADED}, speculation=speculation)
    assert tokens_of(complete(engine, prompts(), PARAMS)) == resident("float32")
    assert (engine.stats.num_draft_tokens > 0) == (speculation is KNAPSPEC)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_other_families_keep_their_tokens(family: str, tmp_path: Path) -> None:
    known = cases(checkpoint(family), (20, 33), 16)
    params = SamplingParams(temperature=0, max_tokens=16)
    static = {"strategy": "static", "skip": (1, 4), "max_draft_tokens": 4}
    for speculation in ({"strategy": "ar"}, static, KNAPSPEC):
        engine = load(checkpoint(family), tmp_path, offload={"sublayers": (1, 4, 7)}, speculation=speculation)
        assert tokens_of(complete(engine, known.prompts, params)) == known.expected


def test_a_share_is_taken_from_the_mlps_in_the_middle() -> None:
    parts = modules_of(checkpoint("llama"))  # attention has 2/5 of the weights, MLPs 3/5, in 4 layers
    assert least_needed(parts, 0.01) == [3]
    assert least_needed(parts, 0.3) == [3, 5]
    assert least_needed(parts, 0.59) == [1, 3, 5, 7]
    assert least_needed(parts, 0.65) == [1, 3, 4, 5, 7]
    assert least_needed(parts, 0.99) == list(range(8))
    span = replace(parts, embedding=None, sublayers=parts.sublayers[4:])
    assert least_needed(span, 0.2) == [5]
    demo_share = least_needed(modules_of(demo.model_path()), 0.2)
    assert all(index % 2 for index in demo_share)
    assert demo_share == list(range(demo_share[0], demo_share[-1] + 1, 2))
    assert demo_share[0] + demo_share[-1] in (30, 32, 34)


def test_a_profile_of_other_weights_on_disk_is_not_used(tmp_path: Path) -> None:
    path = checkpoint("llama")
    for sublayers in (None, (1,), (3, 5)):
        offload = None if sublayers is None else {"sublayers": sublayers}
        latency = load(path, tmp_path, offload=offload, speculation=KNAPSPEC).latency
        assert latency is not None
        assert tuple(index for index, seconds in enumerate(latency.transfer_s) if seconds > 0) == (sublayers or ())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> LatencyModel:
    engine = load(
        demo.model_path(), tmp_path_factory.mktemp("p"), offload={"sublayers": OFFLOADED}, speculation=KNAPSPEC
    )
    assert engine.latency is not None
    return engine.latency


@pytest.mark.parametrize("num_forwards", [3, 10, 100])
def test_drafts_do_without_all_that_is_slow_to_fetch(measured: LatencyModel, num_forwards: int) -> None:
    """Fetching made as slow as it is for weights of gigabytes: all of it together takes so many forwards."""
    forward_s = measured.decode_step_s(context=200, batch=1) - sum(measured.transfer_s)
    each_s = num_forwards * forward_s / len(OFFLOADED)
    slow = replace(measured, transfer_s=tuple(each_s if seconds else 0.0 for seconds in measured.transfer_s))
    drafts = [plan for plan in _plans(slow) if plan.drafts]
    assert drafts
    assert all(set(OFFLOADED) <= _skipped(plan.choices) for plan in drafts)
    if num_forwards == 100:  # nothing else is worth skipping
        assert {frozenset(_skipped(plan.choices)) for plan in drafts} == {frozenset(OFFLOADED)}


def _plans(latency: LatencyModel) -> list[Any]:
    options = SpeculationOptions(**KNAPSPEC, choices=("skip",))  # whose knapsack is between skipping and fetching
    engine = engine_with(demo_parts(), Auto(options, latency, looks_up=False), max_draft_tokens=16, eos=(EOS,))
    assert tokens_of(complete(engine, prompts(), PARAMS)) == resident("float32")
    return [record.plan for record in engine.stats.plans]


def _skipped(choices: Choices) -> set[int]:
    return {index for index, choice in enumerate(choices) if choice == SKIP}


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"sublayers": (1, 8)}, r"'sublayers' names sublayer 8; the model has 0 to 7"),
        ({"sublayers": (-1,)}, r"'sublayers' names sublayer -1"),
        ({"to": "cpu"}, r"'to' is 'cpu'.*disk"),
        ({"folder": "/no/such/folder"}, r"'folder' is '/no/such/folder'"),
        ({"to": "tape"}, r"'tape'"),
        ({"share": 1.0}, r"share"),
    ],
)
def test_options_that_cannot_work_are_refused(offload: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint("llama"), tmp_path, offload=offload)


@pytest.mark.parametrize("layers", [range(2), range(2, 4)])
def test_a_span_offloads_its_own_of_the_model_s_sublayers(layers: range, tmp_path: Path) -> None:
    chosen = (1, 2, 5, 7)
    asked = config(checkpoint("llama"), tmp_path, offload={"sublayers": chosen})
    expected = _through(_span(asked, layers)[0])
    parts, offloaded = _span(asked, layers, offload=True)
    here = tuple(index for index in chosen if index // 2 in layers)
    assert offloaded.sublayers == here
    assert [
        index for index, seconds in zip(_indices(parts), offloaded.transfer_seconds(), strict=True) if seconds
    ] == list(here)
    assert torch.equal(_through(parts), expected)


def _indices(parts: Decomposition) -> list[int]:
    return [sublayer.index for sublayer in parts.sublayers]


def _span(asked: EngineConfig, layers: range, *, offload: bool = False) -> tuple[Decomposition, Any]:
    model = load_weights(asked, layers=layers)
    parts = decompose(model, layers=layers)
    return parts, offload_weights(asked, model, parts) if offload else None


@torch.inference_mode()
def _through(parts: Decomposition) -> torch.Tensor:
    cache = KVCache(parts.shapes, 16, dtype=parts.dtype, device=torch.device("cpu"))
    runner = Runner(parts, cache, device=torch.device("cpu"), row_counts=None)
    states = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    return runner.run(runner.batch([RowSpan(one_run(0, 1000), 0, 5)]), states)


@pytest.mark.exhaustive
def test_two_stages_with_weights_on_disk(ray_cluster: None, tmp_path: Path) -> None:
    with LLM(
        demo.model_path(), dtype="float32", device="cpu", num_threads=1, max_model_len=512, kv_cache_tokens=1024,
        offload={"to": "disk", "sublayers": OFFLOADED, "folder": str(tmp_path)}, speculation=KNAPSPEC,
        parallel={"stages": 2, "layers": (8, 8), "cohorts": 1, "cpus_per_shard": 0.5},
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], PARAMS)
        latency = llm.client.info.latency
    assert latency is not None
    assert tuple(index for index, seconds in enumerate(latency.transfer_s) if seconds > 0) == OFFLOADED
    assert tokens_of(outputs) == resident("float32")
