"""The process of one stage of the model, or of one rank of a stage. A plain class: `placement` makes it an actor."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from rayspec.choices import Choice
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.generate_state import Cuts
from rayspec.decode.generation_config import eos_token_ids
from rayspec.decode.loading import (
    affordable_slots,
    bytes_of_passes,
    choices_here,
    free_bytes,
    load_weights,
    make_runner,
    prepare_span,
    resolve_max_model_len,
)
from rayspec.decode.profile import BUDGET_S, measurements
from rayspec.decode.rounds import Head, first_pass, script
from rayspec.decode.runner import in_thread_of_its_own, on_device, ways_of
from rayspec.decode.search import PlanSearch
from rayspec.decode.stages import SpanRunner, out_of_memory
from rayspec.decode.work import Pass, Prefill, Result, TapsGoneError, Work
from rayspec.errors import TransportError
from rayspec.forms.grammar import Grammars
from rayspec.model.adapters import matrices_of_adapters
from rayspec.model.architecture import decompose
from rayspec.model.kv_cache import CacheSize
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import load_tokenizer, resolve_device, tensors_fingerprint
from rayspec.pipeline import messages as wire
from rayspec.pipeline.collective import node_address
from rayspec.pipeline.ranks import LeadingSpan, follow
from rayspec.pipeline.server import COORDINATOR, ENGINE, NewEpoch, Server, stage_name
from rayspec.pipeline.tensor_parallel import RankGroup, split_tensor_parallel
from rayspec.pipeline.transport import Received, Secret
from rayspec.planning.latency import Measurement
from rayspec.planning.partition import ModelCosts

# How long later messages of higher priority may overtake a message. Rounds come first; a prefill gives way to them for
# a moment, and a plan search runs in the gaps, but neither waits for ever.
_PREFILL_PATIENCE_S = 0.03
_SEARCH_PATIENCE_S = 0.1
# How long a rank waits for the other ranks of its stage, while they load and in every exchange.
_RANKS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Description of a replica to be started.

    config: with `parallel`. costs: costs of the model on one rank. They decide the layers of each stage, unless the
    option `layers` does. splits: whether layers split into attention and MLP. num_slots: largest number of KV cache
    slots; there are fewer if the smallest shard cannot hold as many. window: the longest sliding window of a layer.
    shard_type: class of the shards; tests use another one.
    """

    config: EngineConfig
    costs: ModelCosts
    vocab_size: int
    hidden_size: int
    num_slots: int
    num_gpus: float
    window: int | None = None
    splits: bool = True
    shard_type: type[Shard]

    @property
    def options(self) -> ParallelOptions:
        assert self.config.parallel is not None
        return self.config.parallel


def rank_name(stage: int, rank: int) -> str:
    """Return the name of a rank's shard. The leader (rank 0) has the name of its stage."""
    return stage_name(stage) if rank == 0 else f"{stage_name(stage)}.{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A shard whose weights are loaded. ways: choices by which drafts may run each of its sublayers. cuts: how a model
    that does not split takes rows back. problem: why it cannot. weights: fingerprint of the weights and adapters.
    scores_prompts: see `ModelInfo`."""

    dtype: str
    weights: str
    ways: Sequence[Sequence[Choice]] = ()
    cuts: Cuts | None = None
    problem: str = ""
    scores_prompts: bool = True


@dataclass(order=True, slots=True)
class _Due:
    at: float
    order: int
    received: Received = field(compare=False)


@dataclass(slots=True)
class _Seeking:
    """A plan search under way: this span's part of it, and the batches of states that this stage has."""

    search_id: int
    search: PlanSearch
    batches: dict[int, Tensor] = field(default_factory=dict)


