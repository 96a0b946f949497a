"""Several replicas behind the face of one engine: a request goes to the one that has least to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.decode.stages import StageLostError
from rayspec.planning.latency import LatencyModel
from rayspec.types import EngineStats, RayspecError, Request, RequestError, RequestOutput

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request with one of the replicas. `num_moves`: how often it was moved from one that was lost."""

    request: Request
    replica: int
    future: Future[RequestOutput]
    num_moves: int = 0


class Replicas:
    """Engines that run at the same time, each on a thread of its own. Not thread-safe itself, as an engine is not.

    When a replica is lost for good, its requests begin anew on the others; they fail with the last one.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._loops = [EngineLoop(engine) for engine in engines]
        self._placed: dict[str, _Placed] = {}
        self._lost: set[int] = set()

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
        return merged_stats([engine.stats for engine in self._engines])

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
        """Waits a moment for something to finish; returns what has."""
        if not self._placed:
            return []
        wait([placed.future for placed in self._placed.values()], timeout=_POLL_S, return_when=FIRST_COMPLETED)
        landed = [placed for placed in self._placed.values() if placed.future.done()]
        return [output for placed in landed if (output := self._land(placed)) is not None]

    def shutdown(self) -> None:
        """Abort everything and end the processes of all replicas."""
        self.abort_all()
        for loop, engine in zip(self._loops, self._engines, strict=True):
            loop.stop()
            engine.shutdown()

    def _place(self, request: Request, num_moves: int = 0) -> None:
        alive = [index for index in range(len(self._loops)) if index not in self._lost]
        if not alive:
            raise StageLostError("all replicas are lost")
        load = [placed.replica for placed in self._placed.values()]
        chosen = min(alive, key=load.count)
        try:
            future = self._loops[chosen].submit(request)
        except EngineDeadError:
            self._lost.add(chosen)
            self._place(request, num_moves)
            return
        self._placed[request.request_id] = _Placed(request, chosen, future, num_moves)

    def _land(self, placed: _Placed) -> RequestOutput | None:
        """The output of a finished request; None if its replica was lost and it begins anew on another."""
        del self._placed[placed.request.request_id]
        error: RayspecError | None = None
        try:
            output = placed.future.result()
            if not isinstance(output.error, StageLostError):
                return output
            error = output.error
        except EngineDeadError as death:
            output, error = RequestOutput.refused(placed.request, RequestError(str(death))), death
        self._lost.add(placed.replica)
        if placed.num_moves + 1 >= len(self._loops):
            return dataclasses.replace(output, error=error)
        try:
            self._place(placed.request, placed.num_moves + 1)
        except StageLostError as lost:
            return dataclasses.replace(output, error=lost)
        return None


def merged_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Counts and seconds summed, plans of all by the time they were made."""
    total = EngineStats()
    for part in parts:
        for field in dataclasses.fields(EngineStats):
            value, sum_so_far = getattr(part, field.name), getattr(total, field.name)
            if isinstance(value, int | float):
                setattr(total, field.name, sum_so_far + value)
        for length, count in part.accepted_lengths.items():
            total.accepted_lengths[length] = total.accepted_lengths.get(length, 0) + count
    total.gate_reason = next((part.gate_reason for part in parts if part.gate_reason), "")
    total.plans = sorted((plan for part in parts for plan in part.plans), key=lambda plan: plan.elapsed_s)
    return total
