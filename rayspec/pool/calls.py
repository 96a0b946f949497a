"""Calls to an actor in batches, whose outcomes return in batches too.

A call of an actor costs both processes about a millisecond, whatever its size. Here one message carries all items that
were handed in meanwhile, and one stream returns the outcomes of all items in the order in which they are ready.

Each item and each result is pickled by itself, so one that cannot be pickled or restored is an error of its own call.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayActorError, RayError

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import RayspecError, RequestError

Callback = Callable[[Any], None]
"""Takes a new part of an item's result before the item is done. Any thread may call it."""

_LINGER_S = 0.003  # outcomes that are ready within this time are sent together


@dataclass(frozen=True, slots=True)
class ItemCall:
    """An item to be handled, pickled. number: unique among the calls of one caller."""

    number: int
    item: bytes


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """New output of a call, pickled: a part of the result, or finally (`is_last`) the whole result or the error."""

    number: int
    value: bytes
    is_error: bool = False
    is_last: bool = True


class CalledHere:
    """The actor's end of batched calls. handle: returns the result for an item, and may report parts of it before."""

    def __init__(self, handle: Callable[[Any, Callback], Awaitable[Any]]) -> None:
        self._handle = handle
        self._ready: asyncio.Queue[CallOutcome] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, calls: Sequence[ItemCall]) -> None:
        loop = asyncio.get_running_loop()
        for call in calls:
            self._tasks[call.number] = loop.create_task(self._run(call, loop))

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def outcomes(self) -> AsyncGenerator[list[CallOutcome], None]:
        """Yield the outcomes of all calls, in the order in which they are ready. Never ends; iterate it only once."""
        while True:
            ready = [await self._ready.get()]
            await asyncio.sleep(_LINGER_S)
            while not self._ready.empty():
                ready.append(self._ready.get_nowait())
            yield ready

    async def _run(self, call: ItemCall, loop: asyncio.AbstractEventLoop) -> None:
        def callback(part: Any) -> None:
            loop.call_soon_threadsafe(self._ready.put_nowait, _outcome(call.number, part, is_last=False))

        try:
            item = _restored(call.item, "the item")
            self._ready.put_nowait(_outcome(call.number, await self._handle(item, callback)))
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._ready.put_nowait(CallOutcome(call.number, _pickled_error(error), is_error=True))
        finally:
            del self._tasks[call.number]


@dataclass(slots=True)
class _UnderWay:
    future: asyncio.Future[Any]
    callback: Callback | None


class BatchedCalls:
    """The caller's end of batched calls, for coroutines of one event loop.

    actor: handle of an actor with the methods `take`, `cancel` and `outcomes` of CalledHere. on_end: converts the error
    that Ray raises when the actor has ended to the error of all calls.
    """

    def __init__(self, actor: Any, on_end: Callable[[RayError], Exception]) -> None:
        self._actor, self._on_end = actor, on_end
        self._numbers = itertools.count()
        self._waiting: dict[int, _UnderWay] = {}
        self._unsent: list[ItemCall] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._end: Exception | None = None

    async def __call__(self, item: Any, callback: Callback | None = None) -> Any:
        """Return the result for an item. callback: takes the parts of the result. Cancelling the wait cancels the call.
        Raises the error of the actor's handler, the error from `on_end` when the actor has ended, and RequestError if
        the item or the result cannot be sent."""
        loop = asyncio.get_running_loop()
        if self._end is not None:
            raise self._end
        if self._reader is None:
            self._reader = loop.create_task(self._read())
        packed = _pickled(item, "the item")
        number = next(self._numbers)
        waiting = self._waiting[number] = _UnderWay(loop.create_future(), callback)
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(ItemCall(number, packed))
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
        try:
            reference = self._actor.take.remote(calls)
        except RayError as error:  # such as a full object store
            self._refuse(calls, error)
            return
        sending = asyncio.get_running_loop().create_task(self._arrive(calls, reference))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _arrive(self, calls: Sequence[ItemCall], reference: Any) -> None:
        """Wait until the actor has the calls."""
        try:
            await reference
        except RayActorError:
            return  # the reader learns of the actor's end too, and reports it
        except RayError as error:
            self._refuse(calls, error)

    def _refuse(self, calls: Sequence[ItemCall], error: RayError) -> None:
        for call in calls:
            waiting = self._waiting.get(call.number)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_exception(RequestError(f"the item cannot be sent to the engine: {error}"))

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

    def _settle(self, outcome: CallOutcome) -> None:
        waiting = self._waiting.get(outcome.number)
        if waiting is None or waiting.future.done():
            return
        try:
            value = _restored(outcome.value, "the result")
        except RequestError as error:
            waiting.future.set_exception(error)
            return
        if outcome.is_error:
            waiting.future.set_exception(value)
        elif outcome.is_last:
            waiting.future.set_result(value)
        elif waiting.callback is not None:
            waiting.callback(value)


def _outcome(number: int, value: Any, *, is_last: bool = True) -> CallOutcome:
    """Return the outcome with this value, or with an error if the value cannot be pickled."""
    try:
        return CallOutcome(number, _pickled(value, "the result"), is_last=is_last)
    except RequestError as error:
        return CallOutcome(number, _pickled_error(error), is_error=True)


def _pickled(value: Any, name: str) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:  # pickling runs the value's own code
        raise RequestError(f"{name} cannot be sent: {type(error).__name__}: {error}") from error


def _restored(value: bytes, name: str) -> Any:
    try:
        return cloudpickle.loads(value)
    except Exception as error:  # so does restoring it
        raise RequestError(f"{name} cannot be restored where it arrived: {type(error).__name__}: {error}") from error


def _pickled_error(error: Exception) -> bytes:
    """Return the error pickled, or a RayspecError with its text if it cannot be pickled and restored."""
    try:
        packed = pickle.dumps(error)
        if type(pickle.loads(packed)) is type(error):  # noqa: S301 - our own bytes
            return packed
    except Exception:  # noqa: BLE001, S110 - its text is sent instead
        pass
    return pickle.dumps(RayspecError(f"{type(error).__name__}: {error}"))
