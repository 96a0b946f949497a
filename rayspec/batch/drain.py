"""Ending on SIGTERM: what is under way is finished, for a moment, and nothing new is begun."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayspec.command.exit_codes import EXIT_TERMINATED


class Drain:
    """Whether the process has received SIGTERM. The second signal, or the end of the grace period, ends it at once."""

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._grace_s = grace_s
        self._on_request: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Listen for SIGTERM inside the block. Ray replaces the handler: enter this after it has started."""
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
        if again or self._grace_s <= 0:  # a timer of 0 s would never ring
            self._end(number, frame)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._on_request()

    def _end(self, number: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)
