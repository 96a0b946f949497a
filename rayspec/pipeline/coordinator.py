"""The coordinator of a replica: answers questions about states that stay with the shards.

Hidden states never reach the coordinator. It decides what to run, skip and keep. Shards expand the states with their
own weights, send them to the next shard at the end of their span, and report scores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rayspec.choices import Choice
from rayspec.decode.search import Agreement, answer
from rayspec.pipeline import messages as wire
from rayspec.pipeline.collective import node_address
from rayspec.pipeline.server import COORDINATOR, ENGINE, NewEpoch, Server, stage_name
from rayspec.pipeline.transport import Secret
from rayspec.planning.knapsack import finished
from rayspec.types import RayspecError

FORGET = wire.Seek(search_id=0, tokens=(), rows=())  # the search under way, if there is one
_ANSWER_TIMEOUT_S = 30.0


class SearchFailedError(RayspecError):
    """A plan search could not be finished; the plan in use stays."""

    kind = "search_failed"


class Coordinator(Server):
    """Answers the engine's questions one at a time. It is stateless: a replacement needs no data from it. spans:
    sublayers [first, last) of every stage."""

    def __init__(self, spans: Sequence[tuple[int, int]], secret: Secret) -> None:
        super().__init__(COORDINATOR, secret)
        self._spans = spans
        self._waiting: deque[wire.Search] = deque()  # came during a search

    def serve(self) -> None:
        """Serve until the process is killed. Report any error to the engine, then raise it."""
        torch.set_num_threads(1)
        self.listen(node_address())
        with self.serving():
            self._address.set_result(self.transport.address)
            while True:
                self.serve_one()

    def serve_one(self) -> None:
        """Wait for a question and answer it, and those that come meanwhile. A new epoch ends the work on them."""
        try:
            received = self.receive()
            if received is not None and isinstance(received.message, wire.Search):
                self._waiting.append(received.message)
            while self._waiting:
                self._search(self._waiting.popleft())
        except NewEpoch:
            self._waiting.clear()

    def _search(self, message: wire.Search) -> None:
        started = time.perf_counter()
        search = RemoteSearch(self, message, self._spans, self._waiting)
        found, reason = None, ""
        try:
            search.begin()
            found = finished(answer(message.question, search, num_sublayers=self._spans[-1][1]))
            found = msgspec.structs.replace(found, seconds=time.perf_counter() - started)
        except SearchFailedError as error:
            reason = str(error)
        finally:
            search.end()
        self.send(ENGINE, wire.Searched(search_id=message.search_id, answer=found, reason=reason))


@dataclass(eq=False)
class RemoteBatch:
    """A batch of states that a stage keeps under a number until the search drops it."""

    stage: int
    number: int
    num_states: int


class RemoteSearch:
    """`search.TappedStates` whose states stay on the shards. Operations are queued, and sent to a shard when its
    answer or its states are needed elsewhere. A knapsack then takes one message and one answer per sublayer, a trial a
    few per stage. waiting: takes the questions that come meanwhile."""

    def __init__(
        self, server: Server, message: wire.Search, spans: Sequence[tuple[int, int]], waiting: deque[wire.Search]
    ) -> None:
        self._server, self._waiting = server, waiting
        self._message = message
        self._spans = spans
        self._pending: list[list[wire.Operation]] = [[] for _ in spans]  # operations that a stage has not been sent yet
        self._num_batches = 1
        self._kept: dict[int, RemoteBatch] = {}
        self._stage_of = [stage for stage, (first, last) in enumerate(spans) for _ in range(first, last)]

    def begin(self) -> None:
        """Let the shards prepare the tapped states. Raises SearchFailedError if a shard has dropped some of them,
        or has no memory for the search."""
        message = self._message
        seek = wire.Seek(search_id=message.search_id, tokens=message.tokens, rows=message.rows)
        for stage in range(len(self._spans)):
            self._server.send(stage_name(stage), seek)
        for _ in self._spans:
            self._answer()

    def end(self) -> None:
        """Let the shards forget the search and its states."""
        for stage in range(len(self._spans)):
            self._server.send(stage_name(stage), FORGET)

    def start(self) -> RemoteBatch:
        """Return a copy of the first state, because the search may start again."""
        return self.gather([RemoteBatch(0, 0, 1)], np.zeros(1, np.int64))

    def run(self, sublayer: int, choice: Choice, states: Any) -> RemoteBatch:
        here = self._brought(states, self._stage_of[sublayer])
        return self._made(here.num_states, "run", [here], sublayer=sublayer, choices=[choice])

    def vary(self, sublayer: int, choices: Sequence[Choice], states: Any) -> RemoteBatch:
        return self._made(states.num_states, "vary", [states], sublayer=sublayer, choices=choices)

    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> RemoteBatch:
        stage = max(batch.stage for batch in batches)
        here = [self._brought(batch, stage) for batch in batches]
        return self._made(len(index), "gather", here, index=np.asarray(index).tolist())

    def keep(self, batches: Sequence[Any]) -> None:
        for number in self._kept.keys() - {batch.number for batch in batches}:
            batch = self._kept.pop(number)
            self._pending[batch.stage].append(wire.Operation("drop", [number]))

    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        here = self._brought(states, self._stage_of[sublayer])
        return np.asarray(self._do(here.stage, wire.Operation("similarity", [here.number], sublayer=sublayer)))

    def agreement(self, states: Any) -> Agreement:
        here = self._brought(states, len(self._spans) - 1)
        scores = np.asarray(self._do(here.stage, wire.Operation("agreement", [here.number])))
        num_agreed, confidence, missed = scores.reshape(3, here.num_states)
        return Agreement(len(self._message.tokens), num_agreed.astype(np.int64), confidence, missed)

    def cosines(self) -> list[float]:
        return [value for stage in range(len(self._spans)) for value in self._do(stage, wire.Operation("cosines"))]

    def feature(self) -> Sequence[float]:
        return self._do(len(self._spans) - 1, wire.Operation("feature"))

    def _made(
        self, num_states: int, method: Literal["run", "vary", "gather"], sources: Sequence[RemoteBatch], **options: Any
    ) -> RemoteBatch:
        """Return a new batch, to be made of batches of one stage."""
        self._num_batches += 1
        batch = self._kept[self._num_batches] = RemoteBatch(sources[0].stage, self._num_batches, num_states)
        numbers = [source.number for source in sources]
        self._pending[batch.stage].append(wire.Operation(method, numbers, into=batch.number, **options))
        return batch

    def _brought(self, batch: RemoteBatch, stage: int) -> RemoteBatch:
        """Move a batch to a stage, directly from shard to shard, unless it is there already. Return the batch."""
        if batch.stage != stage:
            self._do(batch.stage, wire.Operation("ship", [batch.number], peer=stage_name(stage)))
            batch.stage = stage
        return batch

    def _do(self, stage: int, operation: wire.Operation) -> Sequence[float]:
        """Let a stage do its pending operations and this one, and return the numbers of the answer."""
        operations, self._pending[stage] = [*self._pending[stage], operation], []
        expand = wire.Expand(search_id=self._message.search_id, operations=operations)
        self._server.send(stage_name(stage), expand)
        return self._answer().values

    def _answer(self) -> wire.Sought:
        """Return the next answer to this search. Messages that answer earlier questions are dropped."""
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            received = self._server.receive(left_s)
            message = received.message if received is not None else None
            if isinstance(message, wire.Search):
                self._waiting.append(message)
            elif isinstance(message, wire.Sought) and message.search_id == self._message.search_id:
                if message.error:
                    raise SearchFailedError(message.error)
                return message
        raise SearchFailedError(f"no Sought came from the shards within {_ANSWER_TIMEOUT_S:.0f} s")
