"""Decides when a process counts as dead, and how often a replica is brought back. `RayStages` acts on this."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# Between two calls of `deaths`, at most this share of the timeout counts as silence.
_SHARE_OF_A_LOOK = 0.25
_WINDOW_S = 600.0
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Death:
    name: str
    reason: str


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

    def deaths(self) -> list[Death]:
        """Return the processes that are silent for too long or stuck."""
        self._forgive_own_absence()
        now = self._clock()
        silent = [
            Death(name, f"{name} has not been heard of for {now - at:.1f} s")
            for name, at in self._heard_at.items()
            if now - at > self._timeout_s
        ]
        stuck = [Death(name, f"{name} {problem}") for name, problem in self._problems.items() if problem]
        return silent + stuck

    def _forgive_own_absence(self) -> None:
        now = self._clock()
        absent_s = now - self._looked_at - _SHARE_OF_A_LOOK * self._timeout_s
        if absent_s > 0:
            self._heard_at = {name: min(now, at + absent_s) for name, at in self._heard_at.items()}
        self._looked_at = now


class Restarts:
    """Bounded attempts with a growing delay. Attempts older than `_WINDOW_S` do not count."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._attempts: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """Count an attempt and return how long to wait before it; None if there were too many attempts already."""
        now = self._clock()
        while self._attempts and now - self._attempts[0] > _WINDOW_S:
            self._attempts.popleft()
        if len(self._attempts) >= self._most:
            return None
        self._attempts.append(now)
        made = len(self._attempts) - 1
        return 0.0 if made == 0 else float(min(_FIRST_DELAY_S * 2**made, _LONGEST_DELAY_S))
