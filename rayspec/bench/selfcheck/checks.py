"""The checks of `rayspec selfcheck`, and their run. Each tells whether this machine computes right, not how fast."""

from __future__ import annotations

import gc
import itertools
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF, save_json
from rayspec.bench.run import run_bench
from rayspec.bench.selfcheck.models import (
    BUNDLED,
    CHUNKS,
    RANDOM_FAMILIES,
    ROUNDS,
    Prepared,
    Way,
    logits_of,
    prepare,
    prepare_model,
)
from rayspec.bench.selfcheck.report import Outcome, SelfcheckOptions, not_here
from rayspec.bench.workloads import WorkloadOptions
from rayspec.choices import choices_of
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars
from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.model.cuda.graphs import CudaDriver
from rayspec.model.graphs import GraphDriver, StepGraphs, is_capturable

# Relative to the largest logit. In half precision each of some ten sublayers rounds its sum in another order.
_LOGITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
# Some middle sublayers of the bundled model's 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)

Check = Callable[[SelfcheckOptions], Outcome]
DriverOf = Callable[[torch.device], GraphDriver]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two results that should be equal. largest: their largest difference, relative to the largest expected number."""

    what: str
    rows: str
    largest: float
    allowed: float

    @classmethod
    def of(cls, what: str, rows: str, expected: Tensor, found: Tensor, *, allowed: float) -> Difference:
        expected = expected.float()
        largest = float((expected - found.float()).abs().max() / expected.abs().max())
        return cls(what=what, rows=rows, largest=largest, allowed=allowed)

    @property
    def is_small(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.largest <= self.allowed


def check_parity(options: SelfcheckOptions) -> Outcome:
    """Compare the logits of all ways to run a model's sublayers with those of transformers' modules."""
    names = ["llama", "qwen3"] if options.is_quick else [BUNDLED, *RANDOM_FAMILIES]
    device, found = options.torch_device, list[Difference]()
    ways: Sequence[tuple[Way, bool]] = (("fused", False), ("operators", True))
    for dtype, name, (way, is_static) in itertools.product(_dtypes(options), names, ways):
        reference = prepare_model(name, "modules", dtype, device, is_static=False)
        other = prepare_model(name, way, dtype, device, is_static=is_static)
        found += logit_differences(reference, other, what=f"{name}, {_name(dtype)}, {way}")
    return _judged(found)


def logit_differences(reference: Prepared, other: Prepared, *, what: str) -> list[Difference]:
    """Run the same passes by both, each in its own KV cache, and compare the logits."""
    allowed = _LOGITS[reference.parts.dtype]
    return [
        Difference.of(what, shape.name, logits_of(reference, shape), logits_of(other, shape), allowed=allowed)
        for shape in (*CHUNKS, *ROUNDS)
    ]


def check_drafted_text(options: SelfcheckOptions) -> Outcome:
    """Compare texts in float32, where rounding cannot change the most likely token of these texts."""
    engine = EngineConfig(
        model="demo",
        dtype="float32",
        device=options.device,
        num_threads=1,  # with matrices this small a second thread is slower
        speculation=SpeculationOptions(strategy="static", skip=_SKIPPED),
    )
    asked = BenchOptions(
        engine=engine,
        workloads=WorkloadOptions(inputs=("demo",), contexts=(384,), num_prompts=1 if options.is_quick else 3),
        strategies=("static", "auto"),
        max_tokens=24 if options.is_quick else 48,
        batch=1,
        repeats=1,
        widen=1,
        hf=True,
    )
    rows = run_bench(asked, lambda line: None)["workloads"][0]["results"]
    names = {HF: "transformers generate"}
    return Outcome(
        status="passed" if all(row["identical"] == row["total"] for row in rows) else "failed",
        found="; ".join(
            f"{names.get(row['strategy'], row['strategy'])}: {row['identical']} of {row['total']} texts are plain's"
            for row in rows
            if row["strategy"] != BASELINE
        ),
        numbers=[{key: row[key] for key in ("strategy", "identical", "total", "acceptance_rate")} for row in rows],
    )


def check_captured_against_eager(options: SelfcheckOptions) -> Outcome:
    """Compare the logits of captured graphs with those of eager launches: they must have the same bits."""
    device = options.torch_device
    if device.type != "cuda":
        return not_here(f"{device} has no graphs")
    names = ["llama"] if options.is_quick else ["llama", "gemma2", BUNDLED]
    found = [
        one for name in names for one in replay_differences(name, options.torch_dtype, device, driver_of=CudaDriver)
    ]
    return _judged(found)


def replay_differences(
    name: str, dtype: torch.dtype, device: torch.device, *, driver_of: DriverOf
) -> Iterator[Difference]:
    """Run passes eagerly and captured, each in its own KV cache, and compare the logits of three plans."""
    eager = prepare_model(name, "operators", dtype, device, is_static=True)
    parts = eager.parts
    captured = prepare(parts, is_static=True, capture=lambda step: StepGraphs(step, driver_of(parts.device)))
    graphs, count = captured.runner.graphs, len(parts.sublayers)
    assert graphs is not None
    assert all(map(is_capturable, parts.sublayers)), "these models have no experts"
    # Of a bucket of which every part is captured: the rotary embedding, the embedding and the sublayers.
    num_graphs = 2 + count
    plans = {
        "full": None,
        "every third skipped": choices_of([index % 3 > 0 for index in range(count)]),
        "all but the ends skipped": choices_of([index in (0, count - 1) for index in range(count)]),
    }
    for shape in CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    for shape in ROUNDS:
        for plan, choices in plans.items():
            expected = logits_of(eager, shape, choices)
            replayed = [logits_of(captured, shape, choices) for _ in range(3)][-1]  # the second one captures its bucket
            what = f"{name}, {plan}"
            if len(graphs.buckets) * num_graphs != graphs.num_graphs:
                yield Difference(what=what, rows=shape.name, largest=math.inf, allowed=0.0)
            else:
                yield Difference.of(what, shape.name, expected, replayed, allowed=0.0)


CHECKS: Mapping[str, Check] = {
    "logits of fused layers": check_parity,
    "drafted text against plain": check_drafted_text,
    "captured against eager": check_captured_against_eager,
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


def _judged(found: Sequence[Difference]) -> Outcome:
    worst = max(found, key=lambda one: (not one.is_small, one.largest / (one.allowed or 1)))
    num_large = sum(not one.is_small for one in found)
    return Outcome(
        status="failed" if num_large else "passed",
        found=f"{num_large} of {len(found)} differ by more than rounding; the largest difference is "
        f"{worst.largest:.1e} ({worst.what}{f', {worst.rows}' if worst.rows else ''})",
        numbers=[asdict(one) | {"is_small": one.is_small} for one in found],
    )


def _dtypes(options: SelfcheckOptions) -> list[torch.dtype]:
    return list(dict.fromkeys([torch.float32, options.torch_dtype]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
