"""Which replicas count as well, as silent, and as lost; and the rates that they report."""

from __future__ import annotations

from typing import Any

import pytest

from rayspec.serve.status import RecentRates
from rayspec.serve.watch import PERIOD_S, Sightings
from rayspec.types import EngineStats


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
    assert (sightings.problem, sightings.lost, sightings.can_serve) == ("no answer", {}, True)
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


def stats(tokens: int, drafted: int = 0, accepted: int = 0, rounds: int = 0, plain: int = 0) -> EngineStats:
    return EngineStats(
        num_generated_tokens=tokens,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_rounds=rounds,
        num_plain_rounds=plain,
    )


def test_nothing_yet() -> None:
    rates = RecentRates()
    assert (rates.tokens_per_s, rates.acceptance_rate, rates.mean_accepted_length) == (0.0, None, None)
    rates.add(stats(5, 4, 2, 2, 1), 0.0)
    assert (rates.tokens_per_s, rates.acceptance_rate, rates.mean_accepted_length) == (0.0, None, None)


def test_what_was_before_the_window_does_not_count() -> None:
    rates = RecentRates(window_s=10.0)
    rates.add(stats(1000, 100, 0, 50, 0), 0.0)
    rates.add(stats(1000, 100, 0, 50, 0), 5.0)
    for second in range(6, 16):
        grown = second - 5
        rates.add(stats(1000 + 20 * grown, 100 + 8 * grown, 6 * grown, 50 + 3 * grown, grown), float(second))
    assert rates.tokens_per_s == pytest.approx(20.0)
    assert rates.acceptance_rate == pytest.approx(6 / 8)
    assert rates.mean_accepted_length == pytest.approx(1 + 6 / 2)


def test_a_burst_is_measured_from_its_start() -> None:
    rates = RecentRates(window_s=10.0)
    for second in range(9):
        rates.add(stats(0), float(second))
    rates.add(stats(50), 9.0)
    assert rates.tokens_per_s == pytest.approx(50.0)


def test_idle_again() -> None:
    rates = RecentRates(window_s=10.0)
    for second in range(30):
        rates.add(stats(min(100, 10 * second)), float(second))
    assert rates.tokens_per_s == 0.0
