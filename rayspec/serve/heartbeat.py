"""Whether an engine's loop comes round, known at any moment without waiting for the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rayspec.types import RayspecError

PERIOD_S = 0.5


class Heartbeat:
    """Pings the engine again and again.

    ping: returns when the engine's loop has come round; raises RayspecError where the engine is dead. clock: in
    seconds, never goes back.
    """

    def __init__(self, ping: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ping, self._clock = ping, clock
        self._asked_s: float | None = None
        self.failure: RayspecError | None = None

    @property
    def silent_s(self) -> float:
        """How long the newest ping has been without an answer."""
        return 0.0 if self._asked_s is None else self._clock() - self._asked_s

    async def keep(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(PERIOD_S)

    async def beat(self) -> None:
        """One ping."""
        self._asked_s = self._clock()
        try:
            await self._ping()
        except RayspecError as error:
            self.failure = error
        else:
            self.failure = None
        self._asked_s = None
