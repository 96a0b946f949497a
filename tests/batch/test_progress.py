from __future__ import annotations

import io

import pytest
from rich.console import Console

from rayspec.batch import progress
from rayspec.batch.progress import TimeLeft, showing_progress, shown_time
from rayspec.batch.rows import Row
from rayspec.batch.tally import Tally

ROW = Row(id="a", num_output_tokens=30, num_draft_tokens=20, num_accepted_tokens=15)


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    tally = Tally()
    with showing_progress(tally, Console(file=file, force_terminal=terminal, width=100)) as show:
        for _ in range(3):
            tally.add(ROW)
            show()
    return file.getvalue()


def test_a_terminal_has_a_live_line() -> None:
    text = shown(terminal=True)
    assert "3 rows" in text
    assert "acceptance 0.75" in text


def test_elsewhere_a_plain_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(terminal=False) == ""
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL_S", 0.0)
    lines = shown(terminal=False).splitlines()
    assert [line.split(",")[0] for line in lines] == ["1 rows", "2 rows", "3 rows"]
    assert "\x1b" not in "".join(lines)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def time_left(clock: Clock, num_left: int | None, **options: bool) -> TimeLeft:
    return TimeLeft(num_left=lambda: num_left, num_under_way=4, clock=clock, **options)


def test_there_is_no_estimate_before_as_many_rows_as_are_under_way() -> None:
    clock = Clock()
    estimate = time_left(clock, 100)
    for _ in range(3):
        estimate.add(ROW)
        clock.now += 1
    assert (estimate.seconds, str(estimate)) == (None, ", 97 rows to do, time left not known yet")
    estimate.add(ROW)
    assert estimate.seconds is not None


@pytest.mark.parametrize(("num_done", "too_long"), [(4, 1.75), (40, 1.1), (99, 1.1)])
def test_the_estimate_is_never_too_short_for_an_engine_of_constant_speed(num_done: int, too_long: float) -> None:
    """Four rows at a time, 8 s each, begun 2 s after each other."""
    clock, loaded_s = Clock(), 50.0
    estimate = time_left(clock, 100)
    for number in range(num_done):
        clock.now = loaded_s + 8 + 2 * number
        estimate.add(Row(id="a", latency_s=8.0))
    assert estimate.seconds is not None
    assert 1 <= estimate.seconds / (2 * (100 - num_done)) <= too_long
    assert estimate.begun_s == loaded_s


def test_an_estimate_says_what_it_is() -> None:
    clock = Clock()
    for is_bound, word in ((False, "about"), (True, "at most")):
        estimate = time_left(clock, 1000, is_bound=is_bound)
        for _ in range(10):
            estimate.add(ROW)
            clock.now += 60
        assert f", 990 rows to do, {word} 16 h 30 min" in str(estimate)
    assert str(time_left(clock, None)) == ""


def test_more_rows_than_were_counted_are_no_negative_time() -> None:
    estimate = time_left(Clock(), 2)
    for _ in range(5):
        estimate.add(ROW)
    assert estimate.seconds == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "1 min"), (100, "2 min"), (3599, "60 min"), (3600, "1 h 0 min"), (9000, "2 h 30 min"), (180000, "2 d 2 h")],
)
def test_a_time_is_shown_as_precisely_as_it_is_known(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown
