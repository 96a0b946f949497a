"""Every shard reads or quantizes its own part of the checkpoint: tokens are those of one process that has all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.local_engine import load_engine
from rayspec.pipeline.loading import load_pipeline
from tests.engines import complete, tokens_of
from tests.families import checkpoint, fp8_checkpoint, greedy, ragged_prompts

PROMPTS = ragged_prompts((20, 5, 33, 48), seed=2)
PARAMS = SamplingParams(temperature=0, max_tokens=16)
STATIC: dict[str, Any] = {"strategy": "static", "skip": (2, 3, 5), "max_draft_tokens": 4}


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


@pytest.mark.exhaustive
def test_two_stages_give_the_tokens_of_one_process(ray_cluster: None, tmp_path: Path) -> None:
    """Of block-quantized float8, which transformers turns back into floats on a CPU."""
    one = config(str(fp8_checkpoint("llama", tmp_path / "fp8")))
    expected = tokens(load_engine(one, with_tokenizer=False))
    assert expected != greedy(checkpoint("llama"), PROMPTS, 16), "the weights are others than they were"
    parallel = {"stages": 2, "layers": (1, 3), "cpus_per_shard": 0.5}
    assert tokens(load_pipeline(one.replace(parallel=parallel), with_tokenizer=False)) == expected
