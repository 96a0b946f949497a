"""An engine on a separate thread: callers submit requests from any thread and wait for their outputs."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rayspec.config import SamplingParams
from rayspec.decode.output import NewOutput
from rayspec.machine import take_long_turns
from rayspec.structured import MOST_TOKENS_OF_THINK, THINKING, StructuredOutputsParams
from rayspec.types import EngineLoad, RayspecError, Request, RequestError, RequestOutput

if TYPE_CHECKING:  # the endpoint's ingress imports this module, but none of these
    from rayspec.decode.engine import Engine
    from rayspec.decode.stages import Progress, StageUse

T = TypeVar("T")


class EngineDeadError(RayspecError):
    """The engine's loop has ended and gives no more outputs. `__cause__` is the exception that ended it, if any."""

    kind = "engine_dead"


# Receives new output of a streaming request. Called on the loop's delivery thread: it must be quick and must not raise.
Listener = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """`request` has an id that is unique in this loop; `name` is the caller's own id."""

    name: str
    request: Request
    future: Future[RequestOutput]
    listener: Listener | None

    @property
    def form(self) -> StructuredOutputsParams | None:
        return self.request.params.structured_outputs

    def is_wanted(self) -> bool:
        return not self.future.cancelled()


class EngineLoop:
    """Steps an engine while it has work, and sleeps otherwise. Two threads start with the first request or ping: one
    runs the engine, the other decodes the tokens and delivers outputs in order, the largest ones later.

    Two callers may use the same request id. The future of `submit` gives the finished output, whose `error` is set if
    the request failed; for a stream it gives the last output. Cancelling it aborts the request. When the loop ends,
    every unfinished future fails with EngineDeadError, which names the cause; later `submit`s raise it. While the loop
    has no work, its owner may use the engine directly.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self.tokenizer = engine.tokenizer
        self.stats = engine.stats
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # calls for the engine's thread
        self._request_ids = itertools.count()
        self._waiting: dict[str, _Arrival] = {}  # by the id in the engine: the requests that have no last output yet
        self._pings: set[Future[None]] = set()  # that the engine has not answered yet
        self._has_work = False
        self.death: EngineDeadError | None = None  # why the loop has ended
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # of the delivery thread
        self._deliverer = threading.Thread(target=self._deliver_all, name="rayspec-delivery", daemon=True)
        # Large outputs would hold up the delivery of others.
        self._large_outputs = ThreadPoolExecutor(1, "rayspec-large-outputs")

    @property
    def num_wanted(self) -> int:
        """How many requests keep the engine busy."""
        return 2 * self.info.config.num_seqs

    @property
    def load(self) -> EngineLoad:
        return self.engine.load

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""
        return self.engine.progress

    @property
    def is_recovering(self) -> bool:
        """Whether lost shards are being replaced. Meanwhile there is no progress. If it fails, the engine ends."""
        return self.engine.stages.is_recovering

    def stage_use(self) -> Sequence[StageUse]:
        """Return how busy the stages of a pipeline were since the last call; empty for others."""
        return self.engine.stages.recent_use()

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        """Submit one request and return its future. listener: receives all outputs of a stream but the last. Raises
        EngineDeadError."""
        return self.submit_all([request], listener)[0]

    def submit_all(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[RequestOutput]]:
        """Submit requests, which the engine gets before its next step, and return a future for each. A request with a
        form of the output follows when the form has been compiled, on another thread. listener: receives all outputs of
        a stream but the last. Raises EngineDeadError."""
        arrivals: dict[str, _Arrival] = {}
        for request in requests:
            request_id, future = str(next(self._request_ids)), Future[RequestOutput]()
            future.add_done_callback(partial(self._on_done, request_id))
            own = replace(request, request_id=request_id, params=self._params(request))
            arrivals[request_id] = _Arrival(request.request_id, own, future, listener)
        if arrivals:
            with self._lock:
                self._require_alive()
                self._waiting |= arrivals
                self._put(self._admit, [one for one in arrivals.values() if one.form is None])
        for arrival in arrivals.values():
            if arrival.form is not None:
                compiled = self.engine.model.grammars.compiled(arrival.form, arrival.is_wanted, arrival.request.client)
                compiled.add_done_callback(partial(self._put, self._admit, [arrival]))
        return [arrival.future for arrival in arrivals.values()]

    def _params(self, request: Request) -> SamplingParams:
        """Return the parameters of a request, whose form comes after the model's reasoning where there is some."""
        params, form = request.params, request.params.structured_outputs
        if form is None or self.tokenizer is None or self.info.config.reasoning_parser not in THINKING:
            return params
        end = request.prompt if isinstance(request.prompt, str) else ""
        if request.prompt_token_ids is not None:
            with suppress(Exception):  # the engine refuses such a prompt
                end = str(self.tokenizer.decode(list(request.prompt_token_ids[-MOST_TOKENS_OF_THINK:])))
        return params.replace(structured_outputs=form.after(end))

    def ping(self) -> Future[None]:
        """Return a future that is done once the engine answers; a stuck loop never does. Raises EngineDeadError."""
        future: Future[None] = Future()
        with self._lock:
            self._require_alive()
            self._pings.add(future)
            self._put(self._answer, future)
        return future

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after its current step. Unfinished requests fail with EngineDeadError."""
        stopped = EngineDeadError("the engine has ended: it was stopped")
        with self._lock:
            thread = self._thread
            if thread is None:
                self.death = self.death or stopped
                return
        self._put(_raise, stopped)
        end_s = time.monotonic() + timeout_s
        for one in (thread, self._deliverer):
            if one is threading.current_thread():  # a garbage collection may run on any thread
                return
            one.join(max(0.0, end_s - time.monotonic()))

    def shutdown(self) -> None:
        """Stop, and end the processes that hold the model, if there are any."""
        self.stop()
        self.engine.shutdown()

    def _require_alive(self) -> None:
        """Start the threads, unless they run. Raises EngineDeadError if they have ended."""
        if self.death is not None:
            raise _another(self.death)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rayspec-engine", daemon=True)
            self._deliverer.start()
            self._thread.start()
        elif not self._thread.is_alive():
            raise EngineDeadError(
                "the engine's thread stayed in the process that this one was forked from: load the model here"
            )

    def _put(self, call: Callable[..., None], *given: Any) -> None:
        self._inbox.put(partial(call, *given))
        self.engine.wake()

    def _run(self) -> None:
        """Step the engine while it has work, and make the calls in the inbox between steps, until one raises."""
        take_long_turns()
        try:
            while True:
                while not self._has_work or not self._inbox.empty():
                    self._inbox.get()()
                outputs = self.engine.advance()
                # Read before delivery: a caller that has all its outputs may use the engine directly.
                self._has_work = self.engine.has_unfinished
                self._deliver(outputs)
        except BaseException as error:  # noqa: BLE001 - reported to everyone who waits
            death = error if isinstance(error, EngineDeadError) else _death_by(error)
        with self._lock:
            self.death = death
        unsettled: list[Future[Any]] = [*(arrival.future for arrival in self._waiting.values()), *self._pings]
        for future in unsettled:
            self._jobs.put(partial(_settle, future, None, _another(death)))
        self._jobs.put(None)

    def _on_done(self, request_id: str, future: Future[RequestOutput]) -> None:
        if future.cancelled():
            self._put(self._cancel, request_id)

    def _cancel(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self.engine.abort(request_id)
            self._has_work = self.engine.has_unfinished

    def _admit(self, arrivals: Sequence[_Arrival], _compiled: Future[Any] | None = None) -> None:
        """Give the requests to the engine. _compiled: the form of the request, kept until the engine has it."""
        refused = []
        for arrival in arrivals:
            if arrival.request.request_id not in self._waiting or not arrival.is_wanted():
                continue  # it was cancelled while its form was compiled
            try:
                self.engine.add(arrival.request)
            except RequestError as error:  # the others run
                refused.append(NewOutput(RequestOutput.refused(arrival.request, error)))
        self._has_work = self.engine.has_unfinished
        self._deliver(refused)

    def _answer(self, ping: Future[None]) -> None:
        problem = None
        try:
            self.engine.ping()
        except RayspecError as error:  # a stage is lost
            problem = error
        self._pings.discard(ping)
        self._jobs.put(partial(_settle, ping, None, problem))

    def _deliver(self, outputs: Iterable[NewOutput]) -> None:
        for output in outputs:
            request_id, is_last = output.output.request_id, output.output.finished
            arrival = self._waiting.get(request_id)
            if arrival is None:
                continue
            if is_last:
                del self._waiting[request_id]
            hand_over = partial(self._hand_over, arrival, output)
            takes_long = is_last and output.has_many_logprobs
            self._jobs.put(partial(self._large_outputs.submit, hand_over) if takes_long else hand_over)

    def _deliver_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _hand_over(self, arrival: _Arrival, new: NewOutput) -> None:
        """Decode the texts, then settle the future or call the listener. Exceptions but RequestError end the loop."""
        try:
            if arrival.future.done():
                return
            is_last = new.output.finished
            try:
                output = new.decoded()
            except RequestError as error:
                self._put(self._cancel, arrival.request.request_id)
                is_last, output = True, RequestOutput.refused(arrival.request, error)
            output.request_id = arrival.name
            if not is_last and arrival.listener is not None:
                arrival.listener(output)
        except BaseException as error:  # noqa: BLE001 - the loop reports it
            self._put(_raise, error)
            if new.output.finished:
                _settle(arrival.future, None, _death_by(error))
            return
        if is_last:
            _settle(arrival.future, output)


def _raise(error: BaseException) -> None:
    raise error


def _death_by(cause: BaseException) -> EngineDeadError:
    death = EngineDeadError(f"the engine has ended: {type(cause).__name__}: {cause}")
    death.__cause__ = cause
    return death


def _another(death: EngineDeadError) -> EngineDeadError:
    copy = EngineDeadError(*death.args)
    copy.__cause__ = death.__cause__
    return copy


def _settle(future: Future[Any], outcome: RequestOutput | None, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # it is settled, or was cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome)


class LoopThread:
    """An event loop in a thread of its own: runs coroutines for all other threads."""

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
        """Run one last coroutine, cancel all others, and end the thread. Later calls do nothing. A garbage collection
        may make the call on that thread, which then cannot wait for itself."""
        if self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            self._loop.create_task(last()).add_done_callback(lambda _: self._loop.stop())
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