class Shard(Server):
    """Loads its span, then serves messages until it fails or is killed. The stage with the head keeps the script of
    each work under way: it sends the script's passes to the first stage, and finally the result to the engine.
    """

    span: SpanRunner
    head: Head | None
    cuts: Cuts | None = None
    _ranks: RankGroup | None = None

    def __init__(self, blueprint: Blueprint, secret: Secret, stage: int, rank: int) -> None:
        super().__init__(rank_name(stage, rank), secret)
        self._blueprint, self._config, self._options = blueprint, blueprint.config, blueprint.options
        self.stage, self.rank = stage, rank
        self._is_last = stage == self._options.stages - 1
        self._order = itertools.count()
        self._inbox: list[_Due] = []
        self._scripts: dict[int, Generator[Pass, Tensor, Result]] = {}
        self._seeking: _Seeking | None = None

    def room(self) -> tuple[str, int]:
        """Return where the shard runs and the free memory there, before anything is loaded. Shards of the same place,
        which names the node and GPU, share the memory. Raises ConfigError for a device that does not exist."""
        device = resolve_device(self._config.device)
        identity = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "memory"
        return f"{node_address()} {identity}", free_bytes(device)

    def load(self, spans: Sequence[tuple[int, int]], meeting_place: str | None) -> Loaded:
        """Load this stage's weights. spans: sublayers [first, last) of every stage. meeting_place: of the ranks of a
        stage, which load at the same time. Raises ConfigError, CheckpointError, UnsupportedModelError."""
        self._spans = tuple((first, last) for first, last in spans)
        first, last = self._spans[self.stage]
        self._device = resolve_device(self._config.device)

        def load() -> Loaded:
            torch.set_num_threads(self._config.num_threads or max(1, int(self._options.cpus_per_shard)))
            return self._load(range(first // 2, last // 2), meeting_place)

        return in_thread_of_its_own(load)

    def _load(self, layers: range, meeting_place: str | None) -> Loaded:
        config = self._config
        if meeting_place is not None:
            size, device = self._options.tensor, str(self._device)
            self._ranks = RankGroup(rank=self.rank, size=size, address=meeting_place, device=device)
        ranks = self._ranks
        # Ranks share a stage's files in CPU memory, and each moves its share of the weights to its device.
        model = load_weights(config if ranks is None else config.replace(device="cpu"), layers=layers)
        weights = tensors_fingerprint(model.state_dict().values())

        def split(parts: Decomposition) -> Decomposition:
            if ranks is None:
                return parts
            ranks.join(_RANKS_TIMEOUT_S)
            return split_tensor_parallel(model, parts, ranks)

        agree = None if ranks is None else ranks.all_agree
        whole = decompose(model, layers=layers)
        self._parts, self._offloaded, self._config = prepare_span(config, model, whole, split, agree)
        return Loaded(
            dtype=str(self._parts.dtype).removeprefix("torch."),
            weights=weights + tensors_fingerprint(matrices_of_adapters(self._parts)),
            ways=ways_of(self._parts, choices_here(self._config, self._parts)),
        )

    def rehearse(self) -> None:
        """Measure the memory of the largest passes, after all shards of this place have loaded their weights."""
        self._pass_bytes = bytes_of_passes(self._config, self._parts)

    def num_slots(self, num_sharing: int) -> int:
        """Return the tokens of KV cache that fit into this shard's part of the free memory, which `num_sharing` shards
        share. Raises CheckpointError for fewer than 16."""
        return affordable_slots(
            self._config, self._parts, self._device, pass_bytes=self._pass_bytes, num_sharing=num_sharing
        )

    def serve(self, size: CacheSize, cuts: Cuts | None = None) -> None:
        """Serve until the process is killed. Report any error to the engine, then raise it. cuts: of all stages of a
        model that does not split."""
        rank = (self.stage, self._options.stages) if self.rank == 0 and self._options.stages > 1 else None
        self.listen(node_address(), rank=rank, device=self._device)
        with on_device(self._device), self.serving():
            self.cuts = cuts
            self.prepare(size)
            self._address.set_result(self.transport.address)
            while True:
                self.serve_epoch()

    def prepare(self, size: CacheSize) -> None:
        """Make the KV cache and all else that serving needs, after the weights are loaded."""
        config = self._config
        # Several cohorts tap at the same time, and the engine may ask about tokens of each.
        num_taps = config.num_tap_tokens * (1 + self._options.num_cohorts)
        agree = None if self._ranks is None else self._ranks.all_agree
        runner = make_runner(config, self._parts, size, resolve_max_model_len(config, self._parts.config), agree)
        self.span = SpanRunner(runner, num_taps=num_taps)
        if self._options.tensor > 1 and self.rank == 0:
            followers = [rank_name(self.stage, rank) for rank in range(1, self._options.tensor)]

            def announce(message: wire.Follow) -> None:
                for name in followers:
                    self.send(name, message)

            self.span = LeadingSpan(runner, num_taps=num_taps, announce=announce)
        self.head = None
        if self._is_last and self.rank == 0:
            self.head = Head(
                runner.head,
                draft_logits=partial(runner.head, drafting=True),
                operators=runner.operators,
                vocab_size=self._blueprint.vocab_size,
                device=self._device,
                verification=config.speculation.verification,
                num_taps=num_taps,
                grammars=self.grammars(),
            )

    def grammars(self) -> Grammars:
        config = self._config
        return Grammars(
            partial(load_tokenizer, config),
            vocab_size=self._blueprint.vocab_size,
            eos_token_ids=eos_token_ids(config),
        )

    def serve_epoch(self) -> None:
        """Handle messages until a new epoch begins or communication fails. Raises errors of the model."""
        try:
            while True:
                self.collect()
                self.handle(heapq.heappop(self._inbox).received)
        except NewEpoch:
            if self.rank == 0:  # the other ranks forget when the leader announces it, which may be later
                self.forget()
        except TransportError as error:
            self._inbox.clear()
            self.send(ENGINE, wire.Broken(reason=str(error), ended=False))

    def forget(self) -> None:
        """Drop all work under way, because a new epoch has begun."""
        self._inbox.clear()
        self._scripts.clear()
        self._seeking = None
        self.span.forget()
        if self.head is not None:
            self.head.forget()

    def collect(self) -> None:
        """Queue all messages that have come in; wait for one if the queue is empty."""
        while (received := self.receive(0.0 if self._inbox else None)) is not None:
            self._queue(received)

    def handle(self, received: Received) -> None:
        """Handle a message, and send the messages that follow from it. Raises errors of the model, except lack of
        memory, which becomes a Failed."""
        message = received.message
        with self.progress.of(type(message).__name__, self.size_of(message)):
            self._do(message, received.tensors)
        if isinstance(message, wire.Begin | wire.Forward | wire.Follow):
            self.num_passes += 1

    @torch.inference_mode()
    def _do(self, message: wire.Message, tensors: Sequence[Tensor]) -> None:
        match message:
            case wire.Follow():
                follow(self.span, message, self._measurements)
            case wire.Begin():
                self._pass(self.first_pass(message.work), None, message)
            case wire.Forward():
                self._pass(message.work, tensors[0] if tensors else None, message.begin)
            case wire.Failed():
                if message.begin is not None:
                    self._enter(message.begin)
                self._pass_on(message)
            case wire.Seek() | wire.Shipped() | wire.Expand():
                self._search(message, tensors)
            case wire.Moves():
                self.span.move(message.moves)
                self._send(ENGINE, wire.Moved())
            case wire.Measure():
                self._measure()
            case wire.Lap():
                peer, *rest = message.route
                stamps = [*message.stamps, time.monotonic()]
                self._send(peer, wire.Lap(route=rest, stamps=stamps), tensors)
            case _:
                raise AssertionError(f"a stage does not take {type(message).__name__}")

    def first_pass(self, work: Work) -> Pass:
        return first_pass(work)

    def script(self, work: Work, head: Head) -> Generator[Pass, Tensor, Result]:
        return script(work, head)

    def note_loss(self, error: Exception) -> None:
        self.span.runner.note_loss(error)

    def size_of(self, message: wire.Message) -> int | None:
        """Return the rows of a pass. Return None for other tasks: how long they take does not follow from earlier
        ones."""
        if isinstance(message, wire.Begin):
            return message.work.num_rows
        work = message.work if isinstance(message, wire.Forward | wire.Follow) else None
        return sum(span.num_rows for span in work.rows) if work is not None else None

    def _queue(self, received: Received) -> None:
        due = time.monotonic() + _patience_s(received.message)
        heapq.heappush(self._inbox, _Due(due, next(self._order), received))

    def _send(self, peer: str, message: wire.Message, tensors: Sequence[Tensor] = ()) -> None:
        if peer == self.name:  # the only stage: its next pass is queued like any message
            self._queue(Received(peer, message, list(tensors)))  # type: ignore[arg-type]
        else:
            self.send(peer, message, tensors)

    def _pass(self, work: Pass, hidden: Tensor | None, begin: wire.Begin | None) -> None:
        if begin is not None:
            self._enter(begin)
        try:
            hidden = self.span.run(work, None if hidden is None else hidden.to(self._device))
            if self._is_last:
                # Continue the script with the states before the head: send its next pass, or its result.
                self._send(stage_name(0), wire.Forward(work=self._scripts[work.round_id].send(hidden)))
            else:
                # Stages without work in the pass are bypassed; the last one, with the head, always has work.
                last = len(self._spans) - 1
                busy = (stage for stage in range(self.stage + 1, last) if work.needs(*self._spans[stage]))
                self._send(
                    stage_name(next(busy, last)),
                    wire.Forward(work=work, begin=begin),
                    [hidden] if hidden.numel() else (),
                )
        except StopIteration as end:
            del self._scripts[work.round_id]
            self._send(ENGINE, wire.Done(work_id=work.round_id, result=end.value))
        except Exception as error:  # noqa: BLE001 - errors of Triton are no RuntimeErrors; `out_of_memory` raises others
            self.note_loss(error)
            self._pass_on(wire.Failed(work_id=work.round_id, reason=str(out_of_memory(error)), begin=begin))

    def _pass_on(self, failed: wire.Failed) -> None:
        """Tell the next stage, as the pass would have done, or drop the work and report it."""
        if not self._is_last:
            self._send(stage_name(self.stage + 1), failed)
        else:
            del self._scripts[failed.work_id]
            self._send(ENGINE, msgspec.structs.replace(failed, begin=None))

    def _enter(self, begin: wire.Begin) -> None:
        """Note what begins here; the stage with the head opens the work's sequences."""
        if not self._is_last:
            return
        assert self.head is not None
        for sequence_id in begin.closed:
            self.head.close(sequence_id)
        for spec in begin.opened:
            self.head.open(spec)
        passes = self.script(begin.work, self.head)
        next(passes)  # the first stage has run that one already
        self._scripts[begin.work.id] = passes

    def _search(self, message: wire.Seek | wire.Shipped | wire.Expand, tensors: Sequence[Tensor]) -> None:
        """Take part in a plan search. If states are gone or memory is short, the search fails and the shard goes on."""
        try:
            if isinstance(message, wire.Seek):
                self._seek(message)
            elif self._seeking is not None and self._seeking.search_id == message.search_id:
                self._expand(message, tensors, self._seeking)
        except Exception as error:  # noqa: BLE001 - `out_of_memory` raises others
            problem = f"{self.name} has no captured states of some tokens any more"
            if not isinstance(error, TapsGoneError):
                problem = f"{self.name} has too little memory for a search: {out_of_memory(error)}"
            self._send(COORDINATOR, wire.Sought(search_id=message.search_id, error=problem))

    def _seek(self, message: wire.Seek) -> None:
        self._seeking = None
        if not message.tokens:
            return
        next_tokens = self.head.next_tokens(message.tokens) if self.head is not None else None
        search = self.span.search(message.tokens, message.rows, next_tokens)
        self._seeking = _Seeking(message.search_id, search, {0: search.start()} if self.stage == 0 else {})
        self._send(COORDINATOR, wire.Sought(search_id=message.search_id))

    def _expand(self, message: wire.Shipped | wire.Expand, tensors: Sequence[Tensor], seeking: _Seeking) -> None:
        search, batches = seeking.search, seeking.batches
        values: Sequence[float] = ()
        if isinstance(message, wire.Shipped):
            batches[message.batch] = tensors[0].to(self._device)
        for operation in message.operations if isinstance(message, wire.Expand) else ():
            sublayer, found = operation.sublayer, [batches[source] for source in operation.sources]
            match operation.method:
                case "run":
                    batches[operation.into] = search.run(sublayer, operation.choices[0], *found)
                case "vary":
                    batches[operation.into] = search.vary(sublayer, operation.choices, *found)
                case "gather":
                    batches[operation.into] = search.gather(found, np.asarray(operation.index, np.int64))
                case "similarity":
                    values = search.similarity(sublayer, *found).tolist()
                case "agreement":
                    agreed = search.agreement(*found)
                    arrays = (agreed.num_agreed, agreed.confidence, agreed.missed_confidence)
                    values = [value for array in arrays for value in array.tolist()]
                case "cosines" | "feature" as method:
                    values = getattr(search, method)()
                case "drop":
                    del batches[operation.sources[0]]
                case "ship":
                    (source,) = operation.sources
                    onward = wire.Shipped(search_id=message.search_id, batch=source)
                    self._send(operation.peer, onward, [batches.pop(source)])
                    return
        self._send(COORDINATOR, wire.Sought(search_id=message.search_id, values=values))

    def _measure(self) -> None:
        if isinstance(self.span, LeadingSpan):
            self.span.announce(wire.Follow(measure=True))
        measured = wire.Measured(
            names=self._parts.curve_names,
            measurements=self._measurements(),
            transfer_s=self._offloaded.transfer_seconds() if self._offloaded else [0.0] * len(self._parts.sublayers),
        )
        self._send(ENGINE, measured)

    def _measurements(self) -> list[Measurement]:
        """Measure this rank's part of the stage. All ranks of a stage must call this."""
        budget_s = BUDGET_S[self._device.type] if self._options.tensor == 1 else None
        return measurements(self.span.runner, self._offloaded, device=self.name, budget_s=budget_s)


def _patience_s(message: wire.Message) -> float:
    if isinstance(message, wire.Seek | wire.Expand):
        return _SEARCH_PATIENCE_S
    is_prefill = isinstance(message, wire.Begin) and isinstance(message.work, Prefill)
    if is_prefill or (isinstance(message, wire.Forward) and not (message.work.fixed_shape or message.work.choices)):
        return _PREFILL_PATIENCE_S
    return 0.0
