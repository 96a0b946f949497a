"""Calls of the ingress to a model, with a deadline; failures of Serve become errors for the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import ClientDisconnect, Request

from rayspec.openai.protocol import INTERNAL
from rayspec.openai.responses import END_OF_EVENTS, event
from rayspec.serve.access import BUSY, GONE, Refused, timed_out

T = TypeVar("T")


class Deadline:
    """The end of the time for an answer. timeout_s: from now; None: no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    async def within(self, awaitable: Awaitable[T]) -> T:
        """Return the result. Raises Refused where it does not come in time."""
        left_s = None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
        try:
            return await asyncio.wait_for(awaitable, left_s)
        except asyncio.TimeoutError as error:
            raise Refused(timed_out(self._timeout_s or 0.0)) from error


class ModelCall:
    """A call of a model under way. response: Serve's. deadline: of the whole call."""

    def __init__(self, response: Any, deadline: Deadline) -> None:
        self._response, self._deadline = response, deadline

    async def next(self) -> Any:
        """Return the next item of a stream. Raises StopAsyncIteration, and Refused where the call failed."""
        return await self.in_time(anext(self._response))

    async def events(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """Yield `first` and the events of a stream after it. If the model is lost, the last event is an error."""
        yield first
        try:
            while True:
                yield await self.next()
        except StopAsyncIteration:
            return
        except Refused as refused:
            failure = refused.error
        yield event(failure) + END_OF_EVENTS

    def cancel(self) -> None:
        """End the call if it has not ended. Serve raises the error of a call that has failed before; ignore it."""
        with suppress(RayServeException, RayError):
            self._response.cancel()

    async def in_time(self, awaitable: Awaitable[Any]) -> Any:
        """Return a result of the call, of any type. Raises Refused where the call failed."""
        try:
            return await self._deadline.within(awaitable)
        except BackPressureError as error:
            raise Refused(BUSY) from error
        except RayTaskError as error:
            raise Refused(INTERNAL) from error
        except (RayServeException, RayError) as error:  # Serve's own and, where a replica has ended, Ray's
            raise Refused(GONE) from error


async def fetch(response: Any, deadline: Deadline) -> Any:
    """Return the result of a call, see `ModelCall`. Cancelling the wait cancels the call. Raises Refused."""
    call = ModelCall(response, deadline)
    try:
        return await call.in_time(response)
    except (Refused, asyncio.CancelledError):
        call.cancel()
        raise


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work. If the client hangs up, cancel the work and raise ClientDisconnect."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    # A call that is cancelled may fail instead. Nobody waits for its error then, which asyncio would log.
    working.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
