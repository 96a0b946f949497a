"""The self-check as a user runs it; and what its checks must find, on a driver that stands in for a GPU's graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from rayspec.bench.selfcheck import checks
from rayspec.bench.selfcheck.checks import (
    CHECKS,
    Difference,
    check_drafted_text,
    logit_differences,
    replay_differences,
    run_selfcheck,
)
from rayspec.bench.selfcheck.models import RANDOM_FAMILIES, Way, prepare, prepare_model, random_model, split
from rayspec.bench.selfcheck.report import Outcome, SelfcheckOptions, not_here
from rayspec.cli import app
from rayspec.model.attention import Rows
from rayspec.model.graphs import CapturedGraph, Work
from rayspec.model.sublayers import Body
from tests.graph_driver import RecordingDriver

CPU = torch.device("cpu")
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
    assert status == dict.fromkeys(CHECKS, "passed") | {"captured against eager": "not here"}, "a CPU has no graphs"
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
        monkeypatch.setattr(checks, "CHECKS", {"only": check})
        result = invoke("--json", tmp_path / "c.json")
        assert result.exit_code == code, result.output
        assert json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["ok"] == (code == 0)


def test_a_device_that_there_is_not_is_a_clean_error() -> None:
    result = CliRunner().invoke(app, ["selfcheck", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert "option 'device' is 'cuda:99'" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
@pytest.mark.parametrize(("way", "is_static"), [("fused", False), ("operators", False), ("operators", True)])
def test_fused_layers_compute_what_the_modules_do(family: str, way: Way, is_static: bool) -> None:
    reference = prepare_model(family, "modules", torch.float32, CPU, is_static=False)
    other = prepare_model(family, way, torch.float32, CPU, is_static=is_static)
    found = logit_differences(reference, other, what=family)
    assert [one.rows for one in found] == ["chunk", "later chunk", "single rows", "chain", "tree"]
    assert all(one.largest < 1e-4 for one in found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_layer_is_found(dtype: torch.dtype, error: float) -> None:
    reference = prepare_model("llama", "modules", dtype, CPU, is_static=False)
    parts = split(random_model("llama", dtype, CPU), "operators")
    *others, last = parts.sublayers
    assert last.body is not None
    wrong = replace(parts, sublayers=(*others, replace(last, body=_scaled(last.body, error))))
    found = logit_differences(reference, prepare(wrong, is_static=True), what="llama")
    assert not any(one.is_small for one in found), found


def _scaled(body: Body, error: float) -> Body:
    """Of the first half of the states, so that the final norm does not undo it."""

    def run(hidden: Tensor, rows: Rows) -> Tensor:
        out = body(hidden, rows)
        out[..., : out.shape[-1] // 2] *= 1 + 2 * error
        return out

    return run


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

    monkeypatch.setattr(checks, "run_bench", run_bench)
    outcome = check_drafted_text(HERE)
    assert outcome.status == ("passed" if identical == 3 else "failed")
    assert f"transformers generate: {identical} of 3" in outcome.found
    assert asked[0].engine.dtype == "float32"
    assert asked[0].engine.speculation.skip
    assert asked[0].hf


class _Mixed(RecordingDriver):
    """A graph of it is replayed in place of another."""

    def capture(self, work: Work) -> CapturedGraph:
        graph = super().capture(work)
        return self.graphs[-2] if len(self.graphs) == 6 else graph


def replayed(driver: RecordingDriver) -> list[Difference]:
    return list(replay_differences("llama", torch.float32, CPU, driver_of=lambda _: driver))


def test_replays_have_the_bits_of_eager_passes() -> None:
    found = replayed(RecordingDriver())
    assert len(found) == 3 * 3, "three kinds of passes by three plans"
    assert {one.largest for one in found} == {0.0}
    assert all(one.is_small for one in found)


def test_a_part_that_cannot_be_captured_and_a_wrong_graph_are_found() -> None:
    assert not all(one.is_small for one in replayed(RecordingDriver(refuses=lambda number: number == 5)))
    assert not all(one.is_small for one in replayed(_Mixed()))
