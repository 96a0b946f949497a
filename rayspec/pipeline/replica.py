"""The processes of one copy of the model: started together, replaced stage by stage, ended together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.loading import cache_size
from rayspec.model.kv_arena import CacheSize
from rayspec.pipeline.coordinator import Coordinator, CoordinatorSpec
from rayspec.pipeline.endpoint import COORDINATOR
from rayspec.pipeline.placement import Bundles, Process, discard, end_of, kill, start_beside, wait_for
from rayspec.pipeline.shard import Loaded, Room, Shard, ShardSpec, rank_name
from rayspec.pipeline.stage_worker import stage_name
from rayspec.pipeline.transport import Secret
from rayspec.planning.partition import Device, ModelCosts, partition
from rayspec.types import RayspecError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Description of a replica to be started.

    costs: costs of the model on one rank. They decide the layers of each stage, unless `options.layers` does.
    num_slots: largest number of KV cache slots; there are fewer if the smallest shard cannot hold as many. window: the
    longest sliding window of a layer. shard_type: class of the shards; tests use another one.
    """

    config: EngineConfig
    options: ParallelOptions
    costs: ModelCosts
    vocab_size: int
    hidden_size: int
    num_slots: int
    num_gpus: float
    window: int | None = None
    shard_type: type[Shard] = Shard

    @property
    def num_threads(self) -> int:
        return self.config.num_threads or max(1, int(self.options.cpus_per_shard))

    def shard(self, stage: int, rank: int, secret: Secret) -> ShardSpec:
        return ShardSpec(
            config=self.config,
            stage=stage,
            num_stages=self.options.stages,
            rank=rank,
            num_ranks=self.options.tensor,
            vocab_size=self.vocab_size,
            num_threads=self.num_threads,
            secret=secret,
        )


@dataclass(frozen=True, slots=True)
class _Starting:
    """A shard that does not serve yet."""

    stage: int
    rank: int
    actor: Any

    @property
    def name(self) -> str:
        return rank_name(self.stage, self.rank)


