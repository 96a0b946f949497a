"""Benchmarks of what uses Ray: small measurements that run."""

import json
import os
from typing import Any

import pytest

from benchmarks.data import BARE, RAY_DATA, data_markdown, run_data_bench
from benchmarks.feed import FeedOptions, feed_markdown, run_feed_bench
from benchmarks.pipeline import run_pipeline_bench
from benchmarks.pipeline_result import Case
from rayspec.bench.options import BenchOptions
from rayspec.config import EngineConfig

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.usefixtures("ray_cluster")]

OPTIONS = BenchOptions(
    engine=EngineConfig(model="demo", dtype="float32", device="cpu", num_threads=1),
    context=(150,),
    strategies=("ar",),
    repeats=1,
)


def test_what_ray_data_costs_is_measured() -> None:
    said: list[str] = []
    result = json.loads(json.dumps(run_data_bench(OPTIONS.replace(num_prompts=12, max_tokens=4, batch=4), said.append)))
    bare, through = result["results"]
    assert (bare["way"], through["way"]) == (BARE, RAY_DATA)
    for row in (bare, through):
        assert (row["identical"], row["total"]) == (12, 12)
        assert 0 < row["first_row_s"] < row["seconds"]
    assert 0.1 < through["ratio"] < 2
    assert len(said) == 1 + 2 * 2
    assert data_markdown(result).count("12 of 12") == 2


def test_rows_pass_through_a_whole_job_and_every_process_is_counted() -> None:
    said: list[str] = []
    result: dict[str, Any] = run_feed_bench(FeedOptions(num_rows=2000, num_engines=2, row_s=0.05), said.append)
    assert said == ["2000 rows through 2 engines that take 0.05 s a row"]
    by_name = {row["process"]: row for row in result["results"]}
    assert by_name["EngineWorker"]["count"] in (1, 2), "the first may have done all rows before the second is up"
    assert by_name["driver"]["count"] == 1
    assert 0 < by_name["driver"]["busiest"] < 1.5 * (os.cpu_count() or 1)
    assert 1 < result["rows_per_s"] < 2 * 64 / 0.05
    assert "2000 rows of 200 words through 2 engines" in feed_markdown(result)


def test_a_real_pipeline_is_measured() -> None:
    said: list[str] = []
    result = run_pipeline_bench(OPTIONS.replace(num_prompts=2, max_tokens=24), [Case(stages=2, cohorts=2)], said.append)
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
