"""The checks of `rayspec selfcheck`, and their run. Each tells whether this machine computes right, not how fast."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rayspec import demo
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF, save_json
from rayspec.bench.run import run_bench
from rayspec.bench.workloads import WorkloadOptions
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars
from rayspec.config import DType, EngineConfig, SpeculationOptions
from rayspec.model.weights import resolve_device

# Some middle sublayers of the bundled models' 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckOptions:
    """device: auto, cpu, cuda, cuda:1, ... dtype: compared in addition to float32. is_quick: fewer models."""

    device: str = "auto"
    dtype: DType = "bfloat16"
    num_threads: int | None = None
    is_quick: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises ConfigError if the device does not exist."""
        return resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "bfloat16" if self.dtype == "auto" else self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check. found: one or two sentences. numbers: JSON values for programs."""

    status: Literal["passed", "failed", "not here"]
    found: str
    numbers: Any = None


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)


Check = Callable[[SelfcheckOptions], Outcome]


def check_exact_texts(options: SelfcheckOptions) -> Outcome:
    """Compare texts with drafts, by plain decoding and of transformers `generate`, in float32, where rounding cannot
    change the most likely token of these texts."""
    return _compared(options, "float32", hf=True, deterministic=False)


def check_deterministic_texts(options: SelfcheckOptions) -> Outcome:
    """Compare texts with drafts and by plain decoding, in a type that rounds much, with `deterministic`."""
    dtype = str(options.torch_dtype).removeprefix("torch.")
    return _compared(options, dtype, hf=False, deterministic=True)


def _compared(options: SelfcheckOptions, dtype: DType | str, *, hf: bool, deterministic: bool) -> Outcome:
    found, numbers, num_wrong = [], [], 0
    for model in list(demo.BUNDLED)[: 1 if options.is_quick else None]:
        asked = BenchOptions(
            engine=EngineConfig(
                model=model,
                dtype=dtype,
                device=options.device,
                num_threads=options.num_threads,
                deterministic=deterministic,
                speculation=SpeculationOptions(strategy="static", skip=_SKIPPED),
            ),
            workloads=WorkloadOptions(inputs=("demo",), contexts=(384,), num_prompts=1 if options.is_quick else 3),
            strategies=("static", "auto"),
            max_tokens=24 if options.is_quick else 48,
            batch=1,
            repeats=1,
            widen=1,
            hf=hf,
        )
        for row in run_bench(asked, lambda line: None)["workloads"][0]["results"]:
            name, identical, total = row["strategy"], row["identical"], row["total"]
            numbers.append({"model": model, "strategy": name, "identical": identical, "total": total})
            num_wrong += total - identical
            if name != BASELINE:
                writer = "transformers generate" if name == HF else name
                found.append(f"{model}, {writer}: {identical} of {total} texts are plain's")
    return Outcome(status="failed" if num_wrong else "passed", found="; ".join(found), numbers=numbers)


CHECKS: Mapping[str, Check] = {
    "texts in float32": check_exact_texts,
    "deterministic texts": check_deterministic_texts,
}


def run_selfcheck(
    options: SelfcheckOptions, say: Callable[[str], None], *, checks: Mapping[str, Check] = CHECKS
) -> dict[str, tuple[Outcome, float]]:
    """Run all checks, one after another, and call `say` with each result. Return each outcome with its seconds. A check
    that fails or raises does not stop the others. Raises ConfigError if the device does not exist."""
    options.torch_device  # noqa: B018 - raises
    hide_progress_bars()
    before = torch.get_num_threads()
    torch.set_num_threads(options.num_threads or before)
    outcomes: dict[str, tuple[Outcome, float]] = {}
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            outcome = check(options)
        except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
            say(traceback.format_exc())
            found = f"the check raised {type(error).__name__}: {error}"
            outcome = Outcome(status="failed", found=found, numbers={"traceback": traceback.format_exc()})
        seconds = time.perf_counter() - started
        outcomes[name] = (outcome, seconds)
        say(f"{name}: {outcome.status} ({seconds:.1f} s): {outcome.found}")
        gc.collect()  # free the models of this check
    torch.set_num_threads(before)
    return outcomes


def save_outcomes(outcomes: Mapping[str, tuple[Outcome, float]], options: SelfcheckOptions, path: Path) -> None:
    """Save everything as JSON; "ok" says that no check failed."""
    found = {
        "ok": all(outcome.status != "failed" for outcome, _ in outcomes.values()),
        "options": asdict(options),
        "device": str(options.torch_device),
        "environment": describe_environment(),
        "load_average": os.getloadavg(),
        "checks": [
            {"name": name, "seconds": seconds} | {key: getattr(one, key) for key in ("status", "found", "numbers")}
            for name, (one, seconds) in outcomes.items()
        ],
    }
    save_json(found, path)
