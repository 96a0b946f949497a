import json

import pytest

from benchmarks.pipeline import run_pipeline_bench
from benchmarks.pipeline_result import Case
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
