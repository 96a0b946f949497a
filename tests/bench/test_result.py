"""The arithmetic on made-up samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rayspec.bench.result import Cost, Run, Sample, bench_row, save_bench, total_cost
from rayspec.choices import FULL, SKIP
from rayspec.types import EngineStats, Plan, PlanRecord, no_draft


def sample(seconds: float, *outputs: list[int], cpu_s: float | None = None) -> Sample:
    cost = None
    if cpu_s is not None:
        cost = Cost(wall_s=seconds, cpu_s=cpu_s, waited_s=cpu_s / 3, gpu_s=None)
    run = Run(seconds=seconds, prefill_s=1.0, prefill_cpu_s=0.5, token_ids=list(outputs))
    return Sample(run=run, cost=cost)


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
    assert row.speedup_spread == pytest.approx({"min": 4 / 3, "median": 9 / 4, "max": 3.0})
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
    row = bench_row("knapspec", samples, EngineStats())
    assert (row.speedup_vs_hf, row.end_to_end_speedup_vs_hf) == (None, None)


def test_costs_of_pieces_add_up() -> None:
    known = Cost(wall_s=2.0, cpu_s=3.0, waited_s=0.5, gpu_s=1.0)
    assert total_cost([]) is None
    assert total_cost([known, known]) == Cost(wall_s=4.0, cpu_s=6.0, waited_s=1.0, gpu_s=2.0)
    partly = total_cost([known, replace(known, waited_s=None, gpu_s=None)])
    assert partly == Cost(wall_s=4.0, cpu_s=6.0, waited_s=None, gpu_s=None)


def test_cpu_time_is_that_of_decoding() -> None:
    samples = {
        "ar": [sample(10.0, [1] * 50, [2] * 50, cpu_s=4.5), sample(10.0, [1] * 50, [2] * 50, cpu_s=8.5)],
        "clasp": [sample(10.0, [1] * 50, [2] * 50, cpu_s=2.5), sample(10.0, [1] * 50, [2] * 50, cpu_s=2.5)],
    }
    row = bench_row("clasp", samples, EngineStats())
    assert row.tokens_per_cpu_s == pytest.approx(49.0)  # 98 / 2, the prompts take 0.5 s
    assert row.cpu_speedup_vs_ar == pytest.approx(3.0)  # of 2 and 4
    assert row.quiet_share == pytest.approx(0.75)


def test_what_ran_in_other_processes_has_no_cpu_time() -> None:
    row = bench_row("knapspec", SAMPLES, EngineStats())
    assert (row.tokens_per_cpu_s, row.cpu_speedup_vs_ar, row.quiet_share, row.gpu_s) == (None, None, None, None)


def test_quiet_is_what_had_a_core() -> None:
    cost = Cost(wall_s=9.0, cpu_s=3.0, waited_s=1.0, gpu_s=None)
    assert cost.quiet_share == 0.75
    assert replace(cost, waited_s=None).quiet_share is None


def plan_record(plan: Plan, *, predicted_tpt: float, num_tokens: int) -> PlanRecord:
    return PlanRecord(
        elapsed_s=0, context=300, batch=1, plan=plan, reason="", estimated_acceptance=0.9, optimise_s=0,
        plain_tpt=1, predicted_tpt=predicted_tpt, num_tokens=num_tokens, sequence_s=2.0, num_accepted_tokens=3,
        num_tested_tokens=4,
    )  # fmt: skip


def test_shares_and_predictions_come_from_the_engine() -> None:
    expected = ((10.0, 100), (50.0, 100), (1000.0, 0))
    plans = [plan_record(no_draft(2, "t"), predicted_tpt=tpt, num_tokens=tokens) for tpt, tokens in expected]
    stats = EngineStats(
        num_rounds=10, num_draft_tokens=40, num_accepted_tokens=30, draft_s=1, verify_s=2, optimise_s=0.5, total_s=5,
        plans=plans,
    )  # fmt: skip
    row = bench_row("knapspec", SAMPLES, stats)
    assert (row.acceptance_rate, row.mean_accepted_length) == (0.75, 4.0)
    assert (row.draft_share, row.verify_share, row.optimise_share) == (0.2, 0.4, 0.1)
    assert row.predicted_tpt == pytest.approx(200 / 12)  # 10 s and 2 s, had the plans kept their promises
    assert row.measured_tpt == pytest.approx(200 / 6)


def test_plans_are_told_with_what_came_of_them() -> None:
    plan = Plan(choices=(FULL, SKIP, FULL), num_draft_tokens=5, source="t", num_lookup_tokens=2)
    row = bench_row("ar", SAMPLES, EngineStats(plans=[plan_record(plan, predicted_tpt=70.0, num_tokens=90)]))
    assert row.plans == [
        {
            "context": 300,
            "choices": ["full", "skip", "full"],
            "num_draft_tokens": 5,
            "num_lookup_tokens": 2,
            "predicted_tpt": 70.0,
            "measured_tpt": 45.0,
            "estimated_acceptance": 0.9,
            "observed_acceptance": 0.75,
            "num_tokens": 90,
        }
    ]


def test_the_result_is_saved(tmp_path: Path) -> None:
    save_bench({"a": [1, None]}, tmp_path / "new" / "b.json")
    assert json.loads((tmp_path / "new" / "b.json").read_text(encoding="utf-8")) == {"a": [1, None]}
