"""Shows the progress of a run: a live line on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rayspec.batch.rows import Row
from rayspec.batch.tally import Tally

_PLAIN_INTERVAL_S = 5.0
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0


@dataclass(slots=True, kw_only=True)
class TimeLeft:
    """Estimates how long a run still takes, from the rows that are done so far.

    num_left: returns the number of rows that the run had to do at its start; None while it is unknown. num_under_way:
    rows that must be done before there is an estimate, because the first rows to finish are short. Rows under way count
    as not begun, so the first estimates are too long. is_bound: later rows take less time than earlier ones, so that
    the estimate is an upper bound. clock: returns seconds.
    """

    num_left: Callable[[], int | None]
    num_under_way: int
    is_bound: bool = False
    clock: Callable[[], float] = time.monotonic
    num_done: int = 0
    begun_s: float = 0.0

    def add(self, row: Row) -> None:
        """Count a row that is done. The time in which the engine loaded does not count."""
        if self.num_done == 0:
            self.begun_s = self.clock() - (row.latency_s or 0.0)
        self.num_done += 1

    @property
    def seconds(self) -> float | None:
        """Estimated seconds that are left; None while there is no estimate."""
        total = self.num_left()
        if total is None or self.num_done < self.num_under_way:
            return None
        return max(0, total - self.num_done) * (self.clock() - self.begun_s) / self.num_done

    def __str__(self) -> str:
        total = self.num_left()
        if total is None:
            return ""
        seconds = self.seconds
        time_left = "time left not known yet" if seconds is None else f"{self._about} {shown_time(seconds)} left"
        return f", {max(0, total - self.num_done)} rows to do, {time_left}"

    @property
    def _about(self) -> str:
        return "at most" if self.is_bound else "about"


def shown_time(seconds: float) -> str:
    """Return a duration in words, with the precision of an estimate: days and hours, hours and minutes, or minutes."""
    for unit_s, unit, part_s, part in ((_DAY_S, "d", _HOUR_S, "h"), (_HOUR_S, "h", _MINUTE_S, "min")):
        if seconds >= unit_s:
            parts = round(seconds / part_s)
            per_unit = round(unit_s / part_s)
            return f"{parts // per_unit} {unit} {parts % per_unit} {part}"
    return f"{max(1, round(seconds / _MINUTE_S))} min"


@contextmanager
def showing_progress(tally: Tally, console: Console, time_left: TimeLeft | None = None) -> Iterator[Callable[[], None]]:
    """Give the block a function to call after every row that `tally` has counted."""

    def line() -> str:
        return f"{tally}{time_left or ''}"

    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(line(), total=None)
            yield lambda: progress.update(task, description=line())
    else:
        yield _PlainLines(line, console)


class _PlainLines:
    def __init__(self, line: Callable[[], str], console: Console) -> None:
        self._line, self._console = line, console
        self._shown_s = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._console.print(self._line(), highlight=False, soft_wrap=True)
            self._shown_s = time.monotonic()
