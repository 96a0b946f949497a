"""The end of a job on SIGTERM: rows under way may finish within a grace period, and no new rows begin."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayspec.command.exit_codes import EXIT_TERMINATED


class Drain:
    """Handles SIGTERM; `requested` tells whether the signal has come. A second signal, or the end of the grace period,
    ends the process at once."""

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._grace_s = grace_s
        self._on_request: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Call `on_request` at the first SIGTERM inside the block. Enter the block after Ray has started, because Ray
        replaces the signal handler."""
        self._on_request = on_request
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
        signal.signal(signal.SIGTERM, self._take)
        signal.signal(signal.SIGALRM, self._end)
        try:
            yield
        except SystemExit:
            if self.requested:  # Ray gives its own code to an exit that comes while it waits
                raise SystemExit(EXIT_TERMINATED) from None
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        again, self.requested = self.requested, True
        if again or self._grace_s <= 0:  # a timer of 0 s would never fire
            self._end(number, frame)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._on_request()

    def _end(self, number: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)
