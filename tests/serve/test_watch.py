"""Which replicas count as well, as silent, and as lost."""

from __future__ import annotations

from typing import Any

import pytest

from rayspec.serve.watch import PERIOD_S, Sightings

READY: dict[str, Any] = {"health": "ready"}


@pytest.fixture
def sightings() -> Sightings:
    return Sightings(timeout_s=6.0)


def silent(sightings: Sightings, seconds: float) -> None:
    for _ in range(round(seconds / PERIOD_S)):
        sightings.passed(PERIOD_S)


def test_before_anyone_has_looked_requests_are_tried(sightings: Sightings) -> None:
    assert sightings.can_serve
    sightings.present([])
    assert not sightings.can_serve
    assert sightings.problem == "starting"


def test_replicas_that_were_there_before_are_tried_until_they_have_been_asked(sightings: Sightings) -> None:
    sightings.present(["a"])
    assert (sightings.can_serve, sightings.problem) == (True, "starting")
    sightings.gone("a")
    assert not sightings.can_serve
    sightings.present(["a", "b"])
    assert not sightings.can_serve, "b has just come up"


def test_a_replica_that_was_there_and_never_answers_is_not_waited_for(sightings: Sightings) -> None:
    sightings.present(["a"])
    silent(sightings, 4)
    assert (sightings.can_serve, sightings.problem) == (False, "starting")


def test_a_silent_replica_is_ill_first_and_lost_later(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", READY)
    assert (sightings.problem, sightings.lost, sightings.can_serve) == (None, [], True)
    silent(sightings, 4)
    assert (sightings.problem, sightings.lost, sightings.can_serve) == ("no answer", [], False)
    silent(sightings, 3)
    assert sightings.lost == ["a"]
    sightings.gone("a")
    assert (sightings.problem, sightings.lost) == ("starting", [])


def test_a_replica_that_has_never_answered_is_given_time(sightings: Sightings) -> None:
    sightings.present(["a"])
    silent(sightings, 1000)
    assert (sightings.problem, sightings.lost) == ("starting", [])


def test_an_answer_ends_the_silence(sightings: Sightings) -> None:
    sightings.present(["a"])
    for _ in range(10):
        sightings.answered("a", READY)
        silent(sightings, 2.5)
        assert (sightings.problem, sightings.lost) == (None, [])


def test_a_machine_that_slept_makes_no_replica_silent(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", READY)
    sightings.passed(3600.0)
    assert (sightings.problem, sightings.lost) == (None, [])


def test_one_replica_that_starts_is_no_ailment_beside_one_that_is_ready(sightings: Sightings) -> None:
    sightings.present(["a", "b"])
    sightings.answered("a", READY)
    assert sightings.problem is None
    sightings.answered("b", {"health": "engine dead"})
    assert (sightings.problem, sightings.can_serve) == ("engine dead", True)


def test_an_engine_that_is_stuck_is_lost_and_one_that_recovers_is_not(sightings: Sightings) -> None:
    sightings.present(["a", "b"])
    sightings.answered("a", {"health": "no answer"})
    sightings.answered("b", {"health": "recovering"})
    assert (sightings.lost, sightings.problem, sightings.can_serve) == (["a"], "no answer, recovering", True)


def test_who_is_no_longer_there_is_forgotten(sightings: Sightings) -> None:
    sightings.present(["a"])
    sightings.answered("a", READY)
    sightings.present(["b"])
    sightings.answered("a", READY)  # asked before it went
    assert list(sightings.replicas) == ["b"]
