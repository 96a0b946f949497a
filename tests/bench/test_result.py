"""The arithmetic on made-up samples, and the page for people."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rayspec.bench import result
from rayspec.bench.result import Sample, bench_markdown, bench_row, markdown_table
from rayspec.types import EngineStats


def sample(seconds: float, *last: int) -> Sample:
    """Two outputs of 50 tokens; those of the second are `last`."""
    texts = [[1] * 50, [*last, 2][:1] * 50]
    return Sample(token_ids=texts, seconds=seconds, prefill_s=1.0)


SAMPLES = {
    "ar": [sample(10.0), sample(5.0), sample(4.0)],
    "knapspec": [sample(5.0), sample(4.0, 3), sample(2.0)],
    "hf": [sample(20.0), sample(10.0), sample(8.0)],
}


def test_rates_are_medians_and_speed_ups_are_of_the_same_repeat() -> None:
    row = bench_row("knapspec", SAMPLES, EngineStats())
    assert row["tokens_per_s"] == pytest.approx(98 / 3.0)  # of 98 / 4, 98 / 3, 98 / 1: the prompts take 1 s
    assert row["spread"] == pytest.approx({"min": 24.5, "median": 98 / 3.0, "max": 98.0})
    assert row["speedup_vs_ar"] == pytest.approx(9 / 4)  # of 9 / 4, 4 / 3, 3 / 1
    assert row["speedup_spread"] == pytest.approx({"min": 4 / 3, "median": 9 / 4, "max": 3.0})
    assert row["speedup_vs_hf"] == pytest.approx(19 / 4)  # of 19 / 4, 9 / 3, 7 / 1
    assert row["end_to_end_tokens_per_s"] == 25.0
    assert row["end_to_end_speedup_vs_ar"] == 2.0  # of 2.0, 1.25, 2.0
    assert row["end_to_end_speedup_vs_hf"] == 4.0  # of 4.0, 2.5, 4.0
    assert (row["identical"], row["total"]) == (5, 6)


def workload(name: str, **changes: Any) -> dict[str, Any]:
    rows = [bench_row(strategy, SAMPLES, EngineStats()) for strategy in SAMPLES]
    found = {"name": name, "domain": "summary", "num_left_out": 0, "prompt_tokens": [100, 90]}
    return found | {"results": rows} | changes


def test_the_page_has_all_speed_ups_in_one_table_and_the_best_in_bold() -> None:
    environment = {"hardware": "a machine", "threads": 2, "commit": "abc", "command": "rayspec bench", "date": "today"}
    options = {"engine": {"model": "m", "dtype": "auto"}, "widen": 8, "batch": 1, "max_tokens": 50, "repeats": 3}
    mixed = workload("mix-1-100", num_left_out=3)
    single = workload("one-100", prompt_tokens=[100])
    result = {"environment": environment, "dtype": "float32", "options": options}
    lines = bench_markdown(result | {"workloads": [workload("summary-100"), mixed]}).splitlines()
    assert "`rayspec bench`" in lines
    where = "m made 8 times as wide in float32 on a machine, 2 threads, batch 1, 50 output tokens, 3 repeats."
    assert f"{where} Commit abc, today." in lines, "the data type that was used, not the option's auto"
    assert "| strategy | summary-100 | mix-1-100 |" in lines
    assert "| ar | 1.00x (1.00 to 1.00) | 1.00x (1.00 to 1.00) |" in lines
    assert "| knapspec | **2.25x** (1.33 to 3.00) | **2.25x** (1.33 to 3.00) |" in lines
    assert "2 prompts of 90 to 100 tokens." in lines
    assert "2 prompts of 90 to 100 tokens, 3 longer ones left out." in lines
    assert "1 prompt of 100 tokens." in bench_markdown(result | {"workloads": [single]}).splitlines()
    tables = [line for line in lines if line.startswith("| ")]
    assert {line.count("|") for line in tables} == {4, 12}


def test_a_cell_with_a_bar_is_one_cell() -> None:
    assert markdown_table(["a", "b"], [["x | y", "1"]], num_left=1) == "| a | b |\n| --- | ---: |\n| x \\| y | 1 |"


def test_the_commit_is_not_that_of_a_repository_with_an_environment_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    (installed := tmp_path / "result.py").touch()
    monkeypatch.setattr(result, "__file__", str(installed))
    assert result._commit() is None
    subprocess.run(["git", "-C", str(tmp_path), "add", "result.py"], check=True)
    assert str(result._commit()).endswith("+")
