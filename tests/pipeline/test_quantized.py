"""Every shard reads or quantizes its own part of the checkpoint: tokens are those of one process that has all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.local_engine import load_engine
from rayspec.pipeline.loading import load_pipeline
from rayspec.pipeline.ray_stages import RayStages
from tests.engines import complete, tokens_of
from tests.exhaustive import few_of
from tests.families import checkpoint, fp8_checkpoint, greedy, ragged_prompts

PROMPTS = ragged_prompts((20, 5, 33, 48), seed=2)
PARAMS = SamplingParams(temperature=0, max_tokens=16)
STATIC: dict[str, Any] = {"strategy": "static", "skip": (2, 3, 5), "max_draft_tokens": 4}
INT8: dict[str, Any] = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}


def config(model: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=model, dtype="float32", device="cpu", num_threads=1, max_model_len=128, kv_cache_tokens=1024,
        speculation=STATIC, **options,
    )  # fmt: skip


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    try:
        found = tokens_of(complete(engine, PROMPTS, PARAMS))
        assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
        return found
    finally:
        engine.shutdown()


def in_two_stages(one: EngineConfig) -> Engine:
    parallel = {"stages": 2, "layers": (1, 3), "cpus_per_shard": 0.5}
    return load_pipeline(one.replace(parallel=parallel), with_tokenizer=False)


def from_fp8(folder: Path) -> EngineConfig:
    return config(str(fp8_checkpoint("llama", folder / "fp8")))


def to_int8(folder: Path) -> EngineConfig:
    pytest.importorskip("torchao", reason="this quantizer is not installed")
    return config(checkpoint("llama"), quantization_config={"quant_method": "torchao", "quant_type": {"default": INT8}})


@pytest.mark.parametrize("quantized", few_of([from_fp8, to_int8], [to_int8]))
def test_two_stages_give_the_tokens_of_one_process(
    quantized: Callable[[Path], EngineConfig], ray_cluster: None, tmp_path: Path
) -> None:
    one = quantized(tmp_path)
    expected = tokens(load_engine(one, with_tokenizer=False))
    assert expected != greedy(checkpoint("llama"), PROMPTS, 16), "the weights are others than they were"
    assert tokens(in_two_stages(one)) == expected


@pytest.mark.exhaustive
def test_ranks_draft_by_copies_that_each_makes_for_itself(ray_cluster: None) -> None:
    """The last matrix of a sublayer has no copy. Stages do the same in test_ray_stages.py."""
    static = {"strategy": "static", "static_choice": "int4+window", "skip": (3,), "max_draft_tokens": 4}
    parallel = {"stages": 1, "tensor": 2, "cpus_per_shard": 0.5}
    one = config(checkpoint("llama")).replace(speculation=static, parallel=parallel)
    engine = load_pipeline(one, with_tokenizer=False)
    assert isinstance(engine.stages, RayStages)
    assert [set(ways) for ways in engine.stages.ways] == [
        {"full", "int4", "window", "int4+window", "skip"},
        {"full", "int4", "skip"},
    ] * 4
    choices = engine._planner.strategy.choose(None).plan.choices  # type: ignore[arg-type]
    assert choices == ("int4+window", "int4", "int4+window", "skip", *("int4+window", "int4") * 2)
    assert tokens(engine) == greedy(checkpoint("llama"), PROMPTS, 16)
