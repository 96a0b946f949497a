"""Time that another plan costs where launches are captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.shared import fastest_seconds
from rayspec.bench.selfcheck.checks import DriverOf
from rayspec.bench.selfcheck.models import CHUNKS, SINGLE_ROWS, Prepared, bundled_model, logits_of, prepare, split
from rayspec.bench.selfcheck.report import Outcome, SelfcheckOptions, Table, judged, not_here
from rayspec.choices import Choices, choices_of
from rayspec.model.architecture import Decomposition
from rayspec.model.cuda.graphs import CudaDriver, can_switch_nodes
from rayspec.model.graphs import StepGraphs

# A plan changes at most once a round, so this is the most that a round of a few milliseconds may lose.
_MAX_SWITCH_S = 1e-4
_PASSES_PER_TIMING = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTimes:
    """Seconds of a pass: with the same plan as before, with another plan each time, and launched eagerly."""

    way: str
    same_s: float
    other_s: float
    eager_s: float

    @property
    def switch_s(self) -> float:
        return max(0.0, self.other_s - self.same_s)


def check_plan_switch(options: SelfcheckOptions) -> Outcome:
    device = options.torch_device
    if device.type != "cuda":
        return not_here(f"{device} has no graphs")
    parts = split(bundled_model(options.torch_dtype, device), "operators")
    ways = [False, True] if can_switch_nodes() else [False]
    num_repeats = 3 if options.is_quick else 10
    return judge_switches(
        [switch_times(parts, by_plan=by_plan, driver_of=CudaDriver, num_repeats=num_repeats) for by_plan in ways]
    )


def switch_times(parts: Decomposition, *, by_plan: bool, driver_of: DriverOf, num_repeats: int) -> SwitchTimes:
    """Time passes of single rows whose plans have equally many sublayers."""
    eager = prepare(parts, is_static=True)
    captured = prepare(
        parts, is_static=True, capture=lambda step: StepGraphs(step, driver_of(parts.device), by_plan=by_plan)
    )
    graphs = captured.runner.graphs
    assert graphs is not None
    plans = [choices_of([index % 2 == odd for index in range(len(parts.sublayers))]) for odd in (0, 1)]
    for shape in CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    for _ in range(3):  # the second pass captures its bucket
        logits_of(captured, SINGLE_ROWS, plans[0])

    def passes(prepared: Prepared, order: Sequence[Choices]) -> Callable[[], None]:
        batch = prepared.runner.batch(SINGLE_ROWS.spans(), token_ids=SINGLE_ROWS.token_ids(prepared.vocab_size))

        @torch.no_grad()
        def work() -> None:
            for choices in order:
                prepared.runner.run(batch, prepared.runner.embed(batch), choices=choices)

        return work

    half = _PASSES_PER_TIMING // 2
    each = fastest_seconds(
        [
            passes(captured, [plans[0]] * half + [plans[1]] * half),
            passes(captured, plans * half),
            passes(eager, plans * half),
        ],
        parts.device,
        num_repeats=num_repeats,
    )
    same_s, other_s, eager_s = (seconds / _PASSES_PER_TIMING for seconds in each)
    return SwitchTimes(way=graphs.way, same_s=same_s, other_s=other_s, eager_s=eager_s)


def judge_switches(found: Sequence[SwitchTimes]) -> Outcome:
    slowest = max(found, key=lambda one: one.switch_s)
    rows = [
        [one.way, *(f"{1000 * seconds:.3f}" for seconds in (one.same_s, one.other_s, one.switch_s, one.eager_s))]
        for one in found
    ]
    return judged(
        is_good=slowest.switch_s <= _MAX_SWITCH_S,
        found=f"another plan costs {1000 * slowest.switch_s:.3f} ms at most ({slowest.way}); "
        f"{1000 * _MAX_SWITCH_S:.1f} ms are allowed",
        numbers=[asdict(one) | {"switch_s": one.switch_s} for one in found],
        tables=[Table(headings=["graphs", "same plan ms", "other plan ms", "switch ms", "eager ms"], rows=rows)],
        counted="Milliseconds of a pass of the bundled model with three sequences and half of its sublayers.",
    )
