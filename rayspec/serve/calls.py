"""Calls of the ingress to a model, with a deadline; failures of Serve become errors for the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from rayspec.openai.encoding import END_OF_EVENTS, event
from rayspec.openai.errors import ApiError
from rayspec.serve.replies import BUSY, GONE, INTERNAL, Reply, timed_out

T = TypeVar("T")

# What a handle raises: Serve's own errors and, where a replica has ended, Ray's.
_CARRIER_ERRORS = (RayServeException, RayError, asyncio.TimeoutError)


class Deadline:
    """timeout_s: from now on; None: never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s if timeout_s is not None else None

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Raises asyncio.TimeoutError."""
        if self._end_s is None:
            return await awaitable
        return await asyncio.wait_for(awaitable, max(0.0, self._end_s - time.monotonic()))

    def failure(self, error: BaseException) -> ApiError:
        """The error for the client of a call that failed."""
        if isinstance(error, BackPressureError):
            return BUSY
        if isinstance(error, asyncio.TimeoutError):
            return timed_out(self._timeout_s or 0.0)
        return INTERNAL if isinstance(error, RayTaskError) else GONE


async def call(response: Any, timeout_s: float | None) -> Reply:
    """The reply of a model. response: Serve's, of a call that has been made; it is cancelled if the wait is."""
    found: Reply | ApiError = await fetch(response, timeout_s)
    return Reply.failed(found) if isinstance(found, ApiError) else found


async def fetch(response: Any, timeout_s: float | None) -> Any:
    """As `call`, for what is no reply; an ApiError where the call could not be carried out."""
    deadline = Deadline(timeout_s)
    try:
        return await deadline.wait(_outcome(response))
    except _CARRIER_ERRORS as error:
        _cancel(response)
        return deadline.failure(error)
    except asyncio.CancelledError:
        _cancel(response)
        raise


async def _outcome(response: Any) -> Any:
    return await response


def _cancel(response: Any) -> None:
    """Serve raises what the call ended of, where it has."""
    with suppress(RayServeException, RayError):
        response.cancel()


class Relay:
    """A stream of a model on its way to the client: `begin`, then `events`, and in any case `close`.

    response: Serve's, of a call that has been made and gives a reply and then server-sent events.
    """

    def __init__(self, response: Any, timeout_s: float | None) -> None:
        self._response = response
        self._deadline = Deadline(timeout_s)

    async def begin(self) -> Reply:
        """Not ok: there will be no events. Otherwise its body is the first of them."""
        try:
            reply: Reply = await self._next()
        except _CARRIER_ERRORS as error:
            return Reply.failed(self._deadline.failure(error))
        return reply

    async def events(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """`first` and what follows it. A model that is lost on the way is one more event."""
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
        """Ends the request where it has not ended."""
        _cancel(self._response)

    async def _next(self) -> Any:
        return await self._deadline.wait(anext(self._response))
