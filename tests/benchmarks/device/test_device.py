"""`python -m benchmarks device` on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.device import bandwidth, step_times
from benchmarks.device.run import CHECKS


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
    assert status == dict.fromkeys(CHECKS, "passed")
