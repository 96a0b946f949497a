"""Which committed tokens the plan search may look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayspec.decode.plan_search import TappedToken


class TapLog:
    """The tokens tapped last, of sequences that are still where they were when they were tapped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._tokens: deque[TappedToken] = deque(maxlen=capacity)

    @property
    def tokens(self) -> list[TappedToken]:
        return list(self._tokens)

    def add(self, tokens: Iterable[TappedToken]) -> None:
        self._tokens.extend(tokens)

    def drop(self, sequence_id: str) -> None:
        kept = [token for token in self._tokens if token.sequence_id != sequence_id]
        self._tokens = deque(kept, maxlen=self.capacity)

    def clear(self) -> None:
        self._tokens.clear()
