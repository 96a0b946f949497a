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

from rayspec.openai.errors import ApiError
from rayspec.openai.responses import END_OF_EVENTS, event
from rayspec.serve.replies import BUSY, GONE, INTERNAL, Refused, Reply, timed_out

T = TypeVar("T")

# Errors that a handle raises: Serve's own and, where a replica has ended, Ray's.
_CARRIER_ERRORS = (RayServeException, RayError, asyncio.TimeoutError)


class Deadline:
    """A deadline for several waits. timeout_s: seconds from now; None: no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s if timeout_s is not None else None

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Return the result of the awaitable. Raises asyncio.TimeoutError at the deadline."""
        if self._end_s is None:
            return await awaitable
        return await asyncio.wait_for(awaitable, max(0.0, self._end_s - time.monotonic()))

    def failure(self, error: BaseException) -> ApiError:
        """Return the error that the client of a failed call gets."""
        if isinstance(error, BackPressureError):
            return BUSY
        if isinstance(error, asyncio.TimeoutError):
            return timed_out(self._timeout_s or 0.0)
        return INTERNAL if isinstance(error, RayTaskError) else GONE


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work. If the client hangs up, cancel the work and raise ClientDisconnect. The HTTP
    server only tells that a client has left; it cancels nothing."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()


async def fetch(response: Any, timeout_s: float | None) -> Any:
    """Return the result of a call, of any type. response: Serve's, of a call under way; cancelling the wait cancels the
    call. Raises Refused where the call failed."""
    deadline = Deadline(timeout_s)

    async def outcome() -> Any:
        return await response

    try:
        return await deadline.wait(outcome())
    except _CARRIER_ERRORS as error:
        _cancel(response)
        raise Refused(deadline.failure(error)) from error
    except asyncio.CancelledError:
        _cancel(response)
        raise


def _cancel(response: Any) -> None:
    """Cancel a call. Serve raises the error of a call that has failed before; ignore it."""
    with suppress(RayServeException, RayError):
        response.cancel()


class Relay:
    """Passes a model's stream on to the client. Call `begin`, then `events`, and in any case `close`.

    response: Serve's, of a call under way that yields a reply and then server-sent events.
    """

    def __init__(self, response: Any, timeout_s: float | None) -> None:
        self._response = response
        self._deadline = Deadline(timeout_s)

    async def begin(self) -> Reply:
        """Return the reply. If it is ok, its body is the first event; otherwise there are no events. Raises Refused."""
        try:
            reply: Reply = await self._next()
        except _CARRIER_ERRORS as error:
            raise Refused(self._deadline.failure(error)) from error
        return reply

    async def events(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """Yield `first` and the events after it. If the model is lost, the last event is an error."""
        yield first
        try:
            while True:
                yield await self._next()
        except StopAsyncIteration:
            return
        except _CARRIER_ERRORS as error:
            failure = self._deadline.failure(error)
        yield event(failure) + END_OF_EVENTS

    def close(self) -> None:
        """End the request if it has not ended."""
        _cancel(self._response)

    async def _next(self) -> Any:
        return await self._deadline.wait(anext(self._response))
