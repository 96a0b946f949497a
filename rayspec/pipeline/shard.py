"""The process of one stage of the model, or of one rank of a stage. A plain class: `placement` makes it an actor."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from rayspec.choices import Choice
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.loading import (
    affordable_slots,
    choices_here,
    free_bytes,
    load_weights,
    make_runner,
    prepare_span,
    resolve_max_model_len,
)
from rayspec.decode.profile import BUDGET_S, measurements
from rayspec.decode.rounds import Head
from rayspec.decode.runner import ways_of
from rayspec.decode.stages import SpanRunner
from rayspec.decode.work import Prefill
from rayspec.errors import TransportError
from rayspec.model.architecture import Decomposition, decompose
from rayspec.model.fused import bytes_of_copies
from rayspec.model.kv_cache import CacheSize
from rayspec.model.threads import in_thread_of_its_own
from rayspec.model.weights import resolve_device
from rayspec.pipeline.endpoint import ENGINE, Endpoint, NewEpoch, Received, stage_name
from rayspec.pipeline.messages import (
    Begin,
    Broken,
    Expand,
    Follow,
    Forward,
    Measure,
    Measured,
    Message,
    Moved,
    Moves,
    Seek,
)
from rayspec.pipeline.ranks import LeadingSpan, follow
from rayspec.pipeline.stage_worker import StageWorker
from rayspec.pipeline.tensor_parallel import RankGroup, split_tensor_parallel
from rayspec.pipeline.transport import Secret, node_address
from rayspec.planning.latency import Measurement

# How long later messages of higher priority may overtake a message. Rounds come first; a prefill gives way to them for
# a moment, and a plan search runs in the gaps, but neither waits for ever.
_PREFILL_PATIENCE_S = 0.03
_SEARCH_PATIENCE_S = 0.1
# How long a rank waits for the other ranks of its stage, while they load and in every exchange.
_RANKS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Description of a shard to be started. config: with `parallel`. rank: among the ranks of its stage."""

    config: EngineConfig
    stage: int
    rank: int
    vocab_size: int
    secret: Secret

    @property
    def options(self) -> ParallelOptions:
        assert self.config.parallel is not None
        return self.config.parallel

    @property
    def name(self) -> str:
        return rank_name(self.stage, self.rank)


def rank_name(stage: int, rank: int) -> str:
    """Return the name of a rank's shard. The leader (rank 0) has the name of its stage."""
    return stage_name(stage) if rank == 0 else f"{stage_name(stage)}.{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A shard whose weights are loaded. ways: choices by which drafts may run each of its sublayers."""

    dtype: str
    weight_bytes: int
    ways: Sequence[Sequence[Choice]]


@dataclass(order=True, slots=True)
class _Due:
    at: float
    order: int
    received: Received = field(compare=False)


