"""Which replicas count as well, as silent, and as lost."""

from __future__ import annotations

from typing import Any

import pytest

from rayspec.serve.watch import PERIOD_S, Sightings


def report(health: str = "ready", problem: str | None = None) -> dict[str, Any]:
    return {"status": {"health": health}, "place": {"node_id": "n", "process_id": 1}, "problem": problem}


@pytest.fixture
def sightings() -> Sightings:
    return Sightings(timeout_s=60.0)


def silent(sightings: Sightings, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        sightings.passed(PERIOD_S)


def test_before_anyone_has_looked_requests_are_tried(sightings: Sightings) -> None:
    assert sightings.can_serve
    sightings.present([])
    assert not sightings.can_serve
    assert sightings.problem == "starting"


def test_replicas_to_which_serve_sends_requests_are_tried_until_they_have_been_asked(sightings: Sightings) -> None:
    sightings.present(["a"])
    assert (sightings.can_serve, sightings.problem) == (True, "starting")
    sightings.gone("a")
    assert (sightings.can_serve, sightings.problem) == (False, "starting")


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_silent_replica_is_ill_first_and_lost_later(sightings: Sightings, has_answered: bool) -> None:
    sightings.present(["a"])
    if has_answered:
        sightings.answered("a", report())
        assert (sightings.problem, sightings.lost, sightings.can_serve) == (None, {}, True)
    silent(sightings, 5)
    assert sightings.can_serve
    silent(sightings, 2)
    assert (sightings.problem, sightings.lost, sightings.can_serve) == ("no answer", {}, False)
    silent(sightings, 54)
    assert sightings.lost == {"a": "its process has not answered for 61 s (replica_timeout_s)"}
    sightings.gone("a")
    assert (sightings.problem, sightings.lost) == ("starting", {})


def test_one_that_failed_to_answer_and_then_is_silent_is_lost(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.gone("a")
    silent(sightings, 59)
    assert sightings.lost == {}
    silent(sightings, 2)
    assert list(sightings.lost) == ["a"]


def test_a_stopped_replica_is_lost_at_once(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", report())
    sightings.stopped("a")
    assert sightings.lost == {"a": "its process is stopped (SIGSTOP)"}
    sightings.gone("a")
    assert sightings.lost == {}


def test_an_answer_ends_the_silence(sightings: Sightings) -> None:
    sightings.present(["a"])
    for _ in range(50):
        sightings.answered("a", report())
        silent(sightings, 2.5)
        assert (sightings.problem, sightings.lost) == (None, {})


def test_a_machine_that_slept_makes_no_replica_silent(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", report())
    sightings.passed(3600.0)
    assert (sightings.problem, sightings.lost) == (None, {})


def test_one_replica_that_starts_is_no_ailment_beside_one_that_is_ready(sightings: Sightings) -> None:
    sightings.present(["a", "b"])
    sightings.answered("a", report())
    assert sightings.problem is None
    sightings.answered("b", report("engine dead"))
    assert (sightings.problem, sightings.can_serve) == ("engine dead", True)


def test_an_engine_that_is_stuck_is_lost_and_one_that_recovers_is_not(sightings: Sightings) -> None:
    sightings.present(["a", "b"])
    sightings.answered("a", report("stuck", "has not finished a pass for 74 s"))
    sightings.answered("b", report("recovering"))
    assert sightings.lost == {"a": "its engine has not finished a pass for 74 s (engine_timeout_s)"}
    assert (sightings.problem, sightings.can_serve) == ("recovering, stuck", True)


def test_who_is_no_longer_there_is_forgotten(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", report())
    sightings.present(["b"])
    sightings.answered("a", report())  # asked before it went
    assert list(sightings.replicas) == ["b"]
