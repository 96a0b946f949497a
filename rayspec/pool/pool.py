"""A supervisor on a thread of its own, which any other thread may call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pool.recipe import Recipe, Tell
from rayspec.pool.supervisor import EngineSupervisor
from rayspec.pool.worker import supervisor_of
from rayspec.types import EngineLoad, EngineStats

_STOP_TIMEOUT_S = 20.0

T = TypeVar("T")


class EnginePool:
    """Engines of one recipe. All threads except the pool's own may call its methods."""

    def __init__(self, recipe: Recipe, *, max_restarts: int) -> None:
        self._supervisor: EngineSupervisor = supervisor_of(recipe, max_restarts=max_restarts)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rayspec-pool", daemon=True)
        self._thread.start()

    def begin(self) -> Any:
        """Wait until one engine is up; the others follow. Return the facts of an engine that is loaded. Raises
        EngineDeadError, and the error of an engine that fails to load."""
        return self._ask(self._supervisor.begin())

    def submit(self, item: Any, listen: Callable[[], Tell] | None = None) -> Future[Any]:
        """Return a future of the result, see `EngineSupervisor.handle`. Cancelling it ends the work on the item."""
        return self._started(self._supervisor.handle(item, listen))

    def drain(self) -> None:
        """Start `EngineSupervisor.drain` and return at once. A signal handler may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._supervisor.drain()))

    def ping(self) -> Future[None]:
        return self._started(self._supervisor.ping())

    def stats(self) -> EngineStats:
        return self._ask(self._supervisor.stats())

    def load(self) -> EngineLoad:
        return self._ask(self._supervisor.load())

    @property
    def is_whole(self) -> bool:
        """True if all engines that are not lost are up."""
        return self._supervisor.is_whole

    @property
    def num_up(self) -> int:
        """Number of engines that take items."""
        return self._supervisor.num_up

    def stop(self) -> None:
        """End the engines and the thread. Later calls do nothing."""
        self._end(self._supervisor.stop)

    def kill(self) -> None:
        """Kill the engines at once, then end the thread. Later calls do nothing."""
        self._end(self._supervisor.kill)

    def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            return
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(_STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return self._started(question).result()

    def _started(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)
