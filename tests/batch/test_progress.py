from __future__ import annotations

import io
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rayspec.batch import progress
from rayspec.batch.job import Source
from rayspec.batch.progress import Tally, TimeLeft, showing_progress, shown_time
from rayspec.batch.rows import Row
from rayspec.types import PromptTooLongError

ROW = Row(id="a", num_output_tokens=30, num_draft_tokens=20, num_accepted_tokens=15)


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    tally = Tally()
    with showing_progress(tally, Console(file=file, force_terminal=terminal, width=100)) as show:
        for _ in range(3):
            tally.add(ROW)
            show()
    return file.getvalue()


def test_elsewhere_a_plain_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "3 rows" in shown(terminal=True)
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
    assert str(time_left(clock, 100)) == ", 100 rows to do, time left not known yet"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "1 min"), (3540, "59 min"), (9000, "2 h 30 min")])
def test_a_time_is_shown_as_precisely_as_it_is_known(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown


GOOD = Row(id="a", num_prompt_tokens=100, num_output_tokens=30, num_draft_tokens=20, num_accepted_tokens=15)
BAD = Row(id="b").failed(PromptTooLongError("too long"))


def test_rows_of_an_earlier_run_count_as_rows_and_not_as_work() -> None:
    tally = Tally(clock=lambda: 1.0)
    tally.add_earlier(Counter({None: 1, "prompt_too_long": 1}))
    tally.add(GOOD)
    assert (tally.num_rows, tally.num_earlier, tally.num_failed, tally.exit_code()) == (3, 2, 1, 3)
    assert (tally.num_prompt_tokens, tally.num_output_tokens, tally.num_draft_tokens) == (100, 30, 20)
    assert str(tally).startswith("3 rows (2 of an earlier run), 1 failed (prompt_too_long 1), 30 tokens")


def test_the_line_says_why_rows_failed() -> None:
    tally = Tally()
    kinds = ["a"] * 4 + ["b"] * 3 + ["c", "c", "d", "e"]
    for kind in kinds:
        tally.add(replace(BAD, error_kind=kind))
    assert "11 rows, 11 failed (a 4, b 3, c 2, d 1, ...), " in str(tally)


UNREADABLE = replace(BAD, error_kind="unreadable_file")


@pytest.mark.parametrize(
    ("rows", "code", "accepting"),
    [
        ([GOOD], 0, 0),
        ([GOOD, BAD], 3, 0),
        ([BAD], 1, 0),
        ([GOOD, UNREADABLE], 3, 3),
        ([UNREADABLE], 1, 1),
        ([], 1, 1),
    ],
)
def test_failed_rows_may_be_accepted_but_not_files_that_could_not_be_read(
    rows: list[Row], code: int, accepting: int
) -> None:
    tally = Tally()
    for row in rows:
        tally.add(row)
    assert (tally.exit_code(), tally.exit_code(accepts_failed=True)) == (code, accepting)


def test_rows_are_counted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 30, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    for sample, expected in ((None, 31), (0.5, 16)):
        with Source(inputs=[str(tmp_path)], sample=sample).counting() as counted:
            deadline = time.monotonic() + 10
            while (num_rows := counted()) is None and time.monotonic() < deadline:
                time.sleep(0.01)
        assert num_rows == expected
