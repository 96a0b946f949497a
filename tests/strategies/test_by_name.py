"""Strategies that choose plans while they run change no token: in one process and over stages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rayspec import demo
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.search import Answer
from rayspec.decode.stages import LocalStages, Stages
from rayspec.decode.strategy import Strategy
from rayspec.local_engine import load_engine
from rayspec.strategies.by_name import make_strategy
from rayspec.strategies.gate import Gated
from tests.demo_model import EOS, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, greedy, parts_of
from tests.strategy_cases import latency_model

LENGTHS = (37, 3, 150, 12, 70)
NUM_TOKENS = 60
# Rounds cost a lot and layers nothing, so that drafts pay however few of their tokens are accepted.
LATENCY = latency_model(4, sublayer_s=1e-3, round_s=1.0)
STRATEGIES: dict[str, dict[str, Any]] = {
    "clasp": {"num_skipped_layers": 1, "search_interval": 16, "draft_threshold": 0.0},
    "del": {"num_search_tokens": 4},
    "asd": {"attention_cosine": 0.3, "search_interval": 8, "num_search_tokens": 4, "draft_threshold": 0.0},
}


def make(strategy: str, *, gate: bool = False) -> Strategy:
    speculation = SpeculationOptions(strategy=strategy, gate=gate, max_draft_tokens=6, **STRATEGIES[strategy])
    return make_strategy(EngineConfig(model="test", speculation=speculation), 8, LATENCY)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", few_of(["granite", "gemma2"], ["gemma2"]))
def test_a_batch_has_the_tokens_of_plain_decoding(strategy: str, family: str) -> None:
    known = cases(checkpoint(family), LENGTHS, NUM_TOKENS)
    spent_s: list[float] = []

    def timed(stages: LocalStages) -> Stages:
        search = stages.search

        def search_timed(*arguments: Any) -> Future[Answer]:
            answer = search(*arguments)
            spent_s.append(answer.result().seconds)
            return answer

        stages.search = search_timed  # type: ignore[method-assign]
        return stages

    engine = engine_with(parts_of(checkpoint(family)), make(strategy), wrap=timed, max_num_seqs=5)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert tokens_of(outputs) == known.expected
    stats = engine.stats
    assert stats.num_draft_tokens > 20
    assert stats.plans
    assert len(spent_s) > 1
    assert stats.optimise_s >= sum(spent_s) * (1 - 1e-9), "questions that changed nothing took time too"
    assert {record.plan.source for record in stats.plans if record.plan.drafts} == {strategy}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_has_one_behind_the_gate(strategy: str) -> None:
    known = cases(checkpoint("granite"), LENGTHS, NUM_TOKENS)
    chosen = make(strategy, gate=True)
    assert isinstance(chosen, Gated)
    engine = engine_with(parts_of(checkpoint("granite")), chosen, max_num_seqs=5)
    outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert tokens_of(outputs) == known.expected
    assert engine.stats.gate_reason == chosen.status


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sampled_text_is_that_of_plain_decoding(strategy: str) -> None:
    prompts = cases(checkpoint("granite"), LENGTHS, NUM_TOKENS).prompts[:3]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=40)
    plain = tokens_of(complete(engine_with(parts_of(checkpoint("granite")), max_num_seqs=3), prompts, params))
    engine = engine_with(parts_of(checkpoint("granite")), make(strategy), max_num_seqs=3)
    assert tokens_of(complete(engine, prompts, params)) == plain
    assert engine.stats.num_draft_tokens > 0


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "clasp": lambda: {"num_skipped_layers": 4, "search_interval": 32},
    "del": lambda: {"search_interval": 4},
    "asd": lambda: {"attention_cosine": 0.97},
}


@pytest.mark.parametrize("strategy", few_of(OPTIONS, ["asd"]))
def test_a_loaded_engine_measures_asks_and_drafts(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = EngineConfig(
        model=demo.model_path(),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        kv_cache_tokens=2048,
        profile_cache=str(tmp_path_factory.getbasetemp() / "profiles"),
        speculation={"strategy": strategy, "gate": False} | OPTIONS[strategy](),  # type: ignore[arg-type]
    )
    prompts = demo_prompts(2, 12)
    engine = load_engine(config)
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=60))
    assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 60, eos=(EOS,))
    assert engine.stats.optimise_s > 0
    if strategy != "del":  # which may find that no exit pays
        assert engine.stats.num_accepted_tokens > 0
