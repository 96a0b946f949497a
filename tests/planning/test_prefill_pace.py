from __future__ import annotations

import pytest

from rayspec.planning.prefill_pace import PrefillPace


def _pace(round_s: float, row_s: float, *, mixed: bool) -> PrefillPace:
    pace = PrefillPace()
    for _ in range(8):
        pace.observe(round_s, num_chunk_rows=0, has_round=True)
        pace.observe(100 * row_s + round_s * mixed, num_chunk_rows=100, has_round=mixed)
    return pace


@pytest.mark.parametrize("mixed", [False, True])
def test_a_chunk_takes_as_long_as_a_round(mixed: bool) -> None:
    assert _pace(0.5, 0.001, mixed=mixed).num_rows(1024) == pytest.approx(500, abs=1)


def test_it_is_never_tiny_nor_more_than_allowed() -> None:
    assert _pace(0.01, 0.001, mixed=False).num_rows(1024) == 32
    assert _pace(0.01, 0.001, mixed=False).num_rows(8) == 8
    assert _pace(5.0, 0.001, mixed=False).num_rows(1024) == 1024


def test_the_first_chunk_is_small() -> None:
    pace = PrefillPace()
    assert pace.num_rows(1024) == 32
    pace.observe(0.1, num_chunk_rows=0, has_round=True)
    assert pace.num_rows(1024) == 32


def test_it_follows_a_machine_that_gets_slower() -> None:
    pace = _pace(0.5, 0.001, mixed=False)
    for _ in range(8):
        pace.observe(0.4, num_chunk_rows=100, has_round=False)
    assert pace.num_rows(1024) == pytest.approx(125, abs=2)


def test_a_chunk_that_cost_nothing_is_no_division_by_zero() -> None:
    pace = PrefillPace()
    pace.observe(0.5, num_chunk_rows=0, has_round=True)
    pace.observe(0.4, num_chunk_rows=50, has_round=True)
    assert pace.num_rows(1024) == 32
