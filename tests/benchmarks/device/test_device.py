"""`python -m benchmarks device` on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.device import bandwidth, step_times
from benchmarks.device.plan_switch import SwitchTimes, judge_switches, switch_times
from benchmarks.device.run import CHECKS
from rayspec.bench.selfcheck.models import random_model, split
from tests.graph_driver import RecordingDriver


def test_everything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and multiplied is smaller than caches, so that speeds mean nothing."""
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda device: 2**20)
    monkeypatch.setattr(bandwidth, "_LEAST_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(bandwidth, "_MAX_BYTES_QUICK", 2**20)
    monkeypatch.setattr(bandwidth, "_NUM_REPEATS", 1)
    monkeypatch.setattr(step_times, "_WIDER_QUICK", 2)
    arguments = ["device", "--device", "cpu", "--num-threads", "1", "--quick", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "selfcheck.json").read_text(encoding="utf-8"))
    status = {check["name"]: check["status"] for check in saved["checks"]}
    assert status == dict.fromkeys(CHECKS, "passed") | {"time to switch plans": "not here"}, "a CPU has no graphs"


@pytest.mark.parametrize("by_plan", [False, True], ids=["sublayers", "plans"])
def test_another_plan_is_timed(by_plan: bool) -> None:
    cpu = torch.device("cpu")
    parts = split(random_model("llama", torch.float32, cpu), "operators")
    times = switch_times(parts, by_plan=by_plan, driver_of=lambda _: RecordingDriver(), num_repeats=1)
    assert times.way == ("plans" if by_plan else "sublayers")
    assert min(times.same_s, times.other_s, times.eager_s) > 0


def test_a_slow_switch_fails() -> None:
    fast = SwitchTimes(way="sublayers", same_s=2e-3, other_s=1.9e-3, eager_s=3e-3)
    slow = SwitchTimes(way="plans", same_s=2e-3, other_s=2.2e-3, eager_s=3e-3)
    assert judge_switches([fast]).status == "passed"
    outcome = judge_switches([fast, slow])
    assert outcome.status == "failed"
    assert "0.200 ms at most (plans)" in outcome.found
