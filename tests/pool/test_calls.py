"""Calls in batches, through a real actor."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
import ray

from rayspec.pool.calls import BatchedCalls, Callback, CalledHere, CallOutcome, ItemCall
from rayspec.types import ConfigError, RayspecError, RequestError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class UnloadableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Brittle:
    """Cannot be restored in the processes `where`: "here" is the one that made it, "there" any other."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.where, os.getpid())


def _restored(where: str, pid: int) -> Brittle:
    if (pid == os.getpid()) == (where == "here"):
        raise ImportError(f"no module {where}")
    return Brittle(where)


class Worker:
    """Does what an item says, and remembers how items came."""

    def __init__(self) -> None:
        self._calls = CalledHere(self._handle)
        self._batches: list[int] = []
        self._cancelled: list[str] = []

    async def take(self, calls: Sequence[ItemCall]) -> None:
        self._batches.append(len(calls))
        self._calls.take(calls)

    async def cancel(self, numbers: Sequence[int]) -> None:
        self._calls.cancel(numbers)

    async def outcomes(self) -> AsyncGenerator[list[CallOutcome], None]:
        async for ready in self._calls.outcomes():
            yield ready

    async def seen(self) -> tuple[list[int], list[str]]:
        return self._batches, self._cancelled

    async def _handle(self, item: Any, callback: Callback) -> Any:
        match str(item).split():
            case ["return", "lock"]:
                return threading.Lock()
            case ["return", "brittle"]:
                return Brittle("there")
            case ["tell", "lock"]:
                callback(threading.Lock())
                await asyncio.sleep(1000)
            case ["fail", "ours"]:
                raise ConfigError("option 'a' is 1")
            case ["fail", "foreign"]:
                raise UnloadableError(1, 2)
            case ["tell", count]:
                for part in range(int(count)):
                    await asyncio.to_thread(callback, part)
            case ["sleep"]:
                try:
                    await asyncio.sleep(1000)
                finally:
                    self._cancelled.append(item)
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return f"done {item}"


def with_worker(run: Any) -> None:
    async def scene() -> None:
        actor = ray.remote(Worker).options(num_cpus=0, max_concurrency=8).remote()
        calls = BatchedCalls(actor, lambda error: RayspecError(f"ended: {type(error).__name__}"))
        try:
            await asyncio.wait_for(run(actor, calls), 60)
        finally:
            calls.close()
            ray.kill(actor)

    asyncio.run(scene())


def test_many_calls_travel_together_and_each_gets_its_own_result() -> None:
    async def run(actor: Any, calls: BatchedCalls) -> None:
        results = await asyncio.gather(*(calls(f"item {number}") for number in range(500)))
        assert results == [f"done item {number}" for number in range(500)]
        batches, _ = await actor.seen.remote()
        assert batches == [500]
        assert await calls("alone") == "done alone"

    with_worker(run)


def test_errors_are_the_callers_own_and_parts_come_in_order() -> None:
    async def run(actor: Any, calls: BatchedCalls) -> None:
        parts: list[int] = []
        told, ours, foreign = await asyncio.gather(
            calls("tell 20", parts.append), calls("fail ours"), calls("fail foreign"), return_exceptions=True
        )
        assert (told, parts) == ("done tell 20", list(range(20)))
        assert (type(ours), str(ours)) == (ConfigError, "option 'a' is 1")
        assert (type(foreign), str(foreign)) == (RayspecError, "UnloadableError: 1 and 2")

    with_worker(run)


def test_what_cannot_travel_is_an_error_of_its_own_call() -> None:
    """Items and results that cannot be pickled, or cannot be restored on the other side, among others that can."""

    async def run(actor: Any, calls: BatchedCalls) -> None:
        items = [threading.Lock(), Brittle("there"), "return lock", "return brittle", "tell lock", "well"]
        *errors, well = await asyncio.gather(*map(calls, items), return_exceptions=True)
        assert well == "done well"
        assert [type(error) for error in errors] == [RequestError] * 5
        for error, what in zip(errors, ["the item", "the item", *["the result"] * 3], strict=True):
            assert str(error).startswith(f"{what} cannot be ")
        assert [("no module there" in str(error)) for error in errors] == [False, True, False, True, False]
        assert await calls("later") == "done later"

    with_worker(run)


def test_a_call_that_nobody_waits_for_is_cancelled_there() -> None:
    async def run(actor: Any, calls: BatchedCalls) -> None:
        sleeping = asyncio.create_task(calls("sleep"))
        await calls("other")
        sleeping.cancel()
        while not (await actor.seen.remote())[1]:
            await asyncio.sleep(0.01)
        assert await calls("another") == "done another"

    with_worker(run)


def test_when_the_actor_ends_all_calls_fail_and_so_do_later_ones() -> None:
    async def run(actor: Any, calls: BatchedCalls) -> None:
        waiting = [calls(item) for item in ("sleep", "sleep", "die")]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert "ended: ActorDiedError" in str(outcome)
        with pytest.raises(RayspecError, match="ended"):
            await calls("late")

    with_worker(run)
