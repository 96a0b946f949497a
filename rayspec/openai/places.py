"""Places for work that takes memory or time, which clients share."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager


class Places:
    """Work waits for places, of which there are `most`. Its weight is how many it takes; work of a larger weight takes
    all of them.

    Clients take turns: the next is the first work of the client that has the fewest places; of several, the one that
    waits for longest, or whose client got none for as long. So a client waits for one turn of each other client at
    most, however much work these have. Places are not taken back from work that goes on for long. So while none is
    free, a client may still have its equal share: `most`, divided by the clients that have places or wait, and `least`
    at least.
    """

    def __init__(self, most: int, *, least: int = 0) -> None:
        self._most, self._least = most, least
        self._held: Counter[str] = Counter()
        # By client, the weights of the turns that wait with a number that grows; and when it last got a place.
        self._waiting: dict[str, dict[asyncio.Future[None], tuple[int, int]]] = {}
        self._newest: dict[str, int] = {}
        self._numbers = itertools.count()

    def resize(self, most: int) -> None:
        """Change how many there are. Work that has places keeps them."""
        self._most = most
        self._let_in()

    @asynccontextmanager
    async def take(self, client: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for the places, and have them while the context is open."""
        with ExitStack() as held:
            await self.ask(client, held, weight)
            yield

    def ask(self, client: str, held: ExitStack, weight: int = 1) -> asyncio.Future[None]:
        """Return a turn, which is done when the work has its places. The end of `held` takes both back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, {})[turn] = weight, next(self._numbers)
        held.callback(self._leave, client, turn, weight)
        self._let_in()
        return turn

    def _leave(self, client: str, turn: asyncio.Future[None], weight: int) -> None:
        if not self._no_longer_waits(client, turn):
            self._held[client] -= weight
            self._held += Counter()  # drops clients that have none
        self._let_in()

    def _no_longer_waits(self, client: str, turn: asyncio.Future[None]) -> bool:
        """Remove a turn from those that wait. Return whether it was one of them."""
        turns = self._waiting.get(client, {})
        if turns.pop(turn, None) is None:
            return False
        if not turns:
            del self._waiting[client]
            self._newest.pop(client, None)  # it is older than the next that is asked for
        return True

    def _let_in(self) -> None:
        """Let work begin. It takes no longer for clients of which more work waits."""
        while (client := self._next()) is not None:
            turn, (weight, _) = next(iter(self._waiting[client].items()))
            self._no_longer_waits(client, turn)
            self._held[client] += weight
            if client in self._waiting:
                self._newest[client] = next(self._numbers)
            if not turn.done():  # else it is cancelled, and about to leave
                turn.set_result(None)

    def _next(self) -> str | None:
        """Return the client whose first work may begin."""
        num_held, share = self._held.total(), self._most // max(1, len(self._held.keys() | self._waiting.keys()))
        firsts = []
        for client, turns in self._waiting.items():
            weight, number = next(iter(turns.values()))
            firsts.append((self._held[client], max(number, self._newest.get(client, 0)), weight, client))
        for place, (held, _, weight, client) in enumerate(sorted(firsts)):
            is_next = place == 0 and (not num_held or num_held + weight <= self._most)
            if is_next or held + weight <= max(share, self._least):
                return client
        return None
