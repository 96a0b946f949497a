"""Pass the partial outputs of a streaming request (pieces) from an engine's threads to a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from rayspec.types import CompletionOutput, RequestOutput


class PieceQueue:
    """Queue for the pieces of one request. Any thread may put pieces; one coroutine of the event loop that created the
    queue reads them.

    interval_s: minimum seconds between two readings; pieces that arrive meanwhile are joined. The first piece and the
    end of the output do not wait. With 0, only pieces that arrive while the reader is busy are joined.
    """

    def __init__(self, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._due_s = 0.0  # by the event loop's clock
        self._arrived: deque[RequestOutput | Future[RequestOutput]] = deque()
        self._is_announced = False
        self._ready = asyncio.Event()

    def put(self, piece: RequestOutput) -> None:
        self._arrived.append(piece)
        if not self._is_announced:  # `_take` resets it before it reads, so every piece is announced
            self._is_announced = True
            self._call(self._announce)

    def end(self, outcome: Future[RequestOutput]) -> None:
        """Put the end of the output. outcome: a future that is done and holds the last piece or an error."""
        self._arrived.append(outcome)
        self._call(self._ready.set)

    async def read(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the pieces, joined, and then the last. Raises the outcome's exception after all earlier pieces. Pieces
        before a failed output are not joined to it."""
        while True:
            pieces, outcome = await self._take()
            if outcome is None:
                yield joined(pieces)
                continue
            if pieces and (outcome.exception() is not None or outcome.result().error is not None):
                yield joined(pieces)
                pieces = []
            yield joined([*pieces, outcome.result()])
            return

    async def _take(self) -> tuple[list[RequestOutput], Future[RequestOutput] | None]:
        """Wait for at least one item. Return all pieces that have arrived and, if it has arrived, the outcome."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._is_announced = False
            pieces: list[RequestOutput] = []
            while self._arrived:
                item = self._arrived.popleft()
                if isinstance(item, Future):
                    return pieces, item
                pieces.append(item)
            if pieces:
                self._due_s = self._loop.time() + self._interval_s
                return pieces, None

    def _announce(self) -> None:
        if self._loop.time() >= self._due_s:
            self._ready.set()
        else:
            self._loop.call_at(self._due_s, self._ready.set)

    def _call(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(tell)


def joined(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """Join successive pieces of a request into one."""
    if len(pieces) == 1:
        return pieces[0]
    parts: dict[int, list[CompletionOutput]] = {}
    for piece in pieces:
        for one in piece.outputs:
            parts.setdefault(one.index, []).append(one)
    return replace(pieces[-1], outputs=[_joined_completion(each) for each in parts.values()])


def _joined_completion(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        text="".join(one.text for one in parts),
        token_ids=tuple(token_id for one in parts for token_id in one.token_ids),
        logprobs=[row for one in parts for row in one.logprobs or ()] or None,
    )
