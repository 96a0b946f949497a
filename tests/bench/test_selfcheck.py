"""The self-check as a user runs it; and what its checks must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayspec.bench import selfcheck
from rayspec.bench.selfcheck import CHECKS, Outcome, SelfcheckOptions, check_exact_texts, not_here, run_selfcheck
from rayspec.cli import app

HERE = SelfcheckOptions(device="cpu", num_threads=1)


def passes(options: SelfcheckOptions) -> Outcome:
    return Outcome(status="passed", found="all is well")


def breaks(options: SelfcheckOptions) -> Outcome:
    raise RuntimeError("no luck")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["selfcheck", "--device", "cpu", "--num-threads", "1", *map(str, arguments)])


def test_a_quick_check_of_this_installation(tmp_path: Path) -> None:
    result = invoke("--quick", "--json", tmp_path / "out" / "c.json")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / "c.json").read_text(encoding="utf-8"))
    assert saved["ok"]
    assert saved["device"] == "cpu"
    status = {check["name"]: check["status"] for check in saved["checks"]}
    assert list(status) == list(CHECKS)
    assert status == dict.fromkeys(CHECKS, "passed")
    assert all(f"| {name} | {each} |" in result.stdout for name, each in status.items())


def test_a_check_that_breaks_fails_and_stops_no_other() -> None:
    said: list[str] = []
    three = {"first": breaks, "second": passes, "third": lambda options: not_here("no such thing")}
    outcomes = run_selfcheck(HERE, said.append, checks=three)
    assert [outcome.status for outcome, _ in outcomes.values()] == ["failed", "passed", "not here"]
    assert 'raise RuntimeError("no luck")' in said[0]
    assert "the check raised RuntimeError: no luck" in said[1]


def test_the_exit_code_says_whether_a_check_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for check, code in ((passes, 0), (breaks, 1)):
        monkeypatch.setattr(selfcheck, "CHECKS", {"only": check})
        result = invoke("--json", tmp_path / "c.json")
        assert result.exit_code == code, result.output
        assert json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["ok"] == (code == 0)


def test_a_device_that_there_is_not_is_a_clean_error() -> None:
    result = CliRunner().invoke(app, ["selfcheck", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "option 'device' is 'cuda:99'" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("identical", [3, 2])
def test_one_other_text_fails(monkeypatch: pytest.MonkeyPatch, identical: int) -> None:
    asked: list[Any] = []

    def run_bench(options: Any, say: object) -> dict[str, Any]:
        asked.append(options)
        same = {"ar": 3, "static": 3, "hf": identical}
        rows = [
            {"strategy": name, "identical": count, "total": 3, "acceptance_rate": None} for name, count in same.items()
        ]
        return {"workloads": [{"results": rows}]}

    monkeypatch.setattr(selfcheck, "run_bench", run_bench)
    outcome = check_exact_texts(HERE)
    assert outcome.status == ("passed" if identical == 3 else "failed")
    assert f"demo, transformers generate: {identical} of 3" in outcome.found
    assert asked[0].engine.dtype == "float32"
    assert asked[0].engine.speculation.skip
    assert asked[0].hf
