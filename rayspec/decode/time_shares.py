"""Measure the seconds of each work item while several run at the same time."""

from __future__ import annotations

from collections.abc import Callable


class TimeShares:
    """Divides every second evenly among the work items under way, so that no second is counted twice."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0
        self._share_s: dict[int, float] = {}

    def begin(self, work_id: int) -> None:
        self._divide()
        self._share_s[work_id] = 0.0

    def end(self, work_id: int) -> float:
        """End the work and return its share of the time, in seconds."""
        self._divide()
        return self._share_s.pop(work_id)

    def clear(self) -> None:
        """Forget all work under way."""
        self._share_s.clear()

    def _divide(self) -> None:
        now = self._clock()
        for work_id in self._share_s:
            self._share_s[work_id] += (now - self._since) / len(self._share_s)
        self._since = now
