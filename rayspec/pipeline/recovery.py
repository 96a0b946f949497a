"""When a process counts as dead, and how often a replica is brought back. Decides only; acting is `RayStages`' work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# A process that has computed one thing for so long is stuck.
STUCK_AFTER_S = 300.0
# So much of the timeout counts as silence, at most, from one look at the others to the next.
_SHARE_OF_A_LOOK = 0.25
_WINDOW_S = 600.0
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Death:
    name: str
    reason: str


class Pulse:
    """Heartbeats of the processes of a replica, by name. Times are of the injected clock, seconds.

    Silence is what was listened to: who looks for `deaths` after a long while was away itself, and perhaps everyone was
    (a virtual machine that was suspended). Of that time only a part counts.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock()
        self._heard_at: dict[str, float] = {}
        self._stuck: dict[str, float] = {}

    def watch(self, names: Iterable[str]) -> None:
        """From now on these are expected to be heard of, and no others."""
        self._looked_at = self._clock()
        self._heard_at = dict.fromkeys(names, self._looked_at)
        self._stuck.clear()

    def hear(self, name: str, busy_s: float = 0.0) -> None:
        if name in self._heard_at:
            self._heard_at[name] = self._clock()
            self._stuck[name] = busy_s

    def deaths(self) -> list[Death]:
        """Who is silent for too long, or busy with one thing for too long."""
        self._forgive_own_absence()
        now = self._clock()
        silent = [
            Death(name, f"{name} has not been heard of for {now - at:.1f} s")
            for name, at in self._heard_at.items()
            if now - at > self._timeout_s
        ]
        stuck = [
            Death(name, f"{name} has been busy with one thing for {busy_s:.0f} s")
            for name, busy_s in self._stuck.items()
            if busy_s > STUCK_AFTER_S
        ]
        return silent + stuck

    def _forgive_own_absence(self) -> None:
        now = self._clock()
        absent_s = now - self._looked_at - _SHARE_OF_A_LOOK * self._timeout_s
        if absent_s > 0:
            self._heard_at = {name: min(now, at + absent_s) for name, at in self._heard_at.items()}
        self._looked_at = now


class Restarts:
    """Bounded attempts with a growing delay. Attempts long ago do not count."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._attempts: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """How long to wait before the next attempt; None when there were enough. Counts as an attempt."""
        now = self._clock()
        while self._attempts and now - self._attempts[0] > _WINDOW_S:
            self._attempts.popleft()
        if len(self._attempts) >= self._most:
            return None
        self._attempts.append(now)
        made = len(self._attempts) - 1
        return 0.0 if made == 0 else float(min(_FIRST_DELAY_S * 2**made, _LONGEST_DELAY_S))
