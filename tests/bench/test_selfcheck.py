"""The self-check as a user runs it; and what its checks must find."""

import json
from pathlib import Path
from typing import Any

import pytest

from rayspec.model.row_counts import FIXED

COMMAND = ("selfcheck", "--device", "cpu", "--num-threads", "1", "--quick")


@pytest.mark.exhaustive
def test_a_quick_check_of_this_installation(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.decode.loading.independent_row_counts", lambda parts: FIXED)  # a test of its own
    result = run("--json", "out/c.json")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out" / "c.json").read_text(encoding="utf-8"))
    assert (saved["ok"], saved["device"]) == (True, "cpu")
    assert [check["status"] for check in saved["checks"]] == ["passed", "passed"]
    assert all(f"| {check['name']} | passed |" in result.stdout for check in saved["checks"])


def test_another_text_fails_and_a_broken_check_stops_no_other(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def run_bench(options: Any, say: object) -> dict[str, Any]:
        asked.append(options)
        if options.engine.deterministic:
            raise RuntimeError("no luck")
        found = {"ar": 3, "static": 3, "hf": 2}
        return {"workloads": [{"results": [{"strategy": k, "identical": n, "total": 3} for k, n in found.items()]}]}

    monkeypatch.setattr("rayspec.bench.run.run_bench", run_bench)
    result = run("--json", "c.json")
    assert result.exit_code == 1
    assert 'raise RuntimeError("no luck")' in result.stderr
    saved = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert not saved["ok"]
    exact, rounding = saved["checks"]
    assert (exact["status"], rounding["status"]) == ("failed", "failed")
    assert "demo, transformers generate: 2 of 3" in exact["found"]
    assert rounding["found"] == "the check raised RuntimeError: no luck"
    assert [(one.engine.dtype, one.hf) for one in asked] == [("float32", True), ("bfloat16", False)]
    assert asked[0].engine.speculation.skip
