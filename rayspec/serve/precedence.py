"""Priority of interactive requests over batch lines in a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

_MOST_SHARE = 0.75  # the rest stays free for the next interactive request


class Precedence:
    """Counts the sequences of one event loop. num_places: sequences that the engine decodes at once.

    Batch lines wait while requests and lines together take three quarters of the places. One line may always run, so
    that a batch makes progress under any load. A running line is not interrupted.
    """

    def __init__(self, num_places: int) -> None:
        self._most = max(1, int(num_places * _MOST_SHARE))
        self._num_interactive = 0
        self._num_lines = 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def interactive(self, num_sequences: int) -> Iterator[None]:
        """Count an interactive request while the context is open."""
        self._num_interactive += num_sequences
        try:
            yield
        finally:
            self._num_interactive -= num_sequences
            self._let_in()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """Wait for room, then count a batch line while the context is open."""
        while not self._has_room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._num_lines += 1
        try:
            yield
        finally:
            self._num_lines -= 1
            self._let_in()

    @property
    def _has_room(self) -> bool:
        return self._num_lines == 0 or self._num_lines + self._num_interactive < self._most

    def _let_in(self) -> None:
        """Let waiting lines check again for room, in their order."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
