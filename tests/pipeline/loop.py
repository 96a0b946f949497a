"""A whole replica in one thread: the real shards, coordinator and engine's end, over transports that deliver at random.

Every message is encoded and decoded. Between two transports order is kept, as it is in the real ones; of all the links
that have something to deliver, a seeded generator chooses. What died stays silent until the replica replaces it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from rayspec.choices import Weights
from rayspec.config import EngineConfig
from rayspec.decode.engine import Engine
from rayspec.decode.generate_state import Cuts
from rayspec.decode.requests import ModelInfo
from rayspec.decode.scheduler import Scheduler
from rayspec.decode.strategy import Strategy
from rayspec.decode.work import GenerationDefaults, Pass, Result, Round, RoundEntry, Work
from rayspec.model.architecture import decompose
from rayspec.model.fused import fuse
from rayspec.model.kv_cache import PAGE_SIZE, CacheSize
from rayspec.model.sizes import model_sizes
from rayspec.model.sublayers import Decomposition
from rayspec.model.weights import load_config, load_model, vocab_size
from rayspec.pipeline import ray_stages as ray_stages_module
from rayspec.pipeline import replica as replica_module
from rayspec.pipeline import server as server_module
from rayspec.pipeline.coordinator import Coordinator
from rayspec.pipeline.messages import AnyMessage, Envelope, Forward, Message, decode, encode
from rayspec.pipeline.ray_stages import RayStages
from rayspec.pipeline.replica import Replica, spans_of
from rayspec.pipeline.server import COORDINATOR, ENGINE, NewEpoch, stage_name
from rayspec.pipeline.shard import Blueprint, Loaded, Shard
from rayspec.pipeline.transport import Received
from rayspec.pipeline.whole_shard import WholeShard
from rayspec.planning.acceptance import DraftWhileWorth
from rayspec.planning.learning import CalibrationCurve
from rayspec.planning.partition import LayerCost, ModelCosts
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import no_draft
from tests.engines import RandomPlans, windowed_pages

NUM_LAYERS = 4
HIDDEN_SIZE = 64


@cache
def span_parts(path: str, first: int, last: int, quantised: tuple[Weights, ...] = ()) -> Decomposition:
    """Decoder layers [first, last) of the checkpoint, as a shard loads them, with these copies for drafts."""
    layers = range(first, last)
    config = EngineConfig(model=path, dtype="float32", device="cpu")
    parts = decompose(load_model(config, layers=layers), layers=layers)
    return fuse(parts, quantised=quantised) if quantised else parts


def cut(num_stages: int, num_layers: int = NUM_LAYERS) -> tuple[tuple[int, int], ...]:
    """Sublayers of stages as even as can be, the longer ones last."""
    ends = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return spans_of([range(first, last) for first, last in itertools.pairwise(ends)])


class TravellingPlans(RandomPlans):
    """`RandomPlans` whose rule of drafting can be sent to another process."""

    def rule(self) -> DraftWhileWorth | None:
        if self._rng.random() < 0.5:
            return None
        curve = CalibrationCurve(confidence=(0.0, 1.0), excess=(0.0, 0.0))
        rate = self._rng.random()
        return DraftWhileWorth(curve=curve, usual=0.8, rate=rate, step_s=0.1, row_s=0.3 * self._rng.random())


@dataclass
class Clock:
    """Time passes only where the engine waits in vain."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Loop:
    """Links between transports, and who reads them. patience: messages after which the engine waits no longer."""

    rng: random.Random
    clock: Clock = field(default_factory=Clock)
    links: dict[tuple[str, str], deque[Received]] = field(default_factory=dict)
    readers: dict[str, Callable[[], None]] = field(default_factory=dict)
    boxes: dict[str, LoopTransport] = field(default_factory=dict)
    delivered: list[tuple[str, AnyMessage, int]] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    chaos: Callable[[], None] | None = None
    patience: float = math.inf

    def put(self, sender: str, peer: str, message: Message, tensors: Sequence[Tensor], *, epoch: int) -> None:
        arrived = decode(encode(Envelope(sender, 0, 0, None, (), message, epoch)))
        received = Received(sender, arrived.message, [tensor.clone() for tensor in tensors], arrived.epoch)
        self.links.setdefault((sender, peer), deque()).append(received)

    def advance(self, reader: str) -> bool:
        """Deliver one message to anybody, `reader` being the one who waits. False: there is none."""
        if self.chaos is not None and reader == ENGINE:
            self.chaos()
        possible = [
            link for link, waiting in self.links.items() if waiting and (link[1] == reader or self._can_read(link[1]))
        ]
        if not possible:
            return False
        link = self.rng.choice(possible)
        received = self.links[link].popleft()
        self.delivered.append((link[1], received.message, received.epoch))
        self.boxes[link[1]].inbox.append(received)
        if link[1] != reader:
            self.waiting.add(link[1])
            self.readers[link[1]]()
            self.waiting.discard(link[1])
        return True

    def lose(self, name: str) -> None:
        """The process is gone, with all that was sent to it. What it has sent arrives nevertheless."""
        self.readers.pop(name, None)
        for link in [link for link in self.links if link[1] == name]:
            del self.links[link]

    def _can_read(self, name: str) -> bool:
        return name in self.readers and name not in self.waiting


