"""The checks of captured graphs, on a driver that stands in for a GPU's, and what they must find."""

from __future__ import annotations

import pytest
import torch

from rayspec.bench.selfcheck.graphs import (
    Replayed,
    SwitchTimes,
    check_captured_against_eager,
    check_plan_switch,
    judge_replays,
    judge_switches,
    replays,
    switch_times,
)
from rayspec.bench.selfcheck.models import model_named, split
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.model.graphs import CapturedGraph, GraphDriver
from tests.graph_driver import RecordedGraph, RecordingDriver

CPU = torch.device("cpu")
WAYS = pytest.mark.parametrize("by_plan", [False, True], ids=["sublayers", "plans"])


def recording(_: torch.device) -> GraphDriver:
    return RecordingDriver()


def refusing(_: torch.device) -> GraphDriver:
    return RecordingDriver(refuses=lambda number: number == 5)


class _Deaf(RecordingDriver):
    """Its graphs stay as they are, whatever is switched."""

    def capture(self, groups: object) -> CapturedGraph:
        graph = super().capture(groups)  # type: ignore[arg-type]
        assert isinstance(graph, RecordedGraph)
        graph.switch = lambda group, is_on: None  # type: ignore[method-assign]
        return graph


def found(by_plan: bool, driver_of: object = recording) -> list[Replayed]:
    return list(replays("llama", torch.float32, CPU, by_plan=by_plan, driver_of=driver_of))  # type: ignore[arg-type]


@WAYS
def test_replays_have_the_bits_of_eager_passes(by_plan: bool) -> None:
    all_found = found(by_plan)
    assert len(all_found) == 3 * 3, "three kinds of passes by three plans"
    outcome = judge_replays(all_found)
    assert outcome.status == "passed"
    assert outcome.found.startswith("0 of 9 replayed passes differ")


def test_a_part_that_cannot_be_captured_fails_the_check() -> None:
    outcome = judge_replays(found(False, refusing))
    assert outcome.status == "failed"
    assert outcome.found.startswith("0 of 9"), "it ran eagerly"


def test_a_switch_that_does_nothing_fails_the_check() -> None:
    all_found = found(True, lambda _: _Deaf())
    assert {one.plan for one in all_found if not one.is_equal} >= {"every third skipped", "all but the ends skipped"}
    assert judge_replays(all_found).status == "failed"


@WAYS
def test_another_plan_is_timed(by_plan: bool) -> None:
    parts = split(model_named("llama", torch.float32, CPU), "operators")
    times = switch_times(parts, by_plan=by_plan, driver_of=recording, num_repeats=1)
    assert times.way == ("plans" if by_plan else "sublayers")
    assert min(times.same_s, times.other_s, times.eager_s) > 0


def test_a_slow_switch_fails_the_check() -> None:
    fast = SwitchTimes(way="sublayers", same_s=2e-3, other_s=1.9e-3, eager_s=3e-3)
    slow = SwitchTimes(way="plans", same_s=2e-3, other_s=2.2e-3, eager_s=3e-3)
    assert judge_switches([fast]).status == "passed"
    outcome = judge_switches([fast, slow])
    assert outcome.status == "failed"
    assert "0.200 ms at most (plans)" in outcome.found


def test_a_cpu_has_no_graphs() -> None:
    for check in (check_captured_against_eager, check_plan_switch):
        assert check(SelfcheckOptions(device="cpu")).found == "cpu has no graphs"
