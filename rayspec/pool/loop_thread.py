"""An event loop in a thread of its own. Needs no Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rayspec.decode.engine_loop import EngineDeadError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for all threads except its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Return a future of the result. Cancelling it cancels the work. Raises EngineDeadError after `close`."""
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Let the loop call this function, unless it is closed. A signal handler may call this."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Run one last coroutine, cancel all others, and end the thread. Later calls do nothing."""
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            return
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(last(), self._loop).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

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
