"""Streams of prompts whose domain changes."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.streams import mixed
from rayspec import demo
from rayspec.bench.workloads import Workload
from rayspec.config import EngineConfig
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from tests.strategy_cases import saved_plan

DOMAINS = [Workload(domain=name, prompts=[[ord(name), index] for index in range(500)], context=50) for name in "abc"]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_ratio_is_the_share_of_changes(ratio: float) -> None:
    stream = mixed(DOMAINS, ratio, 401, seed=5)
    assert len(set(map(tuple, stream.prompts))) == 401, "no prompt comes twice"
    names = [prompt[0] for prompt in stream.prompts]
    assert names[0] == ord("a")
    changes = sum(one != other for one, other in pairwise(names))
    assert abs(changes - 400 * ratio) <= 4 * (400 * ratio * (1 - ratio)) ** 0.5
    assert stream == mixed(DOMAINS, ratio, 401, seed=5)


def test_a_stream_with_saved_plans(tmp_path: Path) -> None:
    model = ModelIdentity.of(EngineConfig(model=demo.model_path()), 32)
    ledger = saved_plan("ledger", skip=(6, 8), num_sublayers=32, anchors=((1.0,) + (0.0,) * 127,), radius=0.5)
    plans, found = tmp_path / "plans.json", tmp_path / "s.json"
    SavedPlans(model=model, plans=(saved_plan(skip=(5, 7), num_sublayers=32), ledger)).save(plans)
    arguments = [
        *("streams", "--model", "demo", "--dtype", "float32", "--num-threads", "1", "--context", "150", "--no-gate"),
        *("--max-tokens", "12", "--num-prompts", "3", "--repeats", "1", "--strategies", "self-sd,knn-ssd"),
        *("--input", "demo", "--input", "demo:ledger", "--ratios", "0,1", "--json", str(found)),
        *("--plans", f"self-sd={plans}", "--plans", f"knn-ssd={plans}"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    still, changing = json.loads(found.read_text(encoding="utf-8"))["workloads"]
    assert (still["mix_ratio"], changing["mix_ratio"]) == (0.0, 1.0)
    for workload in (still, changing):
        rows = {row["strategy"]: row for row in workload["results"]}
        assert list(rows) == ["ar", "self-sd", "knn-ssd"]
        assert all(row["identical"] == row["total"] == 3 for row in rows.values())
        assert [at for at, choice in enumerate(rows["self-sd"]["plans"][0]["choices"]) if choice == "skip"] == [5, 7]
