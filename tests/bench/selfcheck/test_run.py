"""The command as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayspec.bench.selfcheck import run
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, not_here
from rayspec.bench.selfcheck.run import CHECKS, run_selfcheck
from rayspec.cli import app


def passes(options: SelfcheckOptions) -> Outcome:
    return Outcome(status="passed", found="all is well")


def breaks(options: SelfcheckOptions) -> Outcome:
    raise RuntimeError("no luck")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["selfcheck", "--device", "cpu", "--num-threads", "1", *map(str, arguments)])


def test_a_quick_check_of_this_installation(tmp_path: Path) -> None:
    result = invoke("--quick", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / "selfcheck.json").read_text(encoding="utf-8"))
    assert saved["ok"]
    assert saved["device"] == "cpu"
    status = {check["name"]: check["status"] for check in saved["checks"]}
    assert list(status) == list(CHECKS)
    absent = {"kernels against plain torch", "captured against eager", "time to switch plans"}
    assert {name for name, each in status.items() if each == "not here"} == absent
    assert {name for name, each in status.items() if each == "passed"} == set(CHECKS) - absent
    page = (tmp_path / "out" / "selfcheck.md").read_text(encoding="utf-8")
    assert page in result.stdout
    assert all(f"## {name}: " in page for name in CHECKS)


def test_a_check_that_breaks_fails_and_stops_no_other() -> None:
    checks = {"first": breaks, "second": passes, "third": lambda options: not_here("no such thing")}
    said: list[str] = []
    report = run_selfcheck(SelfcheckOptions(device="cpu", num_threads=1), said.append, checks=checks)
    assert [one.outcome.status for one in report.outcomes] == ["failed", "passed", "not here"]
    assert report.has_failed
    assert report.summary == "1 failed, 1 passed, 1 not here"
    assert "RuntimeError: no luck" in said[0]
    assert 'raise RuntimeError("no luck")' in report.as_markdown()


def test_the_exit_code_says_whether_a_check_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for check, code in ((passes, 0), (breaks, 1)):
        monkeypatch.setattr(run, "CHECKS", {"only": check})
        result = invoke("--out", tmp_path)
        assert result.exit_code == code, result.output
        assert json.loads((tmp_path / "selfcheck.json").read_text(encoding="utf-8"))["ok"] == (code == 0)


def test_a_device_that_there_is_not_is_a_clean_error() -> None:
    result = CliRunner().invoke(app, ["selfcheck", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "option 'device' is 'cuda:99'" in result.stderr
    assert "Traceback" not in result.output
