"""Rates of the last seconds against sums by hand."""

from __future__ import annotations

import pytest

from rayspec.serve.status import RecentRates
from rayspec.types import EngineStats


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
