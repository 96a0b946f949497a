"""Counts the rows of a run, with the exit code they add up to, and shows them as they come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rayspec.batch.rows import Row
from rayspec.command.terminal import EXIT_FAILED, EXIT_OK, EXIT_SOME_FAILED

_MAX_KINDS = 4
_PASSING_KINDS = frozenset({"unreadable_file"})
_PLAIN_INTERVAL_S = 5.0
_MINUTE_S = 60.0


@dataclass(slots=True)
class Tally:
    """Counts over the rows so far. clock: returns seconds."""

    clock: Callable[[], float] = time.perf_counter
    num_rows: int = 0
    num_earlier: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    started_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def add_earlier(self, kinds: Counter[str | None]) -> None:
        """Add rows of an earlier run, whose tokens do not count for this run. kinds: see `RunFolder.kinds`."""
        self.num_rows += kinds.total()
        self.num_earlier += kinds.total()
        self.errors.update({kind: number for kind, number in kinds.items() if kind is not None})

    def add(self, row: Row) -> None:
        self.num_rows += 1
        if row.error_kind is not None:
            self.errors[row.error_kind] += 1
        self.num_output_tokens += row.num_output_tokens
        self.num_draft_tokens += row.num_draft_tokens
        self.num_accepted_tokens += row.num_accepted_tokens
        if row.error_kind is None:
            self.num_prompt_tokens += row.num_prompt_tokens

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def exit_code(self, *, accepts_failed: bool = False) -> int:
        """Return the exit code: 0 if every row succeeded, 1 if none did, 3 if some failed. accepts_failed: it is 0 even
        if rows failed, unless a file could not be read, because another run may succeed in reading it."""
        is_final = not self.errors.keys() & _PASSING_KINDS
        if self.num_rows > 0 and (self.num_failed == 0 or (accepts_failed and is_final)):
            return EXIT_OK
        return EXIT_FAILED if self.num_failed == self.num_rows else EXIT_SOME_FAILED

    def __str__(self) -> str:
        acceptance = "" if self.acceptance_rate is None else f", acceptance {self.acceptance_rate:.2f}"
        kinds = [f"{kind} {count}" for kind, count in self.errors.most_common(_MAX_KINDS)]
        kinds += ["..."] * (len(self.errors) > _MAX_KINDS)
        failed = f", {self.num_failed} failed ({', '.join(kinds)})" if self.num_failed else ""
        speed = f"{self.num_output_tokens} tokens, {self.tokens_per_s:.1f} tokens/s"
        earlier = f" ({self.num_earlier} of an earlier run)" if self.num_earlier else ""
        return f"{self.num_rows} rows{earlier}{failed}, {speed}{acceptance}"


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
        seconds, about = self.seconds, "at most" if self.is_bound else "about"
        time_left = "time left not known yet" if seconds is None else f"{about} {shown_time(seconds)} left"
        return f", {max(0, total - self.num_done)} rows to do, {time_left}"


def shown_time(seconds: float) -> str:
    """Return a duration in words, with the precision of an estimate."""
    hours, minutes = divmod(max(1, round(seconds / _MINUTE_S)), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


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
        shown_s = time.monotonic()

        def show() -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s >= _PLAIN_INTERVAL_S:
                console.print(line(), highlight=False, soft_wrap=True)
                shown_s = time.monotonic()

        yield show
