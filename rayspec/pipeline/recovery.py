"""Decides when a process counts as dead, and how often it is started again. `RayStages` and the pool act on this."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rayspec.pipeline.placement import Process

# Between two calls of `deaths`, at most this share of the timeout counts as silence.
_SHARE_OF_A_LOOK = 0.25
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0


class Status(NamedTuple):
    """problem: why the present task of a process is stuck; empty if it is not. worked_s, num_passes: of all tasks since
    the process started."""

    problem: str
    worked_s: float
    num_passes: int


class Pulse:
    """Asks processes for their status, about once a second. Times are in seconds, by the injected clock.

    If `deaths` is not called for a long while, the listener itself did not run, and perhaps no process did (a suspended
    virtual machine). Only a part of that time counts as silence. Any thread may read `statuses`, the last of each name.
    worked_at_s: when a process was last seen to have worked, by the clock.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = self.worked_at_s = clock()
        self._asked: dict[str, tuple[Process, Future[Status], float]] = {}
        self.statuses: dict[str, Status] = {}

    def deaths(self, processes: Mapping[str, Process]) -> dict[str, str]:
        """Return the processes that are silent for too long or stuck, each with the reason."""
        now = self._clock()
        absent_s = max(0.0, now - self._looked_at - _SHARE_OF_A_LOOK * self._timeout_s)
        self._looked_at = now
        found: dict[str, str] = {}
        for name, process in processes.items():
            known, answer, asked_at = self._asked.get(name, (None, None, now))
            if known is process and answer is not None and not answer.done():
                asked_at = min(now, asked_at + absent_s)
                self._asked[name] = process, answer, asked_at
                if now - asked_at > self._timeout_s:
                    found[name] = f"{name} has not been heard of for {now - asked_at:.1f} s"
                continue
            if known is process and answer is not None and answer.exception() is None:  # else its end is known anyway
                before, self.statuses[name] = self.statuses.get(name), answer.result()
                if before is None or self.statuses[name].worked_s != before.worked_s:
                    self.worked_at_s = now
                if self.statuses[name].problem:
                    found[name] = f"{name} {self.statuses[name].problem}"
            if known is not process or now - asked_at >= 1.0:
                self._asked[name] = process, process.ask("status"), now
        return found


class Restarts:
    """Bounded restarts with a growing delay.

    window_s: restarts longer ago do not count; None: all count until `renew`, because a process may take longer to load
    than any window.
    """

    def __init__(
        self, most: int, *, window_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._window_s, self._clock = most, window_s, clock
        self._restarted_at: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """Count a restart and return how long to wait before it; None if there were too many restarts already."""
        now = self._clock()
        while self._window_s is not None and self._restarted_at and now - self._restarted_at[0] > self._window_s:
            self._restarted_at.popleft()
        made = len(self._restarted_at)
        if made >= self._most:
            return None
        self._restarted_at.append(now)
        return 0.0 if made == 0 else min(_FIRST_DELAY_S * 2.0 ** min(made - 1, 10), _LONGEST_DELAY_S)

    def renew(self) -> None:
        """Forget all restarts, because there was progress."""
        self._restarted_at.clear()
