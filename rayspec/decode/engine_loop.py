"""An engine on a separate thread: callers submit requests from any thread and wait for their outputs."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rayspec.decode.output import NewOutput
from rayspec.types import EngineLoad, EngineStats, RayspecError, Request, RequestError, RequestOutput

if TYPE_CHECKING:  # the endpoint's ingress imports this module, but none of these
    from transformers import PreTrainedTokenizerBase

    from rayspec.decode.engine import Engine, EngineInfo
    from rayspec.decode.progress import Progress
    from rayspec.decode.stages import StageUse


class EngineDeadError(RayspecError):
    """The engine's loop has ended and gives no more outputs. `__cause__` is the exception that ended it, if any."""

    kind = "engine_dead"


# Receives new output of a streaming request. Called on the loop's delivery thread: it must be quick and must not raise.
Listener = Callable[[RequestOutput], None]


class Client(Protocol):
    """An engine as its callers see it: in this process, in stages, or a pool of engines. Any thread may use it."""

    @property
    def engine(self) -> Engine | None:
        """The engine that runs in this process; None for a pool, whose engines are in other processes."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""

    @property
    def num_wanted(self) -> int:
        """Number of requests that keeps the engine, or all engines, busy."""

    @property
    def is_recovering(self) -> bool:
        """Whether lost shards are being replaced, or no engine of a pool is up. Meanwhile there is no progress. If
        recovery fails, the engine ends by itself."""

    def stage_use(self) -> Sequence[StageUse]:
        """Return how busy the stages of a pipeline were since the last call; empty without a pipeline, and for a
        pool."""

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        """Submit one request, see `EngineLoop`. Raises EngineDeadError."""

    def submit_all(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[RequestOutput]]:
        """Submit requests at once and return a future for each. Raises EngineDeadError."""

    def ping(self) -> Future[None]:
        """Return a future that is done when the engine, or all engines that are up, and their processes have
        answered."""

    def stop(self) -> None:
        """Take no more requests. Unfinished requests fail with EngineDeadError."""

    def shutdown(self) -> None:
        """Stop, and end the processes that hold the model, if there are any."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """`request` has an id that is unique in this loop; `name` is the caller's own id."""

    name: str
    request: Request
    future: Future[RequestOutput]
    listener: Listener | None


@dataclass(frozen=True, slots=True)
class _Cancelled:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Ping:
    future: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Failure:
    """A delivery that raised `cause`; it ends the loop."""

    cause: BaseException


_Item = tuple[_Arrival, ...] | _Cancelled | _Ping | _Stop | _Failure


