"""`rayspec selfcheck`: whether this machine computes right, not how fast."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from rayspec import demo
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF, describe_environment
from rayspec.bench.run import run_bench
from rayspec.config import DType, EngineConfig, SpeculationOptions
from rayspec.model.weights import resolve_device

# Some middle sublayers of the bundled models' 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)


def run_selfcheck(
    *, device: str, dtype: DType, num_threads: int | None, quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compare texts with drafts with those of plain decoding: in float32, where rounding cannot change the most likely
    token of these texts, also with transformers `generate`; in `dtype` with option `deterministic`.

    A check that raises has failed; the others still run. Returns JSON values, where "ok" says that no check failed.
    Raises ConfigError if the device does not exist.
    """
    options = {"device": device, "dtype": dtype, "num_threads": num_threads, "quick": quick}
    found: dict[str, Any] = {"ok": True, "options": options, "device": str(resolve_device(device))}
    found |= {"environment": describe_environment(), "load_average": os.getloadavg(), "checks": []}
    rounding: DType = "bfloat16" if dtype == "auto" else dtype
    exact: dict[str, Any] = {"dtype": "float32"}
    for name, kind in {
        "texts in float32": exact,
        "deterministic texts": {"dtype": rounding, "deterministic": True},
    }.items():
        started = time.perf_counter()
        try:
            engine = {"device": device, "num_threads": num_threads, **kind}
            numbers: Any = _compared(engine, hf=kind is exact, quick=quick)
            status = "passed" if all(row["identical"] == row["total"] for row in numbers) else "failed"
            told = "; ".join(_sentence(row) for row in numbers if row["strategy"] != BASELINE)
        except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
            status, told = "failed", f"the check raised {type(error).__name__}: {error}"
            numbers = {"traceback": traceback.format_exc()}
            say(numbers["traceback"])
        seconds = time.perf_counter() - started
        say(f"{name}: {status} ({seconds:.1f} s): {told}")
        found["checks"].append({"name": name, "seconds": seconds, "status": status, "found": told, "numbers": numbers})
        found["ok"] = found["ok"] and status == "passed"
        gc.collect()  # free the models of this check
    return found


def _compared(engine: dict[str, Any], *, hf: bool, quick: bool) -> list[dict[str, Any]]:
    """Return how many texts of each bundled model and strategy are those of plain decoding."""
    found = []
    for model in list(demo.BUNDLED)[: 1 if quick else None]:
        speculation = SpeculationOptions(strategy="static", skip=_SKIPPED)
        options = BenchOptions(
            engine=EngineConfig(model=model, speculation=speculation, **engine),
            context=(384,),
            num_prompts=1 if quick else 3,
            strategies=("static", "auto"),
            max_tokens=24 if quick else 48,
            repeats=1,
            hf=hf,
        )
        rows = run_bench(options, lambda line: None)["workloads"][0]["results"]
        found += [{"model": model} | {name: row[name] for name in ("strategy", "identical", "total")} for row in rows]
    return found


def _sentence(row: dict[str, Any]) -> str:
    writer = "transformers generate" if row["strategy"] == HF else row["strategy"]
    return f"{row['model']}, {writer}: {row['identical']} of {row['total']} texts are plain's"
