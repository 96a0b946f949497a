"""Bounded restarts."""

from __future__ import annotations

from rayspec.pool.restart_budget import RestartBudget


def test_restarts_are_bounded_and_further_apart_each_time_until_there_is_progress() -> None:
    budget = RestartBudget(4)
    for _ in range(2):
        assert [budget.next_delay_s() for _ in range(6)] == [0.0, 0.2, 0.4, 0.8, None, None]
        budget.renew()


def test_the_delay_is_bounded() -> None:
    budget = RestartBudget(2000)
    assert max(budget.next_delay_s() or 0.0 for _ in range(2000)) == 30.0


def test_no_restarts() -> None:
    assert RestartBudget(0).next_delay_s() is None
