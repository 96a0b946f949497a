from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from rayspec.service.bench_result import Sample, bench_row, bench_tables, save_bench
from rayspec.types import EngineStats, PlanRecord, no_draft


def sample(seconds: float, *outputs: list[int]) -> Sample:
    return Sample(seconds=seconds, prefill_s=1.0, token_ids=list(outputs))


SAMPLES = {
    "ar": [sample(10.0, [1] * 50, [2] * 50), sample(5.0, [1] * 50, [2] * 50), sample(4.0, [1] * 50, [2] * 50)],
    "knapspec": [sample(5.0, [1] * 50, [2] * 50), sample(4.0, [1] * 50, [3] * 50), sample(2.0, [1] * 50, [2] * 50)],
    "hf": [sample(20.0, [1] * 50, [2] * 50), sample(10.0, [1] * 50, [2] * 50), sample(8.0, [1] * 50, [2] * 50)],
}


def test_rates_are_medians_and_speed_ups_are_of_the_same_repeat() -> None:
    row = bench_row("knapspec", SAMPLES, EngineStats())
    assert row.tokens_per_s == pytest.approx(98 / 3.0)  # of 98 / 4, 98 / 3, 98 / 1: the prompts take 1 s
    assert row.spread == pytest.approx({"min": 24.5, "median": 98 / 3.0, "max": 98.0})
    assert row.speedup_vs_ar == pytest.approx(9 / 4)  # of 9 / 4, 4 / 3, 3 / 1
    assert row.speedup_vs_hf == pytest.approx(19 / 4)  # of 19 / 4, 9 / 3, 7 / 1
    assert row.end_to_end_tokens_per_s == 25.0
    assert row.end_to_end_speedup_vs_ar == 2.0  # of 2.0, 1.25, 2.0
    assert row.end_to_end_speedup_vs_hf == 4.0  # of 4.0, 2.5, 4.0


def test_the_baseline_is_its_own_measure() -> None:
    row = bench_row("ar", SAMPLES, EngineStats())
    assert (row.speedup_vs_ar, row.identical, row.total) == (1.0, 6, 6)


def test_outputs_that_differ_are_counted() -> None:
    row = bench_row("knapspec", SAMPLES, EngineStats())
    assert (row.identical, row.total) == (5, 6)


def test_without_transformers_there_is_no_speed_up_over_it() -> None:
    samples = {name: SAMPLES[name] for name in ("ar", "knapspec")}
    assert bench_row("knapspec", samples, EngineStats()).speedup_vs_hf is None


def test_shares_and_predictions_come_from_the_engine() -> None:
    plans = [
        PlanRecord(
            elapsed_s=0, context=1, batch=1, plan=no_draft(2, "t"), reason="", estimated_acceptance=0, optimise_s=0,
            plain_tpt=1, predicted_tpt=predicted, num_tokens=tokens, sequence_s=2.0,
        )
        for predicted, tokens in ((10.0, 100), (50.0, 100), (1000.0, 0))
    ]  # fmt: skip
    stats = EngineStats(
        num_rounds=10, num_draft_tokens=40, num_accepted_tokens=30, draft_s=1, verify_s=2, optimise_s=0.5, total_s=5,
        plans=plans,
    )  # fmt: skip
    row = bench_row("knapspec", SAMPLES, stats)
    assert (row.acceptance_rate, row.mean_accepted_length) == (0.75, 4.0)
    assert (row.draft_share, row.verify_share, row.optimise_share) == (0.2, 0.4, 0.1)
    assert row.predicted_tpt == pytest.approx(200 / 12)  # 10 s and 2 s, had the plans kept their promises
    assert row.measured_tpt == pytest.approx(200 / 6)


def test_the_result_is_saved_and_shown(tmp_path: Path) -> None:
    rng = random.Random(0)
    stats = EngineStats(total_s=rng.random())
    rows = [bench_row(name, SAMPLES, stats) for name in SAMPLES]
    result = {
        "environment": {"hardware": "a machine", "threads": 2},
        "options": {"engine": {"model": "m", "dtype": "float32"}, "widen": 8, "batch": 1, "repeats": 3},
        "prompt_tokens": [100, 90],
        "results": [{name: getattr(row, name) for name in row.__slots__} for row in rows],
    }
    save_bench(result, tmp_path / "new" / "b.json")
    assert json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8")) == result
    console = Console(width=220, record=True, file=(tmp_path / "out").open("w", encoding="utf-8"))
    console.print(bench_tables(result))
    shown = console.export_text()
    assert "2 prompts of 90 to 100 tokens" in shown
    assert "4.00x" in shown
