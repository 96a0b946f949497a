"""An engine on a thread of its own: callers hand in requests and wait for what becomes of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rayspec.types import RayspecError, Request, RequestError, RequestOutput


class EngineDeadError(RayspecError):
    """The engine's loop has ended; nothing more comes of it."""

    kind = "engine_dead"


class Steps(Protocol):
    """What is asked of an engine."""

    @property
    def has_unfinished(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> RequestOutput | None: ...

    def step(self) -> list[RequestOutput]: ...

    def ping(self) -> Future[None]: ...


# Takes what is new of a streaming request. Called on the engine's thread: it must be quick and must not raise.
Listener = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Arrival:
    request: Request
    future: Future[RequestOutput]
    listener: Listener | None


@dataclass(frozen=True, slots=True)
class _Ping:
    future: Future[None]


class EngineLoop:
    """Steps an engine while it has work; sleeps when it has none.

    `submit` may be called from any thread. The future gives the finished output (with `error` set where the request is
    at fault), of a streaming request the last piece; cancelling it aborts the request. When the loop dies, every future
    fails with EngineDeadError, which names the cause, and so does every later `submit`.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Arrival | _Ping | None] = queue.SimpleQueue()
        self._waiting: dict[str, _Arrival] = {}
        self._death: EngineDeadError | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name="rayspec-engine", daemon=True)
        self._thread.start()

    @property
    def death(self) -> EngineDeadError | None:
        """Why the loop has ended; None while it runs."""
        return self._death

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        """listener: of a streaming request, takes all pieces but the last."""
        future: Future[RequestOutput] = Future()
        self._put(_Arrival(request, future, listener))
        return future

    def ping(self) -> Future[None]:
        """Done when the loop has come round and the engine has answered. Raises EngineDeadError, or the future
        does; a loop that is stuck never answers."""
        future: Future[None] = Future()
        self._put(_Ping(future))
        return future

    def _put(self, item: _Arrival | _Ping) -> None:
        with self._lock:
            if self._death is not None:
                raise self._death
            self._inbox.put(item)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the step it is in. What is unfinished fails with EngineDeadError."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _supervise(self) -> None:
        try:
            self._run()
            cause = "it was stopped"
        except Exception as error:  # noqa: BLE001 - reported to everyone who waits
            cause = f"{type(error).__name__}: {error}"
        with self._lock:
            self._death = EngineDeadError(f"the engine has ended: {cause}")
        self._fail_all(self._death)

    def _run(self) -> None:
        while self._take_arrivals():
            self._abort_cancelled()
            for output in self._engine.step():
                self._deliver(output)

    def _take_arrivals(self) -> bool:
        """Everything that has come in; waits for something when there is no work. False: stop."""
        while not self._inbox.empty() or not self._engine.has_unfinished:
            match self._inbox.get():
                case None:
                    return False
                case _Ping(future):
                    self._engine.ping().add_done_callback(partial(_pass_on, future))
                case arrival:
                    self._admit(arrival)
        return True

    def _admit(self, arrival: _Arrival) -> None:
        request = arrival.request
        if request.request_id in self._waiting:
            error = RequestError(f"request id {request.request_id!r} is in use: give each request its own")
            _settle(arrival.future, RequestOutput.refused(request, error))
            return
        self._waiting[request.request_id] = arrival
        try:
            self._engine.add(request)
        except RequestError as error:
            self._deliver(RequestOutput.refused(request, error))

    def _abort_cancelled(self) -> None:
        for request_id in [name for name, arrival in self._waiting.items() if arrival.future.cancelled()]:
            del self._waiting[request_id]
            self._engine.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        arrival = self._waiting.get(output.request_id)
        if arrival is None:
            return
        if output.finished:
            del self._waiting[output.request_id]
            _settle(arrival.future, output)
        elif arrival.listener is not None and not arrival.future.cancelled():
            arrival.listener(output)

    def _fail_all(self, death: EngineDeadError) -> None:
        for arrival in self._waiting.values():
            _settle(arrival.future, None, death)
        self._waiting.clear()
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not None:
                _settle(item.future, None, death)


def _settle(future: Future[Any], outcome: RequestOutput | None, error: BaseException | None = None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


def _pass_on(future: Future[None], answered: Future[None]) -> None:
    _settle(future, None, answered.exception())
