"""The deterministic mode in static buffers, as on a GPU: all passes but chunks have the same number of rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.decode import loading
from rayspec.decode.stages import LocalStages
from rayspec.local_engine import load_engine
from rayspec.model.row_counts import FIXED_IN_BUFFERS
from rayspec.model.rows import RowSpan, one_run
from rayspec.strategies.fixed import FixedPlan, static_plan
from tests.engines import GREEDY, complete, tokens_of
from tests.families import cases, checkpoint
from tests.graph_driver import RecordingDriver

LENGTHS, MAX_TOKENS = (5, 37, 70, 9), 24


@pytest.fixture
def _has_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "has_kernels", lambda config, parts: True)
    monkeypatch.setattr(loading, "_verdict_file", lambda config, parts: tmp_path / "verdict.json")
    monkeypatch.setattr(loading, "CudaDriver", lambda device: RecordingDriver())


@pytest.mark.usefixtures("_has_operators")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_in_bfloat16_do_not_depend_on_strategy_or_batch(family: str) -> None:
    prompts = cases(checkpoint(family), LENGTHS, MAX_TOKENS).prompts
    strategies: dict[str, dict[str, Any]] = {
        "ar": {},
        "static": {"skip": (2, 5), "gate": False, "max_draft_tokens": 4},
        "auto": {"optimise_share": 1.0, "gate": False},
    }
    found = {}
    for (name, how), most in [(each, most) for each in strategies.items() for most in (1, 4)]:
        config = EngineConfig(
            model=checkpoint(family), device="cpu", dtype="bfloat16", deterministic=True, num_threads=1,
            max_model_len=256, kv_cache_tokens=2048, max_num_seqs=most, max_num_batched_tokens=64,
            speculation=SpeculationOptions(strategy=name, **how),
        )  # fmt: skip
        engine = load_engine(config, with_tokenizer=False)
        assert isinstance(engine.stages, LocalStages)
        runner = engine.stages.runner
        assert runner.graphs is not None
        assert runner.row_counts == FIXED_IN_BUFFERS
        found[name, most] = tokens_of(complete(engine, prompts, GREEDY.replace(max_tokens=MAX_TOKENS)))
        plain = {bucket.num_rows for bucket in runner.graphs.buckets if bucket.max_rows == 1}
        assert plain == {64} if name == "ar" else 64 in plain  # drafts may have as many rows as sequences
        assert name == "ar" or engine.stats.num_draft_tokens > 0
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
