from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures.bench import SpeedUp, best_strategy, read_bench
from rayspec.types import ConfigError


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


def saved(folder: Path, content: object) -> Path:
    path = folder / "results.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_speed_ups_by_context_and_by_mix(tmp_path: Path) -> None:
    found = read_bench(saved(tmp_path, {"environment": {}, "options": {}, "workloads": WORKLOADS}))
    assert list(found.by_context) == ["ledger", "summary"]
    assert found.by_context["summary"] == (
        SpeedUp(strategy="knapspec", at=512, median=1.3, least=1.1, most=1.4),
        SpeedUp(strategy="knapspec", at=2048, median=1.5, least=1.2, most=1.6),
        SpeedUp(strategy="swift", at=512, median=1.05, least=1.0, most=1.1),
        SpeedUp(strategy="swift", at=2048, median=1.1, least=1.0, most=1.3),
    )
    assert [(one.at, one.median) for one in found.by_mix] == [(0.0, 1.35), (0.5, 1.25)]
    assert best_strategy(found.by_context["summary"]).at == 2048


@pytest.mark.parametrize("content", ["", "[1]", {"results": []}, {"workloads": [{"domain": "x"}]}, {"workloads": 3}])
def test_what_is_no_bench_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError, match=r"option 'bench' is .*results\.json.* not what `rayspec bench --output`"):
        read_bench(saved(tmp_path, content))
