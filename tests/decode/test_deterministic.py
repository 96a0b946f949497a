"""The deterministic mode: with fixed shapes the same tokens, whatever the plan and the batch; in buffers, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode import loading
from rayspec.decode.stages import LocalStages
from rayspec.local_engine import load_engine
from rayspec.model.matrices import ONE_ORDER
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import RowSpan, one_run
from rayspec.strategies.fixed import FixedPlan, static_plan
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import GREEDY, RandomPlans, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, ragged_prompts
from tests.graph_driver import RecordingDriver

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def test_the_same_tokens_under_random_plans_and_preemption() -> None:
    found = []
    for strategy, batch, kv_cache_tokens in (
        (None, 1, 4096),
        (RandomPlans(0, 32), 6, 4096),
        (RandomPlans(1, 32), 6, 150),
    ):
        engine = engine_with(
            demo_parts("bfloat16"),
            strategy,
            deterministic=True,
            max_num_seqs=batch,
            max_num_batched_tokens=64,
            kv_cache_tokens=kv_cache_tokens,
        )
        found.append(tokens_of(complete(engine, demo_prompts(10, 1, seed=11), PARAMS)))
        assert (engine.stats.num_preemptions > 0) == (kv_cache_tokens < 4096)
        assert (engine.stats.num_accepted_tokens > 0) == (strategy is not None)
        assert not engine.stages.takes_trees
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("family", "dtype"),
    few_of(
        list(product(["llama", "gemma2", "qwen3_moe", "mixtral"], ["float32", "bfloat16"])),
        [("mixtral", "float32")],
    ),
)
def test_a_loaded_engine_is_deterministic_to_the_bit(family: str, dtype: str) -> None:
    """A mixture of experts too: how many rows an expert sees depends on the company, unless rows run alone."""
    prompts = ragged_prompts([30, 5, 61, 17, 9], seed=2)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    runs = []
    static = {"strategy": "static", "skip": [2], "max_draft_tokens": 4}
    for speculation, batch in (({"strategy": "ar"}, 1), (static, 5)):
        config = EngineConfig(
            model=checkpoint(family),
            dtype=dtype,
            device="cpu",
            deterministic=True,
            max_num_seqs=batch,
            kv_cache_tokens=1024,
            speculation=speculation,  # type: ignore[arg-type]
        )
        runs.append(complete(load_engine(config, with_tokenizer=False), prompts, params))
    for one, other in zip(*runs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


LENGTHS, MAX_TOKENS = (5, 37, 70, 9), 14


@pytest.fixture
def _has_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: True)
    monkeypatch.setattr(loading, "_verdict_file", lambda config, parts: tmp_path / "verdict.json")
    monkeypatch.setattr(loading, "CudaDriver", lambda device: RecordingDriver())


@pytest.mark.usefixtures("_has_operators")
@pytest.mark.parametrize("family", few_of(["llama", "gemma2"], ["gemma2"]))
def test_texts_in_bfloat16_do_not_depend_on_strategy_or_batch(family: str) -> None:
    prompts = cases(checkpoint(family), LENGTHS, MAX_TOKENS).prompts
    found = {}
    for name, most, how in (
        ("ar", 1, {}),
        ("static", 4, {"skip": (2, 5), "gate": False, "max_draft_tokens": 4}),
        ("auto", 4, {"optimise_share": 1.0, "gate": False}),
    ):
        config = EngineConfig(
            model=checkpoint(family), device="cpu", dtype="bfloat16", deterministic=True, num_threads=1,
            max_model_len=256, kv_cache_tokens=2048, max_num_seqs=most, max_num_batched_tokens=64,
            speculation=SpeculationOptions(strategy=name, **how),  # type: ignore[arg-type]
        )  # fmt: skip
        engine = load_engine(config, with_tokenizer=False)
        assert isinstance(engine.stages, LocalStages)
        runner = engine.stages.runner
        assert runner.graphs is not None
        assert runner.row_counts == RowCounts(1, ONE_ORDER)
        found[name, most] = tokens_of(complete(engine, prompts, GREEDY.replace(max_tokens=MAX_TOKENS)))
        assert most > 1 or {bucket.num_rows for bucket in runner.graphs.buckets if bucket.max_rows == 1} == {1}
        assert name != "static" or engine.stats.num_draft_tokens > 0  # "auto" drafts where that pays
    assert found == dict.fromkeys(found, found["ar", 1])


@pytest.mark.usefixtures("_has_operators")
def test_a_tree_of_a_strategy_of_the_users_own_runs_beside_the_buffers() -> None:
    """The engine cannot know beforehand that the plans of such a strategy branch."""
    known = cases(checkpoint("llama"), LENGTHS, MAX_TOKENS)
    config = EngineConfig(
        model=checkpoint("llama"), device="cpu", dtype="float32", deterministic=True, num_threads=1, max_model_len=256,
        kv_cache_tokens=2048, max_num_seqs=2, max_num_batched_tokens=64, speculation=SpeculationOptions(strategy="ar"),
    )  # fmt: skip
    engine = load_engine(config, with_tokenizer=False)
    branching = replace(static_plan((2, 5), 8, 3), tree_widths=(3, 3, 2, 2))
    engine.replace_strategy(FixedPlan(branching))
    assert tokens_of(complete(engine, known.prompts, GREEDY.replace(max_tokens=MAX_TOKENS))) == known.expected
    assert engine.stats.num_draft_tokens > 3 * engine.stats.num_rounds, "there were branches"


def test_a_chain_is_divided_where_splits_of_its_context_become_longer() -> None:
    span = RowSpan(one_run(0, 64), context=30, num_rows=9)
    assert [(one.context, one.num_rows) for one in span.divided(4, border=8)] == [(30, 2), (32, 4), (36, 3)]
    assert [(one.context, one.num_rows) for one in span.divided(64, border=64)] == [(30, 9)]
