"""Limits how often an engine is started again without progress in between."""

from __future__ import annotations

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 30.0


class RestartBudget:
    """Bounded restarts with a growing delay.

    Time alone never renews the budget, unlike that of `pipeline.recovery.Restarts`: an engine may take longer to load
    than any window.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._delay_s = 0.0

    def next_delay_s(self) -> float | None:
        """Count a restart and return how long to wait before it; None when the budget is spent."""
        if self._num_restarts >= self._max_restarts:
            return None
        self._num_restarts += 1
        delay_s, self._delay_s = self._delay_s, max(_FIRST_DELAY_S, min(2 * self._delay_s, _LONGEST_DELAY_S))
        return delay_s

    def renew(self) -> None:
        self._num_restarts = 0
        self._delay_s = 0.0
