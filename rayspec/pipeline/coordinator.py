"""The coordinator of a replica: measures the cluster, and answers questions about states that stay with the shards.

Hidden states never reach the coordinator. It decides what to run, skip and keep. Shards expand the states with their
own weights, send them to the next shard at the end of their span, and report scores.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayspec.choices import Choice
from rayspec.decode.search import Agreement, answer
from rayspec.pipeline.endpoint import COORDINATOR, ENGINE, Endpoint, NewEpoch, Received, Stopped
from rayspec.pipeline.messages import (
    Broken,
    Drop,
    Expand,
    FindAgreement,
    Gather,
    Lap,
    Measure,
    Measured,
    Message,
    Operation,
    Profile,
    Profiled,
    RunSublayer,
    Search,
    Searched,
    Seek,
    Ship,
    Similarity,
    Sought,
    TargetCosines,
    TargetFeature,
    TimedHops,
    TimeHops,
)
from rayspec.pipeline.stage_worker import stage_name
from rayspec.pipeline.transport import Secret, node_address
from rayspec.types import RayspecError

_ANSWER_TIMEOUT_S = 30.0
_MEASURE_TIMEOUT_S = 300.0
_NUM_HOPS = 200
_LAP_LENGTH = 20  # round trips in one message: a longer route makes the message larger

M = TypeVar("M", bound=Message)


class SearchFailedError(RayspecError):
    """A plan search could not be finished; the plan in use stays."""

    kind = "search_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """spans: sublayers [first, last) of every stage. hidden_size: width of the states that hops are timed with."""

    spans: tuple[tuple[int, int], ...]
    hidden_size: int
    secret: Secret


class Coordinator:
    """Serves the engine's questions one at a time. It is stateless: a replacement needs no data from it."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        self._stages = [stage_name(stage) for stage in range(len(spec.spans))]
        self._address: Future[str] = Future()
        self._num_answers = 0

    def process_id(self) -> int:
        return os.getpid()

    def address(self) -> str:
        """Wait until `serve` listens, and return its address."""
        return self._address.result()

    def serve(self) -> None:
        """Serve until the engine sends Stop. Report any error to the engine, then raise it."""
        torch.set_num_threads(1)
        endpoint = Endpoint(COORDINATOR, self._spec.secret, host=node_address())
        self._address.set_result(endpoint.address)
        try:
            while True:
                self.serve_one(endpoint)
        except Stopped:
            return
        except Exception as error:
            if endpoint.epoch:
                endpoint.send(ENGINE, Broken(epoch=endpoint.epoch, reason=f"{type(error).__name__}: {error}"))
            raise
        finally:
            endpoint.close()

    def serve_one(self, endpoint: Endpoint) -> None:
        """Wait for the next question and answer it. A new epoch ends the work on it."""
        with suppress(NewEpoch):
            received = endpoint.take_deferred() or endpoint.receive()
            match received.message if received is not None else None:
                case Search() as message:
                    endpoint.send(ENGINE, self._search(endpoint, message))
                case Profile():
                    stages = measured_stages(endpoint, self._stages)
                    hops_s = self._hops_s(endpoint, torch.zeros(1, 1, self._spec.hidden_size), _NUM_HOPS)
                    link_s = [float(np.median(link)) for link in hops_s] or [0.0]
                    endpoint.send(ENGINE, Profiled(epoch=endpoint.epoch, stages=stages, link_s=link_s))
                case TimeHops(num_bytes=num_bytes, num_samples=num_samples):
                    hops_s = self._hops_s(endpoint, torch.zeros(num_bytes, dtype=torch.uint8), num_samples)
                    endpoint.send(ENGINE, TimedHops(epoch=endpoint.epoch, hops_s=hops_s))

    def _search(self, endpoint: Endpoint, message: Search) -> Searched:
        started = time.perf_counter()
        search = RemoteSearch(endpoint, message, self._spec.spans)
        found, reason = None, ""
        try:
            search.begin()
            found = answer(message.question, search, num_sublayers=self._spec.spans[-1][1], started=started)
            self._num_answers += 1
        except SearchFailedError as error:
            reason = str(error)
        finally:
            search.end()
        return Searched(
            epoch=endpoint.epoch,
            search_id=message.search_id,
            version=self._num_answers,
            answer=found,
            reason=reason,
        )

    def _hops_s(self, endpoint: Endpoint, state: Tensor, num_samples: int) -> list[list[float]]:
        """Return seconds of hops with this tensor, from each stage to the next one and from the last to the first. A
        hop is half of a round trip by the clock of one stage, because clocks of two machines may differ."""
        names, links = self._stages, list[list[float]]()
        for here, there in zip(names, [*names[1:], names[0]], strict=True) if len(names) > 1 else ():
            samples: list[float] = []
            while len(samples) < num_samples:
                route = [*[here, there] * _LAP_LENGTH, here]
                endpoint.send(route[0], Lap(epoch=endpoint.epoch, route=[*route[1:], COORDINATOR]), [state])
                stamps = _await(endpoint, Lap, _ANSWER_TIMEOUT_S).message.stamps[::2]
                samples += [(after - before) / 2 for before, after in itertools.pairwise(stamps)]
            links.append(samples[:num_samples])
        return links