class Replica:
    """Shards by name, and a coordinator. Methods raise PlacementError and the errors of shards that fail to load."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.secret = Secret.generate()
        self.shards: dict[str, Process] = {}
        self.coordinator: Process | None = None
        self.loaded: dict[str, Loaded] = {}
        self.cache_size = CacheSize(0)
        self.spans: tuple[tuple[int, int], ...] = ()
        self.devices: tuple[Device, ...] = ()
        self._places: dict[str, str] = {}
        self._coming: _ComingCoordinator | None = None
        options = blueprint.options
        self._bundles = Bundles(options, num_gpus=blueprint.num_gpus, timeout_s=options.start_timeout_s)

    @property
    def num_stages(self) -> int:
        return self.blueprint.options.stages

    @property
    def processes(self) -> dict[str, Process]:
        found = dict(self.shards)
        if self.coordinator is not None:
            found[COORDINATOR] = self.coordinator
        return found

    @property
    def stages_share_gpus(self) -> bool:
        places = [self._places[stage_name(stage)] for stage in range(self.num_stages)]
        return self.blueprint.num_gpus > 0 and len(set(places)) < len(places)

    def start(self) -> None:
        """Start all shards at once, then the coordinator."""
        self._start_stages(range(self.num_stages))
        self.begin_coordinator()
        self.coordinator_ready(self.blueprint.options.start_timeout_s)

    def replace(self, names: Collection[str]) -> None:
        """End these shards and start all missing ones. All ranks of a stage are replaced together."""
        stages = sorted({_stage_of(name) for name in names})
        for stage in stages:
            for rank in range(self.blueprint.options.tensor):
                process = self.shards.pop(rank_name(stage, rank), None)
                if process is not None:
                    kill(process)
        missing = [stage for stage in range(self.num_stages) if rank_name(stage, 0) not in self.shards]
        self._start_stages(missing)

    def ends(self) -> Mapping[str, str]:
        """Return the processes that have ended, each with the reason."""
        found = {name: end_of(process) for name, process in self.processes.items()}
        return {name: reason for name, reason in found.items() if reason is not None}

    def begin_coordinator(self) -> None:
        """Start a coordinator, which replaces the present one. Do not wait for it."""
        self.end_coordinator()
        blueprint = self.blueprint
        spec = CoordinatorSpec(spans=self.spans, hidden_size=blueprint.hidden_size, secret=self.secret)
        actor = start_beside(Coordinator, spec)
        self._coming = _ComingCoordinator(actor, actor.serve.remote(), actor.address.remote())

    def coordinator_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether the coordinator that was being started has become ready. From then on it is in use."""
        if self._coming is None or not self._coming.ready(timeout_s):
            return False
        coming, self._coming = self._coming, None
        self.coordinator = coming.process()
        return True

    def end_coordinator(self) -> None:
        """End the present coordinator, and a coordinator that is being started."""
        if self.coordinator is not None:
            kill(self.coordinator)
        if self._coming is not None:
            discard(self._coming.actor)
        self.coordinator = self._coming = None

    def close(self) -> None:
        for process in self.shards.values():
            kill(process)
        self.shards.clear()
        self.end_coordinator()
        self._bundles.close()

    def _start_stages(self, stages: Sequence[int]) -> None:
        """Start all shards of these stages. The first time, divide the layers between the stages by free memory."""
        timeout_s = self.blueprint.options.start_timeout_s
        starting = [self._begin(stage, rank) for stage in stages for rank in range(self.blueprint.options.tensor)]
        try:
            rooms = wait_for([one.actor.room.remote() for one in starting], timeout_s)
            self._places |= {one.name: room.place for one, room in zip(starting, rooms, strict=True)}
            if not self.spans:
                self.spans = self._cut(rooms)
            self._load(starting, timeout_s)
            if not self.cache_size.num_slots:
                self.cache_size = self._fitting_cache(starting, timeout_s)
            sentinels = [one.actor.serve.remote(self.cache_size) for one in starting]
            addresses = wait_for([one.actor.address.remote() for one in starting], timeout_s)
        except RayspecError:
            for one in starting:
                discard(one.actor)
            raise
        for one, sentinel, address in zip(starting, sentinels, addresses, strict=True):
            self.shards[one.name] = Process(name=one.name, actor=one.actor, sentinel=sentinel, address=address)

    def _begin(self, stage: int, rank: int) -> _Starting:
        blueprint = self.blueprint
        actor = self._bundles.start(blueprint.shard_type, blueprint.shard(stage, rank, self.secret), stage=stage)
        return _Starting(stage, rank, actor)

    def _cut(self, rooms: Sequence[Room]) -> tuple[tuple[int, int], ...]:
        """Divide the sublayers. A stage has the memory of its smallest rank; shards in one place share it evenly."""
        sharing = Counter(room.place for room in rooms)
        free = [room.bytes_free // sharing[room.place] for room in rooms]
        num_ranks = self.blueprint.options.tensor
        self.devices = tuple(
            Device(name=stage_name(stage), bytes_free=min(free[stage * num_ranks : (stage + 1) * num_ranks]))
            for stage in range(self.num_stages)
        )
        return spans_of(partition(self.blueprint.costs, self.devices, self.blueprint.options.layers))

    def _load(self, starting: Sequence[_Starting], timeout_s: float) -> None:
        places: list[str | None] = [None] * len(starting)
        if self.blueprint.options.tensor > 1:
            leaders = {one.stage: one.actor.meeting_place.remote() for one in starting if one.rank == 0}
            met = dict(zip(leaders, wait_for(list(leaders.values()), timeout_s), strict=True))
            places = [met[one.stage] for one in starting]
        references = [one.actor.load.remote(self.spans, place) for one, place in zip(starting, places, strict=True)]
        for one, loaded in zip(starting, wait_for(references, timeout_s), strict=True):
            self.loaded[one.name] = loaded

    def _fitting_cache(self, loaded: Sequence[_Starting], timeout_s: float) -> CacheSize:
        """Return the size of the KV cache, which is that of the smallest shard. All shards have been loaded, so each
        measures the memory that is left; shards in one place share it evenly."""
        sharing = Counter(self._places.values())
        references = [one.actor.num_slots.remote(sharing[self._places[one.name]]) for one in loaded]
        num_slots = min(self.blueprint.num_slots, *wait_for(references, timeout_s))
        return cache_size(self.blueprint.config, num_slots, self.blueprint.window)


def spans_of(layers: Sequence[range]) -> tuple[tuple[int, int], ...]:
    """Return the sublayers [first, last) of stages that hold these decoder layers."""
    return tuple((2 * span.start, 2 * span.stop) for span in layers)


@dataclass(frozen=True, slots=True)
class _ComingCoordinator:
    actor: Any
    sentinel: Any
    address: Any

    def ready(self, timeout_s: float) -> bool:
        done, _ = ray.wait([self.address], timeout=timeout_s)
        return bool(done)

    def process(self) -> Process:
        (address,) = wait_for([self.address], 1.0)
        return Process(name=COORDINATOR, actor=self.actor, sentinel=self.sentinel, address=address)


def _stage_of(name: str) -> int:
    return int(name.removeprefix("stage-").split(".")[0])
