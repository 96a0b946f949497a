"""An engine on a thread of its own: callers hand in requests and wait for what becomes of them."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class _Arrival:
    request: Request
    future: Future[RequestOutput]


class EngineLoop:
    """Steps an engine while it has work; sleeps when it has none.

    `submit` may be called from any thread. The future gives the finished output (with `error` set where the request is
    at fault); cancelling it aborts the request. When the loop dies, every future fails with EngineDeadError, which
    names the cause, and so does every later `submit`.
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[RequestOutput]] = {}
        self._death: EngineDeadError | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._supervise, name="rayspec-engine", daemon=True)
        self._thread.start()

    @property
    def death(self) -> EngineDeadError | None:
        """Why the loop has ended; None while it runs."""
        return self._death

    def submit(self, request: Request) -> Future[RequestOutput]:
        future: Future[RequestOutput] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            self._inbox.put(_Arrival(request, future))
        return future

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
            arrival = self._inbox.get()
            if arrival is None:
                return False
            self._admit(arrival)
        return True

    def _admit(self, arrival: _Arrival) -> None:
        request, future = arrival.request, arrival.future
        if request.request_id in self._waiting:
            error = RequestError(f"request id {request.request_id!r} is in use: give each request its own")
            _settle(future, RequestOutput.refused(request, error))
            return
        self._waiting[request.request_id] = future
        try:
            self._engine.add(request)
        except RequestError as error:
            self._deliver(RequestOutput.refused(request, error))

    def _abort_cancelled(self) -> None:
        for request_id in [name for name, future in self._waiting.items() if future.cancelled()]:
            del self._waiting[request_id]
            self._engine.abort(request_id)

    def _deliver(self, output: RequestOutput) -> None:
        future = self._waiting.pop(output.request_id, None)
        if future is not None:
            _settle(future, output)

    def _fail_all(self, death: EngineDeadError) -> None:
        while not self._inbox.empty():
            arrival = self._inbox.get()
            if arrival is not None:
                self._waiting[arrival.request.request_id] = arrival.future
        for future in self._waiting.values():
            _settle(future, death)
        self._waiting.clear()


def _settle(future: Future[RequestOutput], outcome: RequestOutput | EngineDeadError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, EngineDeadError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
