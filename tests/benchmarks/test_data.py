"""What Ray Data costs: the arithmetic on made-up samples, and a small measurement that runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.data import BARE, RAY_DATA, DataSample, data_markdown, data_rows, run_data_bench
from rayspec.bench.options import BenchOptions
from rayspec.config import EngineConfig


def sample(seconds: float, first_row_s: float, texts: str) -> DataSample:
    by_id = {str(number): text for number, text in enumerate(texts)}
    return DataSample(seconds=seconds, first_row_s=first_row_s, num_tokens=100, texts=by_id)


SAMPLES = {
    BARE: [sample(1.0, 0.1, "ab"), sample(2.0, 0.2, "ab"), sample(4.0, 0.3, "ab")],
    RAY_DATA: [sample(2.0, 1.0, "ab"), sample(2.0, 3.0, "ax"), sample(5.0, 1.5, "ab")],
}


def test_ratios_are_of_the_same_repeat() -> None:
    bare, through = data_rows(SAMPLES)
    assert (bare.tokens_per_s, bare.ratio, bare.min_ratio, bare.max_ratio) == (50, 1, 1, 1)
    assert (through.min_tokens_per_s, through.tokens_per_s, through.max_tokens_per_s) == (20, 50, 50)
    assert (through.min_ratio, through.ratio, through.max_ratio) == (0.5, 0.8, 1)
    assert (through.seconds, through.first_row_s) == (2.0, 1.5)


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