class LoopTransport:
    """`Transport` over a loop. A reader who waits makes the others go on meanwhile."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.address = f"loop://{name}"
        self.link, self.epoch = None, 0
        self.inbox: deque[Received] = deque()
        self._loop, self._name = loop, name
        self._peers: set[str] = set()
        loop.boxes[name] = self

    def connect(self, peers: Mapping[str, str]) -> None:
        self._peers = set(peers)

    def send(self, peer: str, message: Message, tensors: Sequence[Tensor] = (), *, to_rank: int | None = None) -> None:
        assert to_rank is None
        assert peer in self._peers, f"{self._name} knows no {peer}"
        if peer == ENGINE or peer in self._loop.readers:
            self._loop.put(self._name, peer, message, tensors, epoch=self.epoch)

    def receive(self, timeout_s: float | None = None) -> Received | None:
        may_wait = self._name in {ENGINE, COORDINATOR}
        num_delivered = 0
        while not self.inbox and may_wait and self._loop.advance(self._name):
            num_delivered += 1
            if self._name == ENGINE and num_delivered >= self._loop.patience:
                break
        if self.inbox:
            return self.inbox.popleft()
        if self._name == ENGINE and num_delivered:
            return None
        if self._name == COORDINATOR and (timeout_s is None or timeout_s > 1):
            raise NewEpoch  # whom it waits for is dead: as soon as the engine has noticed there is a new epoch
        if self._name == ENGINE:
            self._loop.clock.sleep(timeout_s or 0.0)
        return None

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class LoopShard(Shard):
    """A shard that handles what has come in, and returns. quantised: copies that its drafts have."""

    quantised: tuple[Weights, ...] = ()

    def _load(self, layers: range, meeting_place: str | None) -> Loaded:
        self._offloaded = None
        self._parts = span_parts(self._config.model, layers.start, layers.stop, self.quantised)
        return Loaded(dtype="float32", weights="")

    def rehearse(self) -> None:
        pass

    def num_slots(self, num_sharing: int) -> int:
        return self._blueprint.num_slots

    def serve(self, size: CacheSize, cuts: Cuts | None = None) -> None:
        self.cuts = cuts
        self.listen("", rank=(self.stage, len(self._spans)))
        self.prepare(size)

    def step(self) -> None:
        try:
            while (received := self.receive(0.0)) is not None:
                self.handle(received)
            while self._inbox:
                self.handle(self._inbox.pop(0).received)
        except NewEpoch:
            self.forget()


class LoopWholeShard(WholeShard):
    """The same for a model that does not split. It loads its own layers only."""

    num_slots, serve, step = LoopShard.num_slots, LoopShard.serve, LoopShard.step


class LoopCoordinator(Coordinator):
    def serve(self) -> None:
        self.listen("")

    step = Coordinator.serve_one


class LoopStages(RayStages):
    """Stages that tell whose work is under way."""

    def __init__(self, replica: LoopReplica) -> None:
        self._begun: dict[int, Work] = {}
        super().__init__(replica)

    def start(self, work: Work) -> Future[Result]:
        self._begun[work.id] = work
        return super().start(work)

    @property
    def under_way(self) -> set[str]:
        """The sequences in rounds that are not done; each of them is to get a token at least."""
        works = [self._begun[work_id] for work_id in self._work]
        return {entry.sequence_id for work in works if isinstance(work, Round) for entry in work.entries}


@dataclass(eq=False)
class LoopProcess:
    """It answers at once. reason: why it has ended."""

    name: str
    server: Any
    loop: Loop
    reason: str | None = None
    listens = True

    @property
    def address(self) -> str:
        return str(self.server.transport.address)

    def ask(self, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(getattr(self.server, method)(*arguments))
        return future

    def serve(self, *arguments: object) -> None:
        self.listening = self.ask("serve", *arguments)
        self.loop.readers[self.name] = self.server.step

    def end(self) -> str | None:
        return self.reason

    def kill(self) -> None:
        self.loop.lose(self.name)
        self.reason = f"{self.name} was killed"

    discard = kill


class LoopBundles:
    def __init__(self, loop: Loop) -> None:
        self.loop, self.num_started = loop, 0

    def start(self, kind: Callable[..., Shard], *arguments: object, name: str, stage: int) -> LoopProcess:
        self.num_started += 1
        return LoopProcess(name, kind(*arguments), self.loop)

    def close(self) -> None:
        pass


class LoopReplica(Replica):
    """`Replica` over a loop."""

    _bundles: LoopBundles

    @property
    def num_replaced(self) -> int:
        return self._bundles.num_started - self.num_stages

    @property
    def parts(self) -> dict[str, Any]:
        return {name: process.server for name, process in self.shards.items()}

    def kill(self, name: str) -> None:
        self.processes[name].kill()


def blueprint_of(config: EngineConfig, size: CacheSize, shard_type: type[Shard]) -> Blueprint:
    """All layers cost the same, and nothing else costs anything."""
    model, splits = load_config(config), shard_type is not LoopWholeShard
    sizes = model_sizes(model, dtype=torch.float32, may_split=splits)
    end, layer = (LayerCost(weight_bytes=0, seconds=(each,) * config.parallel.stages) for each in (0.0, 1.0))
    return Blueprint(
        config=config,
        costs=ModelCosts(
            embedding=end,
            layers=(layer,) * len(sizes.layers),
            head=end,
            starts=sizes.starts,
            embedding_everywhere=sizes.embedding_everywhere,
        ),
        vocab_size=vocab_size(model),
        hidden_size=HIDDEN_SIZE,
        num_slots=size.num_slots,
        num_gpus=0.0,
        splits=splits,
        shard_type=shard_type,
    )


@dataclass
class LoopEngine:
    """An engine over a loop, and what it is made of."""

    engine: Engine
    replica: LoopReplica
    loop: Loop

    def require_clean(self, given_up: int = 0) -> None:
        """Nothing is kept for sequences or rounds that are over, but for rows of rounds that were given up."""
        last = self.replica.parts[stage_name(self.replica.num_stages - 1)]
        unsaid = self.engine.stages._closed  # said with the next work
        assert len(last.head.samplers) == len(unsaid)
        assert not self.engine.stages._work
        for shard in self.replica.parts.values():
            assert not shard._scripts
            if self.replica.blueprint.splits:
                assert len(shard.span._saved) <= given_up
            else:
                assert set(shard.span.states) <= set(unsaid)

    def passes_seen(self, stage: int) -> list[Pass]:
        return [
            message.work
            for name, message, _ in self.loop.delivered
            if name == stage_name(stage) and isinstance(message, Forward)
        ]


def plant_copies(engine: Engine, expected: Sequence[Sequence[int]], seed: int) -> None:
    """From now on entries verify copies of which all, none or the first are right, or none at all."""
    rng, start = random.Random(seed), engine.stages.start

    def planted(entry: RoundEntry) -> RoundEntry:
        _, request_id, _ = entry.sequence_id.split("/")
        at = entry.length - len(engine._requests[request_id].prompt_token_ids)
        copy = list(expected[int(request_id)][at : at + rng.randint(0, 5)])
        first_wrong = rng.choice([0, 1, len(copy)])
        copy = [token if place < first_wrong else (token + 1) % 200 for place, token in enumerate(copy)]
        return msgspec.structs.replace(entry, looked_up=copy)

    def started(work: Work) -> Future[Result]:
        if isinstance(work, Round):
            work = msgspec.structs.replace(work, entries=[planted(entry) for entry in work.entries])
        return start(work)

    engine.stages.start = started  # type: ignore[method-assign]


class Chaos:
    """Kills somebody in one of `every` deliveries, at most `most` times."""

    def __init__(self, run: LoopEngine, seed: int, names: list[str], most: int, every: int) -> None:
        self.run, self.names, self.left, self.every = run, names, most, every
        self.rng = random.Random(seed)

    def __call__(self) -> None:
        if self.left and self.rng.random() < 1 / self.every:
            name = self.rng.choice(self.names)
            if name in self.run.replica.processes and name not in self.run.replica.ends():
                self.left -= 1
                self.run.replica.kill(name)


@contextmanager
def loop_engine(
    path: str,
    num_stages: int,
    strategy: Strategy | None = None,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    defaults: GenerationDefaults | None = None,
    verification: str = "coupled",
    max_draft_tokens: int = 6,
    num_beside: int = 0,
    max_restarts: int = 100,
    kv_cache_tokens: int = 4096,
    patience: float = math.inf,
    quantised: tuple[Weights, ...] = (),
    data_plane: str = "auto",
    splits: bool = True,
    **options: Any,
) -> Iterator[LoopEngine]:
    """No strategy: plain decoding. quantised: the copies that drafts have. Dead shards are noticed at once; silence
    never is. An engine without patience looks after the dead only where nothing is to be delivered."""
    loop = Loop(random.Random(seed), patience=patience)
    config = EngineConfig(
        model=path,
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        kv_cache_tokens=kv_cache_tokens,
        parallel={
            "stages": num_stages,
            "layers": [(last - first) // 2 for first, last in cut(num_stages)] if splits else None,
            "max_restarts": max_restarts,
            "heartbeat_timeout_s": 1e9,
            "data_plane": data_plane,
        },
        speculation={"verification": verification},
        **options,
    )
    with ExitStack() as stack:
        transport = lambda name, secret, host: LoopTransport(loop, name)  # noqa: E731
        stack.enter_context(patch.object(server_module, "Transport", transport))
        stack.enter_context(patch.object(ray_stages_module, "Transport", transport))
        if patience == math.inf:
            stack.enter_context(patch.object(ray_stages_module, "_CHECK_EVERY_S", 0.0))
        stack.enter_context(patch.object(ray_stages_module, "time", loop.clock))
        stack.enter_context(patch.object(replica_module, "Bundles", lambda options, **_: LoopBundles(loop)))
        stack.enter_context(patch.object(replica_module, "kill", lambda ended: [process.kill() for process in ended]))
        coordinator = lambda _, *arguments, name, **__: LoopProcess(name, LoopCoordinator(*arguments), loop)  # noqa: E731
        stack.enter_context(patch.object(replica_module, "start_process", coordinator))
        windowed = windowed_pages(
            span_parts(path, 0, NUM_LAYERS, ()).windows.values() if splits else (),
            kv_cache_tokens,
            config,
            max_rows=max_draft_tokens + num_beside,
            num_cohorts=config.parallel.num_cohorts,
        )
        size = CacheSize(kv_cache_tokens, windowed.pool.num_pages * PAGE_SIZE if windowed else 0)
        stack.enter_context(patch.object(replica_module, "cache_size", lambda *_: size))
        of_copies = type("LoopShard", (LoopShard,), {"quantised": quantised})
        replica = LoopReplica(blueprint_of(config, size, of_copies if splits else LoopWholeShard))
        stack.callback(replica.close)
        replica.start()
        engine = Engine(
            config,
            stages=LoopStages(replica),
            scheduler=Scheduler(
                kv_cache_tokens,
                windowed=windowed,
                max_num_seqs=config.num_seqs,
                max_prefill_tokens=config.num_batched_tokens,
                lookahead=max_draft_tokens,
                num_beside=num_beside,
                num_cohorts=config.parallel.num_cohorts,
                shares_pages=splits,
            ),
            strategy=strategy or FixedPlan(no_draft(2 * NUM_LAYERS, "ar")),
            model=ModelInfo(
                vocab_size=replica.blueprint.vocab_size,
                eos_token_ids=tuple(eos),
                max_model_len=1024,
                defaults=defaults or GenerationDefaults(),
            ),
        )
        yield LoopEngine(engine, replica, loop)
