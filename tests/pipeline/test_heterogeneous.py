"""Stages of unequal speed, on real actors: the second one computes everything several times over."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import ray
from torch import Tensor

from rayspec import demo
from rayspec.choices import Choice
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.runner import Batch, Runner
from rayspec.model.kv_cache import CacheSize
from rayspec.model.sublayers import Tap
from rayspec.pipeline.endpoint import Endpoint
from rayspec.pipeline.loading import load_pipeline
from rayspec.pipeline.ray_stages import RayStages
from rayspec.pipeline.shard import Shard
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import complete, engine_with, tokens_of

NUM_TIMES = 6
SLOW = 1
NUM_LAYERS = 16
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class SlowRunner(Runner):
    """Runs its sublayers several times; keys and values go where they went before, so the results are the same."""

    def run(
        self,
        batch: Batch,
        hidden: Tensor,
        *,
        begin: int | None = None,
        end: int | None = None,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        for _ in range(NUM_TIMES - 1):
            super().run(batch, hidden, begin=begin, end=end, choices=choices)
        return super().run(batch, hidden, begin=begin, end=end, choices=choices, tap=tap)


class UnevenShard(Shard):
    def prepare(self, endpoint: Endpoint, size: CacheSize) -> None:
        super().prepare(endpoint, size)
        if self.stage == SLOW:
            self.span.runner.__class__ = SlowRunner


@pytest.fixture(scope="module")
def uneven(ray_cluster: None) -> Iterator[type[Shard]]:
    """The class, sent to Ray's workers as it is: they cannot import this file."""
    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    yield UnevenShard
    ray.cloudpickle.unregister_pickle_by_value(module)


@cache
def prompts() -> list[list[int]]:
    return demo_prompts(2, 6)


@cache
def expected() -> list[tuple[int, ...]]:
    return tokens_of(complete(engine_with(demo_parts()), prompts(), PARAMS))


def load(shard_type: type[Shard]) -> Engine:
    config = EngineConfig(
        model=demo.model_path(),
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_model_len=512,
        kv_cache_tokens=2048,
        speculation={"strategy": "ar"},  # type: ignore[arg-type]
        parallel={"stages": 2, "cohorts": 1, "cpus_per_shard": 0.5},  # type: ignore[arg-type]
    )
    return load_pipeline(config, with_tokenizer=False, shard_type=shard_type)


@pytest.mark.exhaustive
def test_a_slow_stage_gets_fewer_layers(uneven: type[Shard]) -> None:
    engine = load(uneven)
    try:
        assert isinstance(engine.stages, RayStages)
        (first, middle), (_, last) = engine.stages.replica.spans
        assert (first, last) == (0, 2 * NUM_LAYERS)
        assert NUM_LAYERS - middle // 2 <= NUM_LAYERS // 4, "a seventh would make the stages equally fast"
        assert tokens_of(complete(engine, prompts(), PARAMS)) == expected()
    finally:
        engine.shutdown()
