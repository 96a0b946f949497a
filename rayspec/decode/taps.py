"""The committed tokens that the plan search may use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayspec.decode.work import TappedToken


class TapLog:
    """The last tapped tokens whose sequences have kept their places in the KV cache.

    A dropped token keeps its place in the log until new tokens push it out, as its states do in the stages. So every
    token in the log still has its states there.
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