class EngineLoop:
    """Steps an engine while it has work, and sleeps otherwise. Two threads start with the first request or ping: one
    runs the engine, the other decodes the tokens and delivers outputs in the order in which they were made.

    `submit` may be called from any thread, and two callers may use the same request id. Its future gives the finished
    output, whose `error` is set if the request failed; for a streaming request it gives the last output. Cancelling the
    future aborts the request. When the loop ends, every unfinished future fails with EngineDeadError, which names the
    cause; every later `submit` raises it. While the loop has no work, its owner may use the engine directly.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._request_ids = itertools.count()
        self._waiting: dict[str, _Arrival] = {}
        self._ping: _Ping | None = None  # the ping that the engine answers at this moment
        self._has_work = False
        self._death: EngineDeadError | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # of the delivery thread
        self._deliverer = threading.Thread(target=self._deliver_all, name="rayspec-delivery", daemon=True)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.engine.tokenizer

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def load(self) -> EngineLoad:
        return self.engine.load

    @property
    def progress(self) -> Progress:
        return self.engine.progress

    @property
    def num_wanted(self) -> int:
        return self.engine.num_wanted

    @property
    def is_recovering(self) -> bool:
        return self.engine.stages.is_recovering

    def stage_use(self) -> Sequence[StageUse]:
        return self.engine.stages.recent_use()

    @property
    def death(self) -> EngineDeadError | None:
        """The error that says why the loop has ended; None while it runs."""
        return self._death

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        """Submit one request and return its future. listener: receives all outputs of a streaming request except the
        last. Raises EngineDeadError."""
        return self.submit_all([request], listener)[0]

    def submit_all(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[RequestOutput]]:
        """Submit requests and return a future for each. The engine gets all of them before its next step. Raises
        EngineDeadError."""
        arrivals = tuple(self._arrival(request, listener) for request in requests)
        if arrivals:
            self._put(arrivals)
        return [arrival.future for arrival in arrivals]

    def ping(self) -> Future[None]:
        """Return a future that is done once the loop has asked the engine and the engine has answered. The call or the
        future raises EngineDeadError if the loop has ended; a stuck loop never answers."""
        future: Future[None] = Future()
        self._put(_Ping(future))
        return future

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after its current step. Unfinished requests fail with EngineDeadError."""
        with self._lock:
            thread = self._thread
            if thread is None:
                self._death = self._death or EngineDeadError("the engine has ended: it was stopped")
                return
        self._put_and_wake(_Stop())
        for one in (thread, self._deliverer):
            if one is threading.current_thread():  # a garbage collection may run on any thread
                return
            one.join(timeout_s)

    def shutdown(self) -> None:
        """Stop, then shut the engine down."""
        self.stop()
        self.engine.shutdown()

    def _arrival(self, request: Request, listener: Listener | None) -> _Arrival:
        request_id = str(next(self._request_ids))
        future: Future[RequestOutput] = Future()
        future.add_done_callback(partial(self._on_cancelled, request_id))
        return _Arrival(request.request_id, replace(request, request_id=request_id), future, listener)

    def _on_cancelled(self, request_id: str, future: Future[RequestOutput]) -> None:
        if future.cancelled():
            self._put_and_wake(_Cancelled(request_id))

    def _put(self, item: _Item) -> None:
        with self._lock:
            if self._death is not None:
                raise _another(self._death)
            if self._thread is None:
                self._thread = threading.Thread(target=self._supervise, name="rayspec-engine", daemon=True)
                self._deliverer.start()
                self._thread.start()
            elif not self._thread.is_alive():
                raise EngineDeadError(
                    "the engine's thread stayed in the process that this one was forked from: load the model here"
                )
            self._put_and_wake(item)

    def _put_and_wake(self, item: _Item) -> None:
        self._inbox.put(item)
        self.engine.wake()

    def _supervise(self) -> None:
        try:
            self._run()
            death = EngineDeadError("the engine has ended: it was stopped")
        except BaseException as error:  # noqa: BLE001 - reported to everyone who waits
            death = _death_by(error)
        with self._lock:
            self._death = death
        self._fail_all(death)
        self._jobs.put(None)

    def _run(self) -> None:
        while self._take_items():
            outputs = self.engine.advance()
            # Read before delivery: a caller that has all its outputs may use the engine directly.
            self._has_work = self.engine.has_unfinished
            self._deliver(outputs)

    def _take_items(self) -> bool:
        """Handle all items in the inbox, and wait for one if there is no work. Return False after a `_Stop`."""
        while not self._has_work or not self._inbox.empty():
            match self._inbox.get():
                case _Stop():
                    return False
                case _Cancelled(request_id):
                    if self._waiting.pop(request_id, None) is not None:
                        self.engine.abort(request_id)
                        self._has_work = self.engine.has_unfinished
                case _Ping() as ping:
                    self._answer(ping)
                case _Failure(cause):
                    raise cause
                case arrivals:
                    self._admit(arrivals)
        return True

    def _admit(self, arrivals: Sequence[_Arrival]) -> None:
        """Give the requests to the engine. A request that it refuses has an output with the error."""
        self._waiting |= {arrival.request.request_id: arrival for arrival in arrivals}
        refused = []
        for arrival in arrivals:
            try:
                self.engine.add(arrival.request)
            except RequestError as error:  # noqa: PERF203 - the others run
                refused.append(NewOutput(RequestOutput.refused(arrival.request, error)))
        self._has_work = self.engine.has_unfinished
        self._deliver(refused)

    def _answer(self, ping: _Ping) -> None:
        self._ping = ping
        answer = self.engine.ping()
        self._ping = None
        pass_on = lambda answered: _settle(ping.future, None, answered.exception())  # noqa: E731
        self._jobs.put(partial(answer.add_done_callback, pass_on))

    def _deliver(self, outputs: Iterable[NewOutput]) -> None:
        for output in outputs:
            arrival = self._waiting.get(output.request_id)
            if arrival is None:
                continue
            if output.finished:
                del self._waiting[output.request_id]
            self._jobs.put(partial(self._hand_over, arrival, output))

    def _deliver_all(self) -> None:
        """Run the jobs of the delivery thread in order, so that the engine's thread does not wait for callers."""
        while (job := self._jobs.get()) is not None:
            job()

    def _hand_over(self, arrival: _Arrival, new: NewOutput) -> None:
        """Decode the texts, then settle the future or call the listener. An exception here ends the loop."""
        try:
            if arrival.future.cancelled():
                return
            is_last, output = new.finished, new.decoded()
            output.request_id = arrival.name
            if not is_last and arrival.listener is not None:
                arrival.listener(output)
        except BaseException as error:  # noqa: BLE001 - the loop reports it
            self._inbox.put(_Failure(error))
            if new.finished:
                _settle(arrival.future, None, _death_by(error))
            return
        if is_last:
            _settle(arrival.future, output)

    def _fail_all(self, death: EngineDeadError) -> None:
        unsettled: list[_Arrival | _Ping] = [*self._waiting.values(), *([self._ping] if self._ping else [])]
        self._waiting.clear()
        while not self._inbox.empty():
            match self._inbox.get():
                case _Ping() as ping:
                    unsettled.append(ping)
                case tuple() as arrivals:
                    unsettled.extend(arrivals)
        for one in unsettled:
            self._jobs.put(partial(_settle, one.future, None, _another(death)))


def _death_by(cause: BaseException) -> EngineDeadError:
    death = EngineDeadError(f"the engine has ended: {type(cause).__name__}: {cause}")
    death.__cause__ = cause
    return death


def _another(death: EngineDeadError) -> EngineDeadError:
    """Return a copy of the error, for another thread to raise."""
    copy = EngineDeadError(*death.args)
    copy.__cause__ = death.__cause__
    return copy


def _settle(future: Future[Any], outcome: RequestOutput | None, error: BaseException | None = None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
