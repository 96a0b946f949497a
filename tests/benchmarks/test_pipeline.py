from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.pipeline import run_pipeline_bench
from benchmarks.pipeline_result import Case, HopTimes, PipelineRun, TimedPart, pipeline_rows
from rayspec.bench.options import BenchOptions
from rayspec.config import EngineConfig

OPTIONS = BenchOptions(
    engine=EngineConfig(model="demo", dtype="float32", device="cpu"),
    context=(150,),
    num_prompts=2,
    strategies=("ar",),
    max_tokens=24,
    repeats=1,
)


def part(seconds: float, tokens: str, *, rounds: float = 10, **changes: Any) -> TimedPart:
    return TimedPart(
        seconds=seconds, num_tokens=100, num_rounds=rounds, token_ids=tuple((ord(one),) for one in tokens), **changes
    )


TWO = Case(stages=2, cohorts=3)
RUNS = [
    PipelineRun(case=None, strategy="ar", samples=(part(2.0, "ab"),)),
    PipelineRun(
        case=TWO,
        strategy="ar",
        layers=(3, 5),
        samples=(
            part(1.0, "ab", busy_s=(0.2, 0.5), num_passes=(12, 18)),
            part(3.0, "ac", busy_s=(0.2, 1.5), num_passes=(12, 18)),
        ),
    ),
    PipelineRun(case=None, strategy="ar", samples=(part(4.0, "ab"),)),
]
HOPS = [
    HopTimes(case="2x3", link=link, p50_s=p50_s, p99_s=0.5, num_samples=9) for link, p50_s in (("x", 0.01), ("y", 0.03))
]


def test_a_round_s_time_is_split_into_stages_hops_and_the_rest() -> None:
    one, two = pipeline_rows(RUNS, HOPS)
    assert (one.case, one.round_ms, one.rest_ms) == ("one process", pytest.approx(300), None)
    assert two.case == "2x3"
    assert two.round_ms == pytest.approx(600)  # 20 rounds in 4 s, while two other cohorts have theirs
    assert two.busy_ms == pytest.approx((20, 100))
    assert two.num_hops == pytest.approx(2)  # 60 passes, of which 20 came from the engine
    assert two.hops_ms == pytest.approx(40)
    assert two.rest_ms == pytest.approx(440)
    assert two.idle_shares == pytest.approx((0.9, 0.5))
    assert two.passes == pytest.approx((1.2, 1.8))
    assert two.layers == (3, 5)


@pytest.mark.exhaustive
@pytest.mark.ray
def test_a_real_pipeline_is_measured(ray_cluster: None) -> None:
    said: list[str] = []
    result = run_pipeline_bench(OPTIONS, [Case(stages=2, cohorts=2)], said.append)
    assert json.loads(json.dumps(result))["options"]["cases"] == ["2x2"]
    one, two = result["results"]
    assert (one["case"], two["case"]) == ("one process", "2x2")
    assert (one["identical"], two["identical"]) == (one["total"], two["total"]) == (4, 2)
    assert sum(two["layers"]) == 16
    assert two["passes"] == pytest.approx((1, 1), abs=0.2)  # plain decoding; what is in flight at the ends counts half
    assert two["num_hops"] == pytest.approx(1, abs=0.4)
    assert all(0 < share < 1 for share in two["idle_shares"])
    assert two["tokens_per_s"] > 0
    assert [one["link"] for one in result["hops"]] == ["0 and 1", "1 and 0"]
    assert all(1e-5 < one["p50_s"] <= one["p99_s"] < 0.1 for one in result["hops"])


@pytest.mark.parametrize(
    ("flags", "remedy"), [(["--cases", "two"], "1x1,2x1,2x4"), (["--strategies", "knapspac"], "'knapspec'")]
)
def test_the_command_refuses_what_it_cannot_do(flags: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["pipeline", "--model", "demo", *flags])
    assert result.exit_code == 2
    assert remedy in result.stderr
