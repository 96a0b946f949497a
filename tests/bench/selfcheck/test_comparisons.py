from __future__ import annotations

from typing import Any

import pytest

from rayspec.bench.selfcheck import comparisons
from rayspec.bench.selfcheck.comparisons import check_drafted_text
from rayspec.bench.selfcheck.options import SelfcheckOptions


@pytest.mark.parametrize(("identical", "status"), [(3, "passed"), (2, "failed")])
def test_one_other_text_fails(monkeypatch: pytest.MonkeyPatch, identical: int, status: str) -> None:
    def row(name: str, same: int) -> dict[str, Any]:
        return {"strategy": name, "identical": same, "total": 3, "acceptance_rate": None}

    asked: list[Any] = []

    def run_bench(options: Any, say: object) -> dict[str, Any]:
        asked.append(options)
        return {"workloads": [{"results": [row("ar", 3), row("static", 3), row("hf", identical)]}]}

    monkeypatch.setattr(comparisons, "run_bench", run_bench)
    outcome = check_drafted_text(SelfcheckOptions(device="cpu", dtype="bfloat16"))
    assert outcome.status == status
    assert f"transformers generate: {identical} of 3" in outcome.found
    assert asked[0].engine.dtype == "float32"
    assert asked[0].engine.speculation.skip
    assert asked[0].hf
