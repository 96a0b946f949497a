"""Checks of captured graphs: they compute the bits of eager launches, and another plan costs little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from rayspec.bench.selfcheck.models import BUNDLED, Prepared, model_named, split
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, Table, judged, not_here
from rayspec.bench.selfcheck.parity import prepare_parts
from rayspec.bench.selfcheck.sequences import PARITY_PASSES, PassShape, logits_of
from rayspec.bench.selfcheck.timing import fastest_seconds
from rayspec.choices import Choices, choices_of
from rayspec.model.architecture import Decomposition
from rayspec.model.cuda.graphs import CudaDriver, can_switch_nodes
from rayspec.model.graphs import GraphDriver, StepGraphs, is_capturable

# A plan changes at most once a round, so this is the most that a round of a few milliseconds may lose.
_MAX_SWITCH_S = 1e-4
_PASSES_PER_TIMING = 20
_CHUNKS, _ROUNDS = PARITY_PASSES[:2], PARITY_PASSES[2:]
_SINGLE_ROWS = _ROUNDS[0]

DriverOf = Callable[[torch.device], GraphDriver]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A pass whose graphs were replayed. num_missing: parts of its bucket that could not be captured."""

    model: str
    way: str
    rows: str
    plan: str
    is_equal: bool
    num_missing: int


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


def check_captured_against_eager(options: SelfcheckOptions) -> Outcome:
    device = options.torch_device
    if device.type != "cuda":
        return not_here(f"{device} has no graphs")
    names = ["llama"] if options.is_quick else ["llama", "gemma2", BUNDLED]
    return judge_replays(
        [
            one
            for by_plan in _ways()
            for name in names
            for one in replays(name, options.torch_dtype, device, by_plan=by_plan, driver_of=CudaDriver)
        ]
    )


def check_plan_switch(options: SelfcheckOptions) -> Outcome:
    device = options.torch_device
    if device.type != "cuda":
        return not_here(f"{device} has no graphs")
    parts = split(model_named(BUNDLED, options.torch_dtype, device), "operators")
    num_repeats = 3 if options.is_quick else 10
    return judge_switches(
        [switch_times(parts, by_plan=by_plan, driver_of=CudaDriver, num_repeats=num_repeats) for by_plan in _ways()]
    )


def replays(
    name: str, dtype: torch.dtype, device: torch.device, *, by_plan: bool, driver_of: DriverOf
) -> Iterator[Replayed]:
    """Run passes eagerly and captured, each in its own KV cache, and compare the logits."""
    parts = split(model_named(name, dtype, device), "operators")
    eager = prepare_parts(parts, is_static=True)
    captured, graphs = _captured(parts, by_plan=by_plan, driver_of=driver_of)
    for shape in _CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    for shape in _ROUNDS:
        for plan, choices in _plans(parts).items():
            expected, found = logits_of(eager, shape, choices), _replayed(captured, shape, choices)
            num_missing = len(graphs.buckets) * _num_graphs(parts, by_plan) - graphs.num_graphs
            is_equal = torch.equal(expected, found)
            yield Replayed(
                model=name, way=graphs.way, rows=shape.name, plan=plan, is_equal=is_equal, num_missing=num_missing
            )


def judge_replays(found: Sequence[Replayed]) -> Outcome:
    differing = [one for one in found if not one.is_equal]
    missing = [one for one in found if one.num_missing]
    rows = [
        [one.model, one.way, one.rows, one.plan, "equal" if one.is_equal else "different", str(one.num_missing)]
        for one in found
    ]
    return judged(
        is_good=not differing and not missing,
        found=f"{len(differing)} of {len(found)} replayed passes differ from eager ones; in {len(missing)} some part "
        "could not be captured",
        numbers=[asdict(one) for one in found],
        tables=[Table(headings=["model", "graphs", "rows", "plan", "logits", "not captured"], rows=rows)],
    )


def switch_times(parts: Decomposition, *, by_plan: bool, driver_of: DriverOf, num_repeats: int) -> SwitchTimes:
    """Time passes of single rows whose plans have equally many sublayers."""
    eager = prepare_parts(parts, is_static=True)
    captured, graphs = _captured(parts, by_plan=by_plan, driver_of=driver_of)
    plans = [choices_of([index % 2 == odd for index in range(len(parts.sublayers))]) for odd in (0, 1)]
    for shape in _CHUNKS:
        logits_of(eager, shape)
        logits_of(captured, shape)
    _replayed(captured, _SINGLE_ROWS, plans[0])

    def passes(prepared: Prepared, order: Sequence[Choices]) -> Callable[[], None]:
        batch = prepared.runner.batch(_SINGLE_ROWS.spans(), token_ids=_SINGLE_ROWS.token_ids(prepared.vocab_size))

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


def _ways() -> list[bool]:
    return [False, True] if can_switch_nodes() else [False]


def _captured(parts: Decomposition, *, by_plan: bool, driver_of: DriverOf) -> tuple[Prepared, StepGraphs]:
    prepared = prepare_parts(
        parts, is_static=True, capture=lambda step: StepGraphs(step, driver_of(parts.device), by_plan=by_plan)
    )
    graphs = prepared.runner.graphs
    assert graphs is not None
    return prepared, graphs


def _replayed(captured: Prepared, shape: PassShape, choices: Choices | None) -> torch.Tensor:
    """Run the pass three times: the second one captures its bucket. Return the logits of the third."""
    return [logits_of(captured, shape, choices) for _ in range(3)][-1]


def _plans(parts: Decomposition) -> dict[str, Choices | None]:
    num_sublayers = len(parts.sublayers)
    return {
        "full": None,
        "every third skipped": choices_of([index % 3 > 0 for index in range(num_sublayers)]),
        "all but the ends skipped": choices_of([index in (0, num_sublayers - 1) for index in range(num_sublayers)]),
    }


def _num_graphs(parts: Decomposition, by_plan: bool) -> int:
    """Return the number of graphs of a bucket of which every part is captured: the rotary embedding, the embedding and
    the sublayers."""
    assert all(map(is_capturable, parts.sublayers)), "these models have no experts"
    return 3 if by_plan else 2 + len(parts.sublayers)
