"""Results for people, from made-up rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from rayspec.bench.report import bench_markdown, bench_tables, save_report
from rayspec.bench.result import bench_row
from rayspec.types import EngineStats
from tests.bench.test_result import SAMPLES


def workload(name: str, strategies: tuple[str, ...], **changes: Any) -> dict[str, Any]:
    rows = [asdict(bench_row(strategy, SAMPLES, EngineStats())) for strategy in strategies]
    found = {
        "name": name,
        "domain": "summary",
        "context": 100,
        "mix_ratio": None,
        "num_left_out": 0,
        "prompt_tokens": [100, 90],
        "results": rows,
    }
    return found | changes


RESULT = {
    "environment": {
        "hardware": "a machine",
        "threads": 2,
        "commit": "abc",
        "command": "rayspec bench",
        "date": "2026-01-02",
    },
    "options": {
        "engine": {"model": "m", "dtype": "float32"},
        "widen": 8,
        "batch": 1,
        "max_tokens": 50,
        "repeats": 3,
    },
    "workloads": [
        workload("summary-100", ("ar", "knapspec", "hf")),
        workload("mix-1-100", ("ar", "knapspec", "hf"), mix_ratio=1.0, domain="summary+qa", num_left_out=3),
    ],
}


def test_the_terminal_has_tables_for_each_workload(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w", encoding="utf-8"))
    console.print(bench_tables(RESULT))
    shown = console.export_text()
    assert "m made 8 times as wide in float32 on a machine, 2 threads, batch 1, 50 output tokens, 3 repeats" in shown
    assert "summary-100: 2 prompts of 90 to 100 tokens" in shown
    assert "mix-1-100: 2 prompts of summary+qa of 90 to 100 tokens, 3 longer ones left out" in shown
    assert shown.count("24.5 to 98.0") == 2
    assert "4.75x" in shown
    assert "…" not in shown


def test_the_page_has_all_speed_ups_in_one_table_and_the_best_in_bold() -> None:
    lines = bench_markdown(RESULT).splitlines()
    assert "| strategy | summary-100 | mix-1-100 |" in lines
    assert "| ar | 1.00x (1.00 to 1.00) | 1.00x (1.00 to 1.00) |" in lines
    assert "| knapspec | **2.25x** (1.33 to 3.00) | **2.25x** (1.33 to 3.00) |" in lines
    assert "`rayspec bench`" in lines
    assert any("a machine" in line and "Commit abc, 2026-01-02" in line for line in lines)
    tables = [line for line in lines if line.startswith("| ")]
    assert {line.count("|") for line in tables} == {4, 11, 10}


def test_both_files_are_written_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    save_report({**RESULT, "workloads": RESULT["workloads"][:1]}, folder)
    save_report(RESULT, folder)
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == RESULT
    assert "## mix-1-100" in (folder / "results.md").read_text(encoding="utf-8")
