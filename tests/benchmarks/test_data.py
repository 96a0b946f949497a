"""What Ray Data costs: a small measurement that runs."""

import json

import pytest

from benchmarks.data import BARE, RAY_DATA, data_markdown, run_data_bench
from rayspec.bench.options import BenchOptions
from rayspec.config import EngineConfig

OPTIONS = BenchOptions(
    engine=EngineConfig(model="demo", dtype="float32", device="cpu", num_threads=1),
    context=(150,),
    num_prompts=12,
    strategies=("ar",),
    max_tokens=4,
    batch=4,
    repeats=1,
)


@pytest.mark.ray
@pytest.mark.exhaustive
def test_a_real_one_is_measured(ray_cluster: None) -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run_data_bench(OPTIONS, said.append)))
    bare, through = result["results"]
    assert (bare["way"], through["way"]) == (BARE, RAY_DATA)
    for row in (bare, through):
        assert (row["identical"], row["total"]) == (12, 12)
        assert 0 < row["first_row_s"] < row["seconds"]
    assert 0.1 < through["ratio"] < 2
    assert len(said) == 1 + 2 * 2
    assert data_markdown(result).count("12 of 12") == 2
