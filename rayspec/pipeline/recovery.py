"""Decides when a process counts as dead, and how often it is started again. `RayStages` and the pool act on this."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

# Between two calls of `deaths`, at most this share of the timeout counts as silence.
_SHARE_OF_A_LOOK = 0.25
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0


class Pulse:
    """Heartbeats of the processes of a replica, by name. Times are in seconds, by the injected clock.

    If `deaths` is not called for a long while, the listener itself did not run, and perhaps no process did (a suspended
    virtual machine). Only a part of that time counts as silence.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock()
        self._heard_at: dict[str, float] = {}
        self._problems: dict[str, str] = {}

    def watch(self, names: Iterable[str]) -> None:
        """Expect heartbeats of these processes from now on, and of no others."""
        self._looked_at = self._clock()
        self._heard_at = dict.fromkeys(names, self._looked_at)
        self._problems.clear()

    def hear(self, name: str, problem: str = "") -> None:
        """problem: why the process says that it is stuck; empty if it is not."""
        if name in self._heard_at:
            self._heard_at[name] = self._clock()
            self._problems[name] = problem

    def deaths(self) -> dict[str, str]:
        """Return the processes that are silent for too long or stuck, each with the reason."""
        now = self._clock()
        absent_s = now - self._looked_at - _SHARE_OF_A_LOOK * self._timeout_s
        if absent_s > 0:
            self._heard_at = {name: min(now, at + absent_s) for name, at in self._heard_at.items()}
        self._looked_at = now
        silent = {
            name: f"{name} has not been heard of for {now - at:.1f} s"
            for name, at in self._heard_at.items()
            if now - at > self._timeout_s
        }
        return silent | {name: f"{name} {problem}" for name, problem in self._problems.items() if problem}


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
