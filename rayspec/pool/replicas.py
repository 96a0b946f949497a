"""Several engines that take requests like one engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from transformers import PreTrainedTokenizerBase

from rayspec.decode.engine import EngineInfo
from rayspec.decode.engine_loop import EngineDeadError, Listener
from rayspec.decode.stages import Progress, StageUse
from rayspec.pool.supervisor import EnginePool
from rayspec.pool.worker import EngineFactory
from rayspec.types import CompletionOutput, EngineLoad, EngineStats, Request, RequestError, RequestOutput


class Replicas:
    """Gives requests from any thread to the least busy replica, or to one that had a prompt with the same beginning.
    When a replica dies, its requests start again on other replicas, and a new replica takes its place. A stream never
    repeats what it has delivered: the same seed gives the same text. A request that kills replicas fails alone."""

    def __init__(self, factory: EngineFactory, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Wait until one replica is up, see `EngineSupervisor.begin`. factory: its items are requests."""
        self.engine = None  # they are in other processes
        self.tokenizer = tokenizer
        self.progress = Progress()  # without tasks: the supervisor asks each replica for its own
        options = factory.engine.parallel
        self._num_replicas = options.replicas if options is not None else 1
        self._pool = EnginePool(factory, max_restarts=options.max_restarts if options is not None else 0)
        self._death: EngineDeadError | None = None
        try:
            replica: EngineInfo = self._pool.begin()
        except BaseException:
            self._pool.stop()
            raise
        # Options in force of a replica, but with `parallel` as it was requested for all replicas.
        self.info = dataclasses.replace(replica, config=replica.config.replace(parallel=options))

    @property
    def stats(self) -> EngineStats:
        return self._pool.stats()

    @property
    def load(self) -> EngineLoad:
        return self._pool.ask(self._pool.supervisor.load()).result()

    @property
    def num_wanted(self) -> int:
        return 2 * self.info.config.num_seqs * self._num_replicas

    @property
    def is_recovering(self) -> bool:
        """Whether no engine is up. Meanwhile there is no progress. If recovery fails, the engines end by themselves."""
        return self._pool.supervisor.num_up == 0

    def stage_use(self) -> Sequence[StageUse]:
        """Return nothing: only an engine of this process knows its stages."""
        return ()

    def submit_all(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Future[RequestOutput]]:
        return [self.submit(request, listener) for request in requests]

    def ping(self) -> Future[None]:
        return self._pool.ask(self._pool.supervisor.ping())

    def stop(self) -> None:
        """End the processes of all replicas. Unfinished requests fail with EngineDeadError."""
        self._death = self._death or EngineDeadError("the engine has ended: it was stopped")
        self._pool.stop()

    shutdown = stop

    def submit(self, request: Request, listener: Listener | None = None) -> Future[RequestOutput]:
        if self._death is not None:
            raise EngineDeadError(*self._death.args)
        if request.params.seed is None:  # a request that starts again must give the same tokens
            request = dataclasses.replace(request, params=request.params.replace(seed=secrets.randbits(63)))
        stream = ResumedStream(listener) if request.stream and listener is not None else None
        future: Future[RequestOutput] = Future()

        def settle(asked: Future[RequestOutput]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                output = asked.result()
                future.set_result(stream.last_part(output) if stream is not None else output)
            except RequestError as error:  # it kills engines
                future.set_result(RequestOutput.refused(request, error))
            except BaseException as error:  # noqa: BLE001 - the caller's to judge
                future.set_exception(error)

        asked = self._pool.submit(request, stream.begin if stream is not None else None)
        future.add_done_callback(lambda done: asked.cancel() if done.cancelled() else None)
        asked.add_done_callback(settle)
        return future


class ResumedStream:
    """Gives each part of a stream to its listener once, however often the stream starts again with the same seed.
    It counts tokens and characters of each completion: those of the present run, and the most of any run."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._run: dict[int, tuple[int, int]] = {}
        self._given: dict[int, tuple[int, int]] = {}

    def begin(self) -> Callable[[RequestOutput], None]:
        """Prepare for a run from the start. Return the function that takes its parts."""
        self._run.clear()
        return self._take

    def last_part(self, output: RequestOutput) -> RequestOutput:
        """Return the new part of the last output. It includes every finished completion, even without new text."""
        parts = [self._rest(one) for one in output.outputs]
        return dataclasses.replace(output, outputs=[one for one in parts if one.token_ids or one.text or one.finished])

    def _take(self, output: RequestOutput) -> None:
        if (part := self.last_part(output)).outputs:
            self._listener(part)

    def _rest(self, piece: CompletionOutput) -> CompletionOutput:
        before, given = self._run.get(piece.index, (0, 0)), self._given.get(piece.index, (0, 0))
        num_tokens, num_characters = max(0, given[0] - before[0]), max(0, given[1] - before[1])
        now = before[0] + len(piece.token_ids), before[1] + len(piece.text)
        self._run[piece.index], self._given[piece.index] = now, (max(given[0], now[0]), max(given[1], now[1]))
        return dataclasses.replace(
            piece,
            text=piece.text[num_characters:],
            token_ids=tuple(piece.token_ids[num_tokens:]),
            logprobs=piece.logprobs[num_tokens:] or None if piece.logprobs is not None else None,
        )
