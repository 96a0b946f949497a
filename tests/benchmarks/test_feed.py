import os
from typing import Any

import pytest

from benchmarks.feed import FeedOptions, feed_markdown, run_feed_bench

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.usefixtures("ray_cluster")]


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
