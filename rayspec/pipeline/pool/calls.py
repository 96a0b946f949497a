"""Calls to an actor in batches, whose outcomes return in batches too.

A call of an actor costs both processes about a millisecond, whatever its size. Here one message carries all items that
were handed in meanwhile, and one stream returns the outcomes of all items in the order in which they are ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import RayError

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.pool.recipe import Tell
from rayspec.types import RayspecError

_LINGER_S = 0.003  # outcomes that are ready within this time are sent together


@dataclass(frozen=True, slots=True)
class Call:
    """An item to be handled. number: unique among the calls of one caller."""

    number: int
    item: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """New output of a call: a part of the result, or finally (`is_last`) the whole result or the error."""

    number: int
    value: Any = None
    error: Exception | None = None
    is_last: bool = True


class CalledHere:
    """The actor's end of batched calls. handle: returns the result for an item, and may report parts of it before."""

    def __init__(self, handle: Callable[[Any, Tell], Awaitable[Any]]) -> None:
        self._handle = handle
        self._ready: asyncio.Queue[Outcome] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, calls: Sequence[Call]) -> None:
        loop = asyncio.get_running_loop()
        for call in calls:
            self._tasks[call.number] = loop.create_task(self._run(call, loop))

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def outcomes(self) -> AsyncGenerator[list[Outcome], None]:
        """Yield the outcomes of all calls, in the order in which they are ready. Never ends; iterate it only once."""
        while True:
            ready = [await self._ready.get()]
            await asyncio.sleep(_LINGER_S)
            while not self._ready.empty():
                ready.append(self._ready.get_nowait())
            yield ready

    async def _run(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        def tell(part: Any) -> None:
            loop.call_soon_threadsafe(self._ready.put_nowait, Outcome(call.number, part, is_last=False))

        try:
            self._ready.put_nowait(Outcome(call.number, await self._handle(call.item, tell)))
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._ready.put_nowait(Outcome(call.number, error=_fit_to_travel(error)))
        finally:
            del self._tasks[call.number]


@dataclass(slots=True)
class _Waiting:
    future: asyncio.Future[Any]
    tell: Tell | None


class BatchedCalls:
    """The caller's end of batched calls, for coroutines of one event loop.

    actor: handle of an actor with the methods `take`, `cancel` and `outcomes` of CalledHere. on_end: converts the error
    that Ray raises when the actor has ended to the error of all calls.
    """

    def __init__(self, actor: Any, on_end: Callable[[RayError], Exception]) -> None:
        self._actor, self._on_end = actor, on_end
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: list[Call] = []
        self._reader: asyncio.Task[None] | None = None
        self._end: Exception | None = None

    async def __call__(self, item: Any, tell: Tell | None = None) -> Any:
        """Return the result for an item. tell: takes the parts of the result. Raises the error of the actor's handler,
        or the error from `on_end` when the actor has ended. Cancelling the wait cancels the call."""
        loop = asyncio.get_running_loop()
        if self._end is not None:
            raise self._end
        if self._reader is None:
            self._reader = loop.create_task(self._read())
        number = next(self._numbers)
        waiting = self._waiting[number] = _Waiting(loop.create_future(), tell)
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(Call(number, item))
        try:
            return await waiting.future
        except asyncio.CancelledError:
            loop.call_soon(partial(self._actor.cancel.remote, [number]))  # after the call itself
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Give up the actor: unfinished and later calls fail with EngineDeadError."""
        if self._reader is not None:
            self._reader.cancel()
        self._fail(EngineDeadError("the engine was given up"))

    def _send(self) -> None:
        calls, self._unsent = self._unsent, []
        self._actor.take.remote(calls)

    async def _read(self) -> None:
        try:
            async for reference in self._actor.outcomes.options(num_returns="streaming").remote():
                for outcome in await reference:
                    self._settle(outcome)
        except RayError as error:
            self._fail(self._on_end(error))

    def _fail(self, error: Exception) -> None:
        self._end = self._end or error
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(self._end)

    def _settle(self, outcome: Outcome) -> None:
        waiting = self._waiting.get(outcome.number)
        if waiting is None or waiting.future.done():
            return
        if not outcome.is_last:
            if waiting.tell is not None:
                waiting.tell(outcome.value)
        elif outcome.error is not None:
            waiting.future.set_exception(outcome.error)
        else:
            waiting.future.set_result(outcome.value)


def _fit_to_travel(error: Exception) -> Exception:
    """Return the error, or a RayspecError with its text if it cannot be pickled and restored."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):  # noqa: S301 - our own bytes
            return error
    return RayspecError(f"{type(error).__name__}: {error}")
