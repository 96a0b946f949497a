"""Rates of the last seconds, from counters that only grow."""

from __future__ import annotations

import copy
from collections import deque

from rayspec.types import EngineStats

WINDOW_S = 10.0


class RecentRates:
    """Computes rates over the last `window_s` seconds, from samples of an engine's counters."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._counts: deque[tuple[float, EngineStats]] = deque()

    def add(self, stats: EngineStats, time_s: float) -> None:
        """Add a sample. time_s: of a monotonic clock."""
        self._counts.append((time_s, copy.copy(stats)))
        while time_s - self._counts[0][0] > self._window_s:
            self._counts.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Rate of generated tokens over all sequences. Idle time at the beginning of the window does not count."""
        busy = [one for _, one in self._counts if one.num_generated_tokens > self._counts[0][1].num_generated_tokens]
        if not busy:
            return 0.0
        (begin_s, begin), (end_s, end) = self._counts[len(self._counts) - len(busy) - 1], self._counts[-1]
        return (end.num_generated_tokens - begin.num_generated_tokens) / (end_s - begin_s)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens; None where nothing was drafted."""
        drafted = self._grown("num_draft_tokens")
        return self._grown("num_accepted_tokens") / drafted if drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Committed tokens per drafted round, as in EngineStats; None without such a round."""
        rounds = self._grown("num_rounds") - self._grown("num_plain_rounds")
        return 1 + self._grown("num_accepted_tokens") / rounds if rounds else None

    def _grown(self, name: str) -> int:
        if not self._counts:
            return 0
        grown: int = getattr(self._counts[-1][1], name) - getattr(self._counts[0][1], name)
        return grown
