"""Showing how a run goes: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rayspec.batch.tally import Tally

_PLAIN_INTERVAL_S = 5.0


@contextmanager
def showing_progress(tally: Tally, console: Console) -> Iterator[Callable[[], None]]:
    """Gives a function to call after every row that `tally` has counted."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(str(tally), total=None)
            yield lambda: progress.update(task, description=str(tally))
    else:
        yield _PlainLines(tally, console)


class _PlainLines:
    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally, self._console = tally, console
        self._shown_s = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S:
            self._console.print(str(self._tally), highlight=False, soft_wrap=True)
            self._shown_s = time.monotonic()
