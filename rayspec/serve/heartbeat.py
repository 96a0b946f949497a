"""Liveness of an engine's loop, which can be read at any moment without waiting for the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rayspec.types import RayspecError

PERIOD_S = 0.5


class Heartbeat:
    """Pings the engine repeatedly.

    ping: returns when the engine's loop has answered; raises RayspecError where the engine is dead. clock: monotonic,
    in seconds.
    """

    def __init__(self, ping: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ping, self._clock = ping, clock
        self._asked_s: float | None = None
        self.failure: RayspecError | None = None

    @property
    def silent_s(self) -> float:
        """Seconds that the newest ping has waited for its answer; 0 if it is answered."""
        return 0.0 if self._asked_s is None else self._clock() - self._asked_s

    async def keep(self) -> None:
        """Ping until cancelled, with pauses of PERIOD_S."""
        while True:
            await self.beat()
            await asyncio.sleep(PERIOD_S)

    async def beat(self) -> None:
        """Ping once, and keep the error, if any, in `failure`."""
        self._asked_s = self._clock()
        try:
            await self._ping()
        except RayspecError as error:
            self.failure = error
        else:
            self.failure = None
        self._asked_s = None