class Shard:
    """Loads its span, then serves messages until it fails or is killed.

    Call `load`, then `serve`, which returns only at the end. Call `address` meanwhile, from another thread.
    """

    span: SpanRunner
    head: Head | None
    worker: StageWorker
    _endpoint: Endpoint

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self._address: Future[str] = Future()
        self._order = itertools.count()
        self._inbox: list[_Due] = []

    def process_id(self) -> int:
        return os.getpid()

    def room(self) -> tuple[str, int]:
        """Return where the shard runs and the free memory there, before anything is loaded. Shards of the same place,
        which names the node and GPU, share the memory. Raises ConfigError for a device that does not exist."""
        device = resolve_device(self._spec.config.device)
        identity = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "memory"
        return f"{node_address()} {identity}", free_bytes(device)

    def load(self, spans: Sequence[tuple[int, int]], meeting_place: str | None) -> Loaded:
        """Load this stage's weights. The ranks of a stage load at the same time and meet at `meeting_place`.

        spans: sublayers [first, last) of every stage. meeting_place: None without tensor parallelism.
        Raises ConfigError, CheckpointError, UnsupportedModelError.
        """
        return in_thread_of_its_own(lambda: self._load(spans, meeting_place))

    def _load(self, spans: Sequence[tuple[int, int]], meeting_place: str | None) -> Loaded:
        spec = self._spec
        self._spans = tuple((first, last) for first, last in spans)
        first, last = self._spans[spec.stage]
        layers = range(first // 2, last // 2)
        torch.set_num_threads(spec.config.num_threads or max(1, int(spec.options.cpus_per_shard)))
        self._device = resolve_device(spec.config.device)
        # Ranks share a stage's files in CPU memory, and each moves its share of the weights to its device.
        loaded_to = spec.config if meeting_place is None else spec.config.replace(device="cpu")
        model = load_weights(loaded_to, layers=layers)
        parts = decompose(model, layers=layers)

        def split(parts: Decomposition) -> Decomposition:
            if meeting_place is None:
                return parts
            group = RankGroup(rank=spec.rank, size=spec.options.tensor, address=meeting_place, device=str(self._device))
            group.join(_RANKS_TIMEOUT_S)
            return split_tensor_parallel(model, parts, group)

        self._parts, self._offloaded, weight_bytes = prepare_span(spec.config, model, parts, split)
        return Loaded(
            dtype=str(self._parts.dtype).removeprefix("torch."),
            weight_bytes=weight_bytes + sum(bytes_of_copies(self._parts).values()),
            ways=ways_of(self._parts, choices_here(spec.config, self._parts)),
        )

    def num_slots(self, num_sharing: int) -> int:
        """Return the tokens of KV cache that fit into this shard's part of the free memory, which `num_sharing` shards
        share. Raises CheckpointError for fewer than 16."""
        return affordable_slots(self._spec.config, self._parts, self._device, num_sharing=num_sharing)

    def address(self) -> str:
        """Wait until `serve` listens, and return its address."""
        return self._address.result()

    def serve(self, size: CacheSize) -> None:
        """Serve until the process is killed. Report any error to the engine, then raise it."""
        spec = self._spec
        rank = (spec.stage, spec.options.stages) if spec.rank == 0 and spec.options.stages > 1 else None
        endpoint = Endpoint(spec.name, spec.secret, host=node_address(), rank=rank)
        try:
            self.prepare(endpoint, size)
            self._address.set_result(endpoint.address)
            while True:
                self._serve_epoch()
        except Exception as error:
            if not self._address.done():
                self._address.set_exception(error)
            if endpoint.epoch:
                endpoint.send(ENGINE, Broken(epoch=endpoint.epoch, reason=f"{type(error).__name__}: {error}"))
                time.sleep(0.2)  # for the message to leave
            raise
        finally:
            endpoint.close()

    def prepare(self, endpoint: Endpoint, size: CacheSize) -> None:
        """Make the KV cache and all else that serving needs, after the weights are loaded."""
        spec, self._endpoint = self._spec, endpoint
        # Several cohorts tap at the same time, and the engine may ask about tokens of each.
        num_taps = spec.config.num_tap_tokens * (1 + spec.options.num_cohorts)
        max_model_len = resolve_max_model_len(spec.config, self._parts.config)
        runner = make_runner(spec.config, self._parts, size, max_model_len)
        self.span = SpanRunner(runner, num_taps=num_taps)
        if spec.options.tensor > 1 and spec.rank == 0:
            followers = [rank_name(spec.stage, rank) for rank in range(1, spec.options.tensor)]

            def announce(message: Follow) -> None:
                for name in followers:
                    endpoint.send(name, message)

            self.span = LeadingSpan(runner, num_taps=num_taps, epoch=lambda: endpoint.epoch, announce=announce)
        self.head = None
        if spec.stage == spec.options.stages - 1 and spec.rank == 0:
            self.head = Head(
                runner.head,
                vocab_size=spec.vocab_size,
                device=self._device,
                verification=spec.config.speculation.verification,
                num_taps=num_taps,
            )

        def measure(epoch: int) -> Measured:
            num_sublayers = len(self._parts.sublayers)
            return Measured(
                epoch=epoch,
                names=self._parts.curve_names,
                measurements=self._measurements(),
                transfer_s=self._offloaded.transfer_seconds() if self._offloaded else [0.0] * num_sublayers,
            )

        self.worker = StageWorker(spec.stage, self._spans, self.span, self.head, measure)

    def _serve_epoch(self) -> None:
        """Handle messages until a new epoch begins or communication fails. Raises errors of the model."""
        try:
            while True:
                self.collect()
                self.handle(heapq.heappop(self._inbox).received)
        except NewEpoch:
            if self._spec.rank == 0:  # the other ranks forget when the leader announces it, which may be later
                self._inbox.clear()
                self.worker.forget()
        except TransportError as error:
            self._inbox.clear()
            self._endpoint.send(ENGINE, Broken(epoch=self._endpoint.epoch, reason=str(error), ended=False))

    def collect(self) -> None:
        """Queue all messages that have come in; wait for one if the queue is empty."""
        while (received := self._endpoint.receive(0.0 if self._inbox else None)) is not None:
            self._queue(received)

    def _queue(self, received: Received) -> None:
        due = time.monotonic() + _patience_s(received.message)
        heapq.heappush(self._inbox, _Due(due, next(self._order), received))

    def handle(self, received: Received) -> None:
        """Handle a message, and send the messages that follow from it."""
        message, endpoint = received.message, self._endpoint
        with endpoint.progress.of(type(message).__name__, _size(message)):
            if isinstance(message, Follow):
                follow(self.span, message, self._measurements)
            else:
                if isinstance(message, Measure) and isinstance(self.span, LeadingSpan):
                    self.span.announce(Follow(epoch=endpoint.epoch, measure=True))
                for outgoing in self.worker.handle(message, received.tensors):
                    if outgoing.peer == self._spec.name:  # the only stage: its next pass is queued like any message
                        self._queue(Received(outgoing.peer, outgoing.message, list(outgoing.tensors)))  # type: ignore[arg-type]
                    else:
                        endpoint.send(outgoing.peer, outgoing.message, outgoing.tensors)
        if isinstance(message, Begin | Forward | Follow):
            endpoint.num_passes += 1
        if isinstance(message, Moves):
            moved = Moved(epoch=endpoint.epoch, worked_s=endpoint.progress.worked_s, num_passes=endpoint.num_passes)
            endpoint.send(ENGINE, moved)

    def _measurements(self) -> list[Measurement]:
        """Measure this rank's part of the stage. All ranks of a stage must call this, because they run the same passes
        together."""
        budget_s = BUDGET_S if self._spec.options.tensor == 1 else None
        return measurements(self.span.runner, self._offloaded, device=self._spec.name, budget_s=budget_s)


def _patience_s(message: Message) -> float:
    if isinstance(message, Seek | Expand):
        return _SEARCH_PATIENCE_S
    is_prefill = isinstance(message, Begin) and isinstance(message.work, Prefill)
    if is_prefill or (isinstance(message, Forward) and not message.work.fixed_shape):
        return _PREFILL_PATIENCE_S
    return 0.0


def _size(message: Message) -> int | None:
    """Return the rows of a pass. Return None for other tasks: how long they take does not follow from earlier ones."""
    if isinstance(message, Begin):
        return message.work.num_rows
    work = message.work if isinstance(message, Forward | Follow) else None
    return sum(span.num_rows for span in work.rows) if work is not None else None
