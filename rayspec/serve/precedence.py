"""Lines of batches run where interactive requests leave room in a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

_MOST_SHARE = 0.75  # the rest is free for a request that comes while no other does


class Precedence:
    """Counts sequences of one event loop. num_places: sequences that the engine decodes at once.

    Batch lines wait while interactive requests and they take three quarters of the places; one line always runs, so
    that a batch goes on under any load. A line that runs is not interrupted.
    """

    def __init__(self, num_places: int) -> None:
        self._most = max(1, int(num_places * _MOST_SHARE))
        self._num_interactive = 0
        self._num_lines = 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def interactive(self, num_sequences: int) -> Iterator[None]:
        """While the request is under way."""
        self._num_interactive += num_sequences
        try:
            yield
        finally:
            self._num_interactive -= num_sequences
            self._let_in()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """Waits its turn."""
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
        """Those that wait look again, in their order."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
