"""Answers on their way to clients, within a limit on what waits in memory until clients read it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rayspec.serve.calls import ModelCall

_logger = logging.getLogger(__name__)
_MOST_BYTES = 2**27  # the largest answer has about 100 MB
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not buffer the stream


class Unread:
    """Counts the bytes of answers that clients have not read. While there are more than `most`, the largest answer of
    the client that has most is broken off: clients that hardly read must not take all memory."""

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._most = most
        self._sending: dict[Response, tuple[str, asyncio.Task[None]]] = {}
        self._num_bytes: Counter[Response] = Counter()

    async def send(self, answer: Response, sending: Coroutine[Any, Any, None], client: str, num_bytes: int = 0) -> None:
        """Send an answer, which has so many bytes from the beginning. Return early where it is broken off."""
        task = asyncio.ensure_future(sending)
        self._sending[answer] = client, task
        self.add(answer, num_bytes)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            del self._sending[answer], self._num_bytes[answer]

    def add(self, answer: Response, num_bytes: int) -> None:
        """Count more bytes of an answer, or fewer, that wait. An answer that has ended counts no more."""
        if answer not in self._sending:
            return
        self._num_bytes[answer] += num_bytes
        if num_bytes > 0 and self._num_bytes.total() > self._most:
            self._break_off()

    def _break_off(self) -> None:
        of_clients: Counter[str] = Counter()
        for answer, num_unread in self._num_bytes.items():
            of_clients[self._sending[answer][0]] += num_unread
        client = max(of_clients, key=of_clients.__getitem__)
        own = (answer for answer in self._num_bytes if self._sending[answer][0] == client)
        largest = max(own, key=self._num_bytes.__getitem__)
        if self._sending[largest][1].cancel():
            _logger.warning("an answer is broken off: its client has not read %d bytes of it", self._num_bytes[largest])


class WholeAnswer(Response):
    """A response of JSON. client: as of `Entry`."""

    def __init__(self, body: bytes, unread: Unread, client: str) -> None:
        super().__init__(body, media_type="application/json")
        self._unread, self._client = unread, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._unread.send(self, super().__call__(scope, receive, send), self._client, len(self.body))


class EventStream(StreamingResponse):
    """A response of server-sent events: `first` and those of the call. held: ends when the model has finished, or when
    the response ends for any other reason; then the model's request ends, too."""

    def __init__(self, call: ModelCall, first: bytes, held: ExitStack, unread: Unread, client: str) -> None:
        super().__init__(self._read(), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._events, self._held = call.events(first), held
        self._unread, self._client = unread, client
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._receiving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receiving = asyncio.create_task(self._receive())
        try:
            await self._unread.send(self, super().__call__(scope, receive, send), self._client)
        finally:
            self._receiving.cancel()
            self._held.close()

    async def _receive(self) -> None:
        """Take the events as they come: those that their client does not read would wait uncounted elsewhere."""
        try:
            async for event in self._events:
                self._unread.add(self, len(event))
                self._arrived.put_nowait(event)
        finally:
            self._held.close()
            self._arrived.put_nowait(None)

    async def _read(self) -> AsyncIterator[bytes]:
        while (event := await self._arrived.get()) is not None:
            yield event
            self._unread.add(self, -len(event))
        if self._receiving is not None:
            await self._receiving  # raises what ended it
