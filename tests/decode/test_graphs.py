"""Engines whose passes are replayed from captured graphs: the texts of transformers' generate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest

from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.loading import make_graphs
from rayspec.model.graphs import GraphLimits, StepGraphs
from rayspec.types import ConfigError
from tests.engines import RandomPlans, complete, engine_with, tokens_of
from tests.families import cases, checkpoint, operator_parts_of
from tests.graph_driver import RecordingDriver

PROMPT_LENGTHS = (1, 80, 37, 3)
NUM_TOKENS = 16


def graphs_with(driver: RecordingDriver, limits: GraphLimits | None = None) -> Callable[..., StepGraphs]:
    return partial(StepGraphs, driver=driver, limits=limits)


def _graphs(engine: Engine) -> StepGraphs:
    graphs = engine.stages.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, StepGraphs)
    return graphs


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_greedy_equals_generate_under_a_random_plan_every_round(family: str) -> None:
    parts, known = operator_parts_of(checkpoint(family)), cases(checkpoint(family), PROMPT_LENGTHS, NUM_TOKENS)
    driver = RecordingDriver()
    engine = engine_with(
        parts, RandomPlans(4, len(parts.sublayers)), max_num_seqs=4, max_num_batched_tokens=64,
        capture=graphs_with(driver),
    )  # fmt: skip
    for _ in range(2):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    graphs = _graphs(engine)
    assert driver.num_replays > driver.num_captures > 0
    each = driver.num_captures / len(graphs.buckets)
    assert graphs.num_graphs == driver.num_captures, "nothing is captured twice"
    if family == "llama":
        assert each == 2 + len(parts.sublayers)


def test_a_sublayer_that_fails_to_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    parts, known = operator_parts_of(checkpoint("llama")), cases(checkpoint("llama"), PROMPT_LENGTHS, NUM_TOKENS)
    driver = RecordingDriver(refuses=lambda number: number % 3 == 0 and number < 12)
    engine = engine_with(parts, RandomPlans(4, len(parts.sublayers)), max_num_seqs=4, capture=graphs_with(driver))
    with caplog.at_level(logging.WARNING):
        assert tokens_of(complete(engine, known.prompts)) == known.expected
    messages = [record.getMessage() for record in caplog.records if "no CUDA graph of" in record.getMessage()]
    assert messages == [
        f"no CUDA graph of sublayer {index}: operation not permitted when stream is capturing; "
        "it is launched eagerly from now on (cuda_kernels='off' avoids GPU kernels and graphs)"
        for index in (0, 3, 6)
    ]
    num_each = 2 + len(parts.sublayers)
    assert _graphs(engine).num_graphs == len(_graphs(engine).buckets) * (num_each - 3)


def test_graphs_that_were_asked_for_and_cannot_be_are_refused() -> None:
    parts = operator_parts_of(checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"'cuda_graphs' is 'sublayers'.*leave it at auto"):
        make_graphs(EngineConfig(model="m", cuda_graphs="sublayers"), parts, None)
    for way in ("auto", "off"):
        assert make_graphs(EngineConfig(model="m", cuda_graphs=way), parts, None) is None  # type: ignore[arg-type]
