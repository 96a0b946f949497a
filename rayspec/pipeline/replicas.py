"""Several replicas behind the face of one engine: a request goes to the one that has least to do."""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.admission import prompt_tokens
from rayspec.decode.engine import Engine
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.pages import PageHash, page_hashes
from rayspec.decode.stages import StageLostError
from rayspec.decode.unread import UnreadOutput
from rayspec.pipeline.affinity import PrefixAffinity
from rayspec.pipeline.retelling import Retelling
from rayspec.planning.latency import LatencyModel
from rayspec.types import EngineLoad, EngineStats, RayspecError, Request, RequestError, RequestOutput

logger = logging.getLogger(__name__)

_POLL_S = 0.02  # a request that comes meanwhile waits so long


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request with one of the replicas. `num_moves`: how often it was moved from one that was lost. `retelling`: what
    its stream has given so far."""

    request: Request
    replica: int
    future: Future[RequestOutput]
    num_moves: int = 0
    retelling: Retelling = field(default_factory=Retelling)


@dataclass(frozen=True, slots=True)
class _Update:
    """What is new of a request; None: its future is done."""

    request: Request
    output: RequestOutput | None


class Replicas:
    """Engines that run at the same time, each on a thread of its own. Not thread-safe itself, as an engine is not.

    When a replica is lost for good, its requests begin anew on the others; they fail with the last one. What a stream
    has given already is not given again: the same seed gives the same text.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._loops = [EngineLoop(engine) for engine in engines]
        self._placed: dict[str, _Placed] = {}
        self._updates: queue.SimpleQueue[_Update] = queue.SimpleQueue()
        self._lost: set[int] = set()
        self._affinity = PrefixAffinity(self._engines)

    @property
    def engines(self) -> Sequence[Engine]:
        return self._engines

    @property
    def config(self) -> EngineConfig:
        return self._engines[0].config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._engines[0].tokenizer

    @property
    def latency(self) -> LatencyModel | None:
        return self._engines[0].latency

    @property
    def max_model_len(self) -> int:
        return self._engines[0].max_model_len

    @property
    def stats(self) -> EngineStats:
        stats = merged_stats([engine.stats for engine in self._engines])
        stats.num_lost_replicas = len(self._lost)
        return stats

    @property
    def load(self) -> EngineLoad:
        loads = [engine.load for engine in self._engines]
        return sum(loads[1:], start=loads[0])

    @property
    def has_unfinished(self) -> bool:
        return bool(self._placed)

    @property
    def num_unfinished(self) -> int:
        return len(self._placed)

    @property
    def num_wanted(self) -> int:
        return sum(engine.num_wanted for engine in self._engines)

    def add(self, request: Request) -> None:
        """Raises RequestError for an id in use, StageLostError when all replicas are lost. What else is wrong with the
        request is found out by the replica and comes back from `step`."""
        if request.request_id in self._placed:
            raise RequestError(f"request id {request.request_id!r} is in use: give each request its own")
        if request.params.seed is None:
            request = dataclasses.replace(request, params=request.params.replace(seed=secrets.randbits(63)))
        self._place(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; what it had become stays with the replica. None when it is not here."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        placed.future.cancel()
        output = RequestOutput.refused(placed.request, RequestError("the request was aborted"))
        return dataclasses.replace(output, error=None)

    def abort_all(self) -> list[RequestOutput]:
        """`abort` for every request."""
        return [output for name in list(self._placed) if (output := self.abort(name)) is not None]

    def step(self) -> list[RequestOutput]:
        """Waits a moment for something to finish, or for something new of what streams; returns what has come."""
        if not self._placed:
            return []
        updates: list[_Update] = []
        with suppress(queue.Empty):
            updates.append(self._updates.get(timeout=_POLL_S))
            while True:
                updates.append(self._updates.get_nowait())
        return [output for update in updates if (output := self._take(update)) is not None]

    def advance(self) -> list[UnreadOutput]:
        """`step`, as an engine has it: the replicas' loops have made the texts."""
        return [UnreadOutput.of(output) for output in self.step()]

    def ping(self) -> Future[None]:
        """Done when all replicas that are not lost have answered; fails when there are none."""
        answered: Future[None] = Future()
        pings = []
        for index, loop in enumerate(self._loops):
            with suppress(EngineDeadError):
                if index not in self._lost:
                    pings.append(loop.ping())
        if pings:
            _when_all(pings, answered)
        else:
            answered.set_exception(StageLostError("all replicas are lost"))
        return answered

    def shutdown(self) -> None:
        """Abort everything and end the processes of all replicas."""
        self.abort_all()
        for loop, engine in zip(self._loops, self._engines, strict=True):
            loop.stop()
            engine.shutdown()

    def _place(self, request: Request, num_moves: int = 0, retelling: Retelling | None = None) -> None:
        alive = [index for index in range(len(self._loops)) if index not in self._lost]
        if not alive:
            raise StageLostError("all replicas are lost")
        request, hashes = self._tokenized(request)
        load = [placed.replica for placed in self._placed.values()]
        chosen = self._affinity.choose(hashes, {replica: load.count(replica) for replica in alive})
        try:
            future = self._loops[chosen].submit(request, lambda output: self._updates.put(_Update(request, output)))
        except EngineDeadError as death:
            self._lose(chosen, death)
            self._place(request, num_moves, retelling)
            return
        self._placed[request.request_id] = _Placed(request, chosen, future, num_moves, retelling or Retelling())
        future.add_done_callback(lambda _: self._updates.put(_Update(request, None)))

    def _tokenized(self, request: Request) -> tuple[Request, list[PageHash]]:
        """With its tokens, and the hashes of its pages. What is no prompt is refused by the replica."""
        try:
            token_ids = prompt_tokens(request, self.tokenizer)
            return dataclasses.replace(request, prompt_token_ids=token_ids), page_hashes(token_ids)
        except (RequestError, OverflowError):
            return request, []

    def _lose(self, replica: int, error: RayspecError) -> None:
        if replica not in self._lost:
            self._lost.add(replica)
            logger.warning(
                "replica %d of %d is lost for good, and the others take its requests: %s",
                replica,
                len(self._loops),
                error,
            )

    def _take(self, update: _Update) -> RequestOutput | None:
        """What callers are to know of it; nothing of a request that was aborted."""
        placed = self._placed.get(update.request.request_id)
        if placed is None or placed.request is not update.request:
            return None
        return self._finish(placed) if update.output is None else placed.retelling.new_part(update.output)

    def _finish(self, placed: _Placed) -> RequestOutput | None:
        """The last output of a request; None if its replica was lost and it begins anew on another."""
        del self._placed[placed.request.request_id]
        error: RayspecError | None = None
        try:
            output = placed.future.result()
            if placed.request.stream:
                output = placed.retelling.last_part(output)
            if not isinstance(output.error, StageLostError):
                return output
            error = output.error
        except EngineDeadError as death:
            output, error = RequestOutput.refused(placed.request, RequestError(str(death))), death
        self._lose(placed.replica, error)
        if placed.num_moves + 1 >= len(self._loops):
            return dataclasses.replace(output, error=error)
        try:
            self._place(placed.request, placed.num_moves + 1, placed.retelling.again())
        except StageLostError as lost:
            return dataclasses.replace(output, error=lost)
        return None


def _when_all(parts: Sequence[Future[None]], whole: Future[None]) -> None:
    """`whole` is done when all parts are; it fails with the first that fails."""
    left = set(parts)
    lock = threading.Lock()

    def on_done(part: Future[None]) -> None:
        with lock:
            left.discard(part)
            if whole.done():
                return
            if (error := part.exception()) is not None:
                whole.set_exception(error)
            elif not left:
                whole.set_result(None)

    for part in parts:
        part.add_done_callback(on_done)


def merged_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Counts and seconds summed, plans of all by the time they were made."""
    total = EngineStats()
    for part in parts:
        for one in dataclasses.fields(EngineStats):
            value, sum_so_far = getattr(part, one.name), getattr(total, one.name)
            if isinstance(value, int | float):
                setattr(total, one.name, sum_so_far + value)
        for length, count in part.accepted_lengths.items():
            total.accepted_lengths[length] = total.accepted_lengths.get(length, 0) + count
    total.gate_reason = next((part.gate_reason for part in parts if part.gate_reason), "")
    total.plans = sorted((plan for part in parts for plan in part.plans), key=lambda plan: plan.elapsed_s)
    return total
