"""Which committed tokens the plan search may look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayspec.decode.plan_search import TappedToken


class TapLog:
    """The tokens tapped last, of sequences that are still where they were then.

    A token that is dropped keeps its place until it is pushed out, as its states do in the stages: what is here is
    there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._places: deque[TappedToken | None] = deque(maxlen=capacity)

    @property
    def tokens(self) -> list[TappedToken]:
        return [token for token in self._places if token is not None]

    def add(self, tokens: Iterable[TappedToken]) -> None:
        self._places.extend(tokens)

    def drop(self, sequence_id: str) -> None:
        kept = [token if token and token.sequence_id != sequence_id else None for token in self._places]
        self._places = deque(kept, maxlen=self.capacity)

    def clear(self) -> None:
        self._places.clear()
