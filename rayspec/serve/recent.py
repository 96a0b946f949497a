"""Rates of the last seconds, from counters that only grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayspec.types import EngineStats

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    time_s: float
    num_generated: int
    num_drafted: int
    num_accepted: int
    num_drafted_rounds: int

    @classmethod
    def of(cls, stats: EngineStats, time_s: float) -> _Counts:
        return cls(
            time_s=time_s,
            num_generated=stats.num_generated_tokens,
            num_drafted=stats.num_draft_tokens,
            num_accepted=stats.num_accepted_tokens,
            num_drafted_rounds=stats.num_rounds - stats.num_plain_rounds,
        )


class RecentRates:
    """Fed with an engine's counters now and then; looks back over `window_s` seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._counts: deque[_Counts] = deque()

    def add(self, stats: EngineStats, time_s: float) -> None:
        """time_s: of a clock that never goes back."""
        self._counts.append(_Counts.of(stats, time_s))
        while time_s - self._counts[0].time_s > self._window_s:
            self._counts.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all sequences, since the first one of a burst where it is younger than the window."""
        busy = [one for one in self._counts if one.num_generated > self._counts[0].num_generated]
        if not busy:
            return 0.0
        begin = self._counts[len(self._counts) - len(busy) - 1]
        return (self._counts[-1].num_generated - begin.num_generated) / (self._counts[-1].time_s - begin.time_s)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens; None where nothing was drafted."""
        drafted = self._grown("num_drafted")
        return self._grown("num_accepted") / drafted if drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens committed a drafted round, as in EngineStats."""
        rounds = self._grown("num_drafted_rounds")
        return 1 + self._grown("num_accepted") / rounds if rounds else None

    def _grown(self, name: str) -> int:
        if not self._counts:
            return 0
        grown: int = getattr(self._counts[-1], name) - getattr(self._counts[0], name)
        return grown