def measured_stages(endpoint: Endpoint, names: Sequence[str]) -> list[Measured]:
    """Measure machines at the same time, and the stages of a machine one after the other, so that they do not disturb
    one another. Return the measurements in the order of the names."""
    waiting: dict[str, list[str]] = defaultdict(list)
    for name in reversed(names):
        waiting[endpoint.host_of(name)].append(name)
    for stages in waiting.values():
        endpoint.send(stages.pop(), Measure(epoch=endpoint.epoch))
    found: dict[str, Measured] = {}
    while len(found) < len(names):
        received = _await(endpoint, Measured, _MEASURE_TIMEOUT_S)
        found[received.sender] = received.message
        if stages := waiting[endpoint.host_of(received.sender)]:
            endpoint.send(stages.pop(), Measure(epoch=endpoint.epoch))
    return [found[name] for name in names]


def _await(endpoint: Endpoint, kind: type[M], timeout_s: float) -> Any:
    """Return the next message of that kind. Messages from the engine are deferred. Other messages are dropped, because
    they answer questions that were given up."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        received = endpoint.receive(left_s)
        if received is not None and isinstance(received.message, kind):
            return received
        if received is not None and received.sender == ENGINE:
            endpoint.defer(received)
    raise SearchFailedError(f"no {kind.__name__} came from the shards within {timeout_s:.0f} s")


@dataclass(eq=False)
class RemoteBatch:
    """A batch of states that a stage keeps under a number until the search drops it."""

    stage: int
    number: int
    num_states: int


class RemoteSearch:
    """`search.TappedStates` whose states stay on the shards. Operations are queued, and sent to a shard when its
    answer or its states are needed elsewhere. A knapsack then takes one message and one answer per sublayer, a trial a
    few per stage."""

    def __init__(self, endpoint: Endpoint, message: Search, spans: Sequence[tuple[int, int]]) -> None:
        self._endpoint = endpoint
        self._message = message
        self._spans = spans
        self._pending: list[list[Operation]] = [[] for _ in spans]  # operations that a stage has not been sent yet
        self._num_batches = 1
        self._kept: dict[int, RemoteBatch] = {}
        self._stage_of = [stage for stage, (first, last) in enumerate(spans) for _ in range(first, last)]

    def begin(self) -> None:
        """Let the shards prepare the tapped states. Raises SearchFailedError if a shard has dropped some of them."""
        message = self._message
        seek = Seek(epoch=self._endpoint.epoch, search_id=message.search_id, tokens=message.tokens, rows=message.rows)
        for stage in range(len(self._spans)):
            self._endpoint.send(stage_name(stage), seek)
        for _ in self._spans:
            self._answer()

    def end(self) -> None:
        """Let the shards forget the search and its states."""
        for stage in range(len(self._spans)):
            self._endpoint.send(stage_name(stage), forgotten(self._endpoint.epoch))

    def start(self) -> RemoteBatch:
        """Return a copy of the first state, because the search may start again."""
        return self.gather([RemoteBatch(0, 0, 1)], np.zeros(1, np.int64))

    def run(self, sublayer: int, choice: Choice, states: Any, *, varied: bool = False) -> RemoteBatch:
        stage = self._stage_of[sublayer]
        here = self._brought(states, stage)
        result = self._new(stage, here.num_states)
        self._pending[stage].append(RunSublayer(sublayer, choice, here.number, result.number, varied))
        return result

    def vary(self, sublayer: int, choice: Choice, states: Any) -> RemoteBatch:
        return self.run(sublayer, choice, states, varied=True)

    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> RemoteBatch:
        stage = max(batch.stage for batch in batches)
        here = [self._brought(batch, stage) for batch in batches]
        result = self._new(stage, len(index))
        operation = Gather([batch.number for batch in here], np.asarray(index).tolist(), result.number)
        self._pending[stage].append(operation)
        return result

    def keep(self, batches: Sequence[Any]) -> None:
        for number in self._kept.keys() - {batch.number for batch in batches}:
            batch = self._kept.pop(number)
            self._pending[batch.stage].append(Drop(number))

    def similarity(self, sublayer: int, states: Any) -> NDArray[np.float64]:
        stage = self._stage_of[sublayer]
        here = self._brought(states, stage)
        self._pending[stage].append(Similarity(sublayer, here.number))
        return np.asarray(self._flush(stage))

    def agreement(self, states: Any) -> Agreement:
        stage = len(self._spans) - 1
        here = self._brought(states, stage)
        self._pending[stage].append(FindAgreement(here.number))
        num_agreed, confidence, missed = np.asarray(self._flush(stage)).reshape(3, here.num_states)
        return Agreement(len(self._message.tokens), num_agreed.astype(np.int64), confidence, missed)

    def cosines(self) -> list[float]:
        cosines: list[float] = []
        for stage, pending in enumerate(self._pending):
            pending.append(TargetCosines())
            cosines.extend(self._flush(stage))
        return cosines

    def feature(self) -> Sequence[float]:
        self._pending[-1].append(TargetFeature())
        return self._flush(len(self._spans) - 1)

    def _brought(self, batch: RemoteBatch, stage: int) -> RemoteBatch:
        """Move a batch to a stage, directly from shard to shard, unless it is there already. Return the batch."""
        if batch.stage == stage:
            return batch
        self._pending[batch.stage] += [Ship(batch.number, stage_name(stage)), Drop(batch.number)]
        self._flush(batch.stage)
        batch.stage = stage
        return batch

    def _flush(self, stage: int) -> Sequence[float]:
        operations, self._pending[stage] = self._pending[stage], []
        expand = Expand(epoch=self._endpoint.epoch, search_id=self._message.search_id, operations=operations)
        self._endpoint.send(stage_name(stage), expand)
        return self._answer().values

    def _answer(self) -> Sought:
        while True:
            received: Received = _await(self._endpoint, Sought, _ANSWER_TIMEOUT_S)
            answer = received.message
            assert isinstance(answer, Sought)
            if answer.search_id != self._message.search_id:
                continue
            if answer.error:
                raise SearchFailedError(answer.error)
            return answer

    def _new(self, stage: int, num_states: int) -> RemoteBatch:
        self._num_batches += 1
        batch = self._kept[self._num_batches] = RemoteBatch(stage, self._num_batches, num_states)
        return batch


def forgotten(epoch: int) -> Seek:
    """Return the message by which a shard forgets the search under way, if there is one."""
    return Seek(epoch=epoch, search_id=0, tokens=(), rows=())
