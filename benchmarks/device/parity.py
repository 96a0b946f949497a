"""Compare logits: of fused layers with those of transformers' modules, of captured graphs with eager launches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.device.models import (
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
from benchmarks.shared import DeviceOptions, Outcome, not_here
from rayspec.choices import choices_of
from rayspec.model.cuda.graphs import CudaDriver
from rayspec.model.graphs import GraphDriver, StepGraphs, is_capturable

# Relative to the largest logit. In half precision each of some ten sublayers rounds its sum in another order.
_NUM_PASSES = 10  # after so many, any plan is captured and replayed
_LOGITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
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


def check_parity(options: DeviceOptions) -> Outcome:
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


def check_captured_against_eager(options: DeviceOptions) -> Outcome:
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
    captured = prepare(parts, is_static=True, capture=partial(StepGraphs, driver=driver_of(parts.device)))
    graphs, count = captured.runner.graphs, len(parts.sublayers)
    assert graphs is not None
    assert all(map(is_capturable, parts.sublayers)), "these models have no experts"
    plans = {
        "full": None,
        "every third skipped": choices_of([index % 3 > 0 for index in range(count)]),
        "all but the ends skipped": choices_of([index in (0, count - 1) for index in range(count)]),
    }
    for shape in CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    num_graphs = graphs.num_graphs
    for shape in ROUNDS:
        for plan, choices in plans.items():
            expected = logits_of(eager, shape, choices)
            replayed = [logits_of(captured, shape, choices) for _ in range(_NUM_PASSES)][-1]
            what = f"{name}, {plan}"
            # The first pass of a bucket is captured with its rotary embedding and its embedding.
            num_graphs += 3 if choices is None else 1
            if graphs.num_graphs != num_graphs:
                yield Difference(what=what, rows=shape.name, largest=math.inf, allowed=0.0)
            else:
                yield Difference.of(what, shape.name, expected, replayed, allowed=0.0)


def _judged(found: Sequence[Difference]) -> Outcome:
    worst = max(found, key=lambda one: (not one.is_small, one.largest / (one.allowed or 1)))
    num_large = sum(not one.is_small for one in found)
    return Outcome(
        status="failed" if num_large else "passed",
        found=f"{num_large} of {len(found)} differ by more than rounding; the largest difference is "
        f"{worst.largest:.1e} ({worst.what}{f', {worst.rows}' if worst.rows else ''})",
        numbers=[asdict(one) | {"is_small": one.is_small} for one in found],
    )


def _dtypes(options: DeviceOptions) -> list[torch.dtype]:
    return list(dict.fromkeys([torch.float32, options.torch_dtype]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
