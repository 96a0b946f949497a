"""Several engines with the interface of one engine: replicas, each in an actor of its own."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.engine_loop import EngineDeadError, Listener
from rayspec.decode.progress import Progress
from rayspec.generation import GenerationDefaults
from rayspec.planning.latency import LatencyModel
from rayspec.pool.pool import EnginePool
from rayspec.pool.recipe import Recipe
from rayspec.pool.resumed_stream import ResumedStream
from rayspec.types import EngineLoad, EngineStats, Request, RequestError, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Description of a loaded replica. config: options in force."""

    config: EngineConfig
    max_model_len: int
    defaults: GenerationDefaults
    latency: LatencyModel | None


class Replicas:
    """Gives requests from any thread to the least busy replica, or to one that had a prompt with the same beginning.

    When a replica dies, its requests start again on other replicas, and a new replica takes its place. A stream never
    repeats what it has delivered: the same seed gives the same text. A request that kills replicas fails alone.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Wait until one replica is up; the others follow. recipe: its items are requests. Raises EngineDeadError, and
        the error of a replica that fails to load."""
        self.tokenizer = tokenizer
        self.progress = Progress()  # without tasks: the supervisor asks each replica for its own
        options = recipe.engine.parallel
        self._num_replicas = options.replicas if options is not None else 1
        self._parallel = options
        self._pool = EnginePool(recipe, max_restarts=options.max_restarts if options is not None else 0)
        self._death: EngineDeadError | None = None
        try:
            self._facts: ReplicaFacts = self._pool.begin()
        except BaseException:
            self._pool.stop()
            raise

    @property
    def config(self) -> EngineConfig:
        """Options in force of a replica, but with `parallel` as it was requested for all replicas."""
        return self._facts.config.replace(parallel=self._parallel)

    @property
    def latency(self) -> LatencyModel | None:
        return self._facts.latency

    @property
    def max_model_len(self) -> int:
        return self._facts.max_model_len

    @property
    def defaults(self) -> GenerationDefaults:
        return self._facts.defaults

    @property
    def stats(self) -> EngineStats:
        return self._pool.stats()

    @property
    def load(self) -> EngineLoad:
        return self._pool.load()

    @property
    def num_wanted(self) -> int:
        """Number of requests that keep all replicas busy."""
        return 2 * self._facts.config.max_num_seqs * self._num_replicas

    @property
    def is_whole(self) -> bool:
        """True if all replicas that are not lost for good are up."""
        return self._pool.is_whole

    @property
    def is_recovering(self) -> bool:
        """True while no replica is up."""
        return self._pool.num_up == 0

    @property
    def death(self) -> EngineDeadError | None:
        """Error of all requests that are submitted after `stop`; None before."""
        return self._death

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        """Queue a request, see `EngineLoop.submit`. Raises EngineDeadError."""
        return self.submit_all([request], listener)[0]

    def submit_all(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[RequestOutput]]:
        """Queue requests, see `EngineLoop.submit_all`. Raises EngineDeadError."""
        if self._death is not None:
            raise EngineDeadError(*self._death.args)
        return [self._submit(request, listener) for request in requests]

    def ping(self) -> Future[None]:
        """Return a future that is done when all replicas that are up have answered, and fails if none is up."""
        return self._pool.ping()

    def stop(self) -> None:
        """End the processes of all replicas. Unfinished requests fail with EngineDeadError."""
        self._death = self._death or EngineDeadError("the engine has ended: it was stopped")
        self._pool.stop()

    shutdown = stop

    def _submit(self, request: Request, listener: Listener | None) -> Future[RequestOutput]:
        if request.params.seed is None:  # a request that starts again must give the same tokens
            request = dataclasses.replace(request, params=request.params.replace(seed=secrets.randbits(63)))
        telling = _Telling(listener) if request.stream and listener is not None else None
        future: Future[RequestOutput] = Future()
        asked = self._pool.submit(request, telling.begin if telling is not None else None)
        future.add_done_callback(lambda done: asked.cancel() if done.cancelled() else None)
        asked.add_done_callback(lambda _: _settle(future, asked, request, telling))
        return future


class _Telling:
    """Gives each part of a stream to its listener once, however often the stream starts again."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._resumed: ResumedStream | None = None

    def begin(self) -> Callable[[RequestOutput], None]:
        self._resumed = ResumedStream() if self._resumed is None else self._resumed.again()
        return self._hear

    def last(self, output: RequestOutput) -> RequestOutput:
        return output if self._resumed is None else self._resumed.last_part(output)

    def _hear(self, part: RequestOutput) -> None:
        assert self._resumed is not None
        if (new := self._resumed.new_part(part)) is not None:
            self._listener(new)


def _settle(
    future: Future[RequestOutput], asked: Future[RequestOutput], request: Request, telling: _Telling | None
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        output = asked.result()
        future.set_result(telling.last(output) if telling is not None else output)
    except RequestError as error:  # it kills engines
        future.set_result(RequestOutput.refused(request, error))
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        future.set_exception(error)
