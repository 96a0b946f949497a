"""`python -m benchmarks figures` as a user runs it, on the bundled model."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks.__main__ import app


def row(strategy: str, speedup: float, least: float, most: float) -> dict[str, Any]:
    spread = {"min": least, "median": speedup, "max": most}
    return {"strategy": strategy, "speedup_vs_ar": speedup, "speedup_spread": spread}


def workload(domain: str, context: int, *rows: dict[str, Any], mix_ratio: float | None = None) -> dict[str, Any]:
    return {"domain": domain, "context": context, "mix_ratio": mix_ratio, "results": [row("ar", 1, 1, 1), *rows]}


WORKLOADS = [
    workload("summary", 2048, row("knapspec", 1.5, 1.2, 1.6), row("swift", 1.1, 1.0, 1.3), row("hf", 0.5, 0.5, 0.5)),
    workload("summary", 512, row("knapspec", 1.3, 1.1, 1.4), row("swift", 1.05, 1.0, 1.1)),
    workload("ledger", 512, row("swift", 1.4, 1.3, 1.5)),
    workload("stream", 512, row("knapspec", 1.25, 1.2, 1.3), mix_ratio=0.5),
    workload("stream", 512, row("knapspec", 1.35, 1.3, 1.4), mix_ratio=0.0),
]

MODEL = ("--model", "demo", "--dtype", "float32", "--num-threads", "1")
SMALL = (
    *("--context", "150", "--contexts", "120,200", "--max-tokens", "24", "--num-prompts", "1", "--num-plans", "4"),
    *("--domains", "summary,ledger", "--draft-lengths", "3", "--thresholds", "0.9,0.2"),
    *("--intervals", "4", "--shares", "0.5"),
)


def test_one_command_makes_all_figures(tmp_path: Path) -> None:
    bench, out = tmp_path / "results.json", tmp_path / "new" / "out"
    bench.write_text(json.dumps({"workloads": WORKLOADS}), encoding="utf-8")
    result = CliRunner().invoke(app, ["figures", *MODEL, *SMALL, "--output", str(out), "--bench", str(bench)])
    assert result.exit_code == 0, result.output
    assert str(out / "figures.md") in result.output
    pictures = {path.name for path in out.iterdir()} - {"figures.md", "figures.json"}
    assert pictures == {
        "speedup-by-context.png",
        "speedup-by-mix.png",
        "tpt-throughput.png",
        "skip-ratio-by-context.png",
        "skip-distribution.png",
        "threshold-sweep.png",
        "interval-sweep.png",
    }
    text = (out / "figures.md").read_text(encoding="utf-8")
    for name in pictures:
        assert f"]({name})" in text
        with Image.open(out / name) as image:
            assert image.width == 1600
            assert image.height > 600
    numbers = json.loads((out / "figures.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    speedup = numbers["figures"]["speedup"]
    found = [(one["strategy"], one["at"], one["median"]) for one in speedup["by_context"]["summary"]]
    assert found == [("knapspec", 512, 1.3), ("knapspec", 2048, 1.5), ("swift", 512, 1.05), ("swift", 2048, 1.1)]
    assert [(one["at"], one["median"]) for one in speedup["by_mix"]] == [(0.0, 1.35), (0.5, 1.25)]
    assert list(numbers["figures"]) == ["speedup", "tpt", "skips", "thresholds", "intervals"]
    assert numbers["options"]["draft_lengths"] == [3]
    assert numbers["environment"]["threads"] == 1
    assert len(numbers["figures"]["tpt"]["points"]) == 4
    assert set(numbers["figures"]["tpt"]["correlations"]) >= {"tpt", "acceptance"}
    assert [one["value"] for one in numbers["figures"]["thresholds"]["thresholds"]["settings"]] == [0.2, 0.9]
    contexts = [one["context"] for one in numbers["figures"]["skips"]["by_context"]]
    assert contexts[0] <= 120 < contexts[1] <= 200
