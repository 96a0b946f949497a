"""Finding the row that kills the engine: the driver's loop around it, with engines that are sets of rows."""

from __future__ import annotations

import random

import pytest

from rayspec.service.suspects import Suspects

WIDTH = 8


def run(rows: list[str], deadly: set[str], *, max_deaths: int = 3, seed: int = 0) -> tuple[set[str], set[str], int]:
    """As a job does it: an engine takes a window of rows, ends them in any order, and dies when it begins a deadly one.

    Returns the rows that succeeded, those found guilty, and the number of deaths; raises RuntimeError where a job ends.
    """
    suspects, order = Suspects(max_deaths), random.Random(seed)
    succeeded: set[str] = set()
    guilty: set[str] = set()
    num_deaths = 0
    while True:
        left = [row for row in rows if row not in succeeded | guilty]
        todo = [row for row in left if row in suspects.on_trial] if suspects.on_trial else left
        under_way = stream(todo, deadly, 1 if suspects.on_trial else WIDTH, order, suspects, succeeded)
        if under_way is not None:
            num_deaths += 1
            found = suspects.died(under_way)
            guilty |= {found} if found is not None else set()
            if suspects.too_many_deaths:
                raise RuntimeError(f"{len(guilty)} guilty, {num_deaths} deaths")
        elif suspects.on_trial:
            suspects.acquit()
        else:
            return succeeded, guilty, num_deaths


def stream(
    todo: list[str], deadly: set[str], width: int, order: random.Random, suspects: Suspects, succeeded: set[str]
) -> frozenset[str] | None:
    """The rows that an engine had when it died; None if it got through."""
    window = todo[:width]
    waiting = todo[width:]
    while window:
        row = order.choice(window)
        if row in deadly:
            return frozenset(window)
        window.remove(row)
        succeeded.add(row)
        suspects.succeeded()
        window += [waiting.pop(0)] if waiting else []
    return None


ROWS = [f"r{number}" for number in range(40)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("deadly", [{"r0"}, {"r20"}, {"r39"}, {"r3", "r30"}, {"r10", "r11", "r12"}])
def test_only_the_guilty_fail(deadly: set[str], seed: int) -> None:
    succeeded, guilty, _ = run(ROWS, deadly, seed=seed)
    assert guilty == deadly
    assert succeeded == set(ROWS) - deadly


def test_one_guilty_row_costs_three_deaths() -> None:
    assert run(ROWS, {"r20"})[2] == 3
    assert run(["alone"], {"alone"}) == (set(), {"alone"}, 3)


def test_an_engine_that_dies_of_every_row_ends_the_job() -> None:
    with pytest.raises(RuntimeError, match="4 guilty, 6 deaths"):
        run(ROWS, set(ROWS))


def test_guilty_rows_between_good_ones_are_as_many_as_there_are() -> None:
    deadly = {f"r{number}" for number in range(0, 40, 4)}
    assert run(ROWS, deadly)[:2] == (set(ROWS) - deadly, deadly)


def test_deaths_that_no_row_explains_are_counted() -> None:
    suspects = Suspects(2)
    for number in range(3):
        assert not suspects.too_many_deaths
        assert suspects.died({f"r{number}"}) is None  # another one every time
        assert not suspects.on_trial
    assert suspects.too_many_deaths


def test_who_was_there_once_is_no_suspect() -> None:
    suspects = Suspects(3)
    suspects.died({"a", "b", "c"})
    assert not suspects.on_trial
    suspects.died({"b", "c", "d"})
    assert suspects.on_trial == {"b", "c"}


def test_rows_that_got_through_their_trial_are_forgotten() -> None:
    suspects = Suspects(9)
    suspects.died({"a", "b"})
    suspects.died({"a", "b"})
    suspects.acquit()
    suspects.died({"a", "b"})
    assert not suspects.on_trial


def test_a_death_in_a_trial_of_which_nothing_is_known_convicts_nobody() -> None:
    suspects = Suspects(3)
    suspects.died({"a", "b"})
    suspects.died({"a", "b"})
    assert suspects.died(frozenset()) is None
    assert suspects.on_trial == {"a", "b"}


def test_without_restarts_the_first_death_is_the_last() -> None:
    suspects = Suspects(0)
    assert not suspects.too_many_deaths
    suspects.died({"a"})
    assert suspects.too_many_deaths


def test_after_a_verdict_everybody_else_begins_anew() -> None:
    suspects = Suspects(9)
    suspects.died({"a", "b"})
    suspects.died({"a", "b"})
    assert suspects.died({"a"}) == "a"
    assert suspects.on_trial == {"b"}
    suspects.acquit()
    suspects.died({"b", "c"})
    assert not suspects.on_trial


def test_deaths_before_the_verdicts_make_nobody_a_suspect() -> None:
    suspects = Suspects(9)
    suspects.died({"a", "b"})
    suspects.died({"a", "b"})
    suspects.died({"a"})
    suspects.died({"b"})
    suspects.died({"b", "c"})
    assert suspects.on_trial == frozenset()
