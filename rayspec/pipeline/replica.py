"""The processes of one copy of the model: started together, replaced stage by stage, ended together."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait

import ray

from rayspec.decode.generate_state import Cuts, weakest
from rayspec.decode.loading import cache_size
from rayspec.model.kv_cache import CacheSize
from rayspec.pipeline.collective import Rendezvous, node_address
from rayspec.pipeline.coordinator import Coordinator
from rayspec.pipeline.placement import Bundles, Process, kill, start_process, wait_for
from rayspec.pipeline.server import COORDINATOR, stage_name
from rayspec.pipeline.shard import Blueprint, Loaded, rank_name
from rayspec.pipeline.transport import Secret
from rayspec.planning.partition import Device, partition
from rayspec.types import CheckpointError, RayspecError

_COORDINATOR_S = 60.0  # that an engine waits for its coordinator before it begins without


class Replica:
    """Shards by name, and a coordinator. Methods raise PlacementError and the errors of shards that fail to load."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.secret = Secret()
        self.shards: dict[str, Process] = {}
        self.coordinator: Process | None = None
        self.loaded: dict[str, Loaded] = {}
        self.cache_size = CacheSize(0)
        self.cuts: Cuts | None = None
        self.spans: tuple[tuple[int, int], ...] = ()
        self.devices: tuple[Device, ...] = ()
        self._places: dict[str, str] = {}
        self._meetings: dict[int, Rendezvous] = {}  # of the ranks of each stage
        self._listens_by_s = math.inf  # by the monotonic clock, when the coordinator must listen
        options = blueprint.options
        self._bundles = Bundles(options, num_gpus=blueprint.num_gpus, timeout_s=options.start_timeout_s)

    @property
    def num_stages(self) -> int:
        return self.blueprint.options.stages

    @property
    def processes(self) -> dict[str, Process]:
        """All processes that listen, by name. A new coordinator comes a while after it was started."""
        coordinator = self.coordinator
        return self.shards | ({COORDINATOR: coordinator} if coordinator is not None and coordinator.listens else {})

    @property
    def stages_share_gpus(self) -> bool:
        places = [self._places[stage_name(stage)] for stage in range(self.num_stages)]
        return self.blueprint.num_gpus > 0 and len(set(places)) < len(places)

    def start(self) -> None:
        """Start all shards at once, then the coordinator. It may be late: until it listens, there are no new plans."""
        self._start_stages(range(self.num_stages))
        self.start_coordinator()
        assert self.coordinator is not None
        wait([self.coordinator.listening], min(_COORDINATOR_S, self.blueprint.options.start_timeout_s))

    def replace(self, names: Collection[str]) -> None:
        """End these shards and start all missing ones. All ranks of a stage are replaced together."""
        ended: list[Process] = []
        for stage in range(self.num_stages):
            ranks = [rank_name(stage, rank) for rank in range(self.blueprint.options.tensor)]
            if not set(ranks).isdisjoint(names):
                ended += [self.shards.pop(name) for name in ranks if name in self.shards]
        kill(ended)
        self._start_stages([stage for stage in range(self.num_stages) if rank_name(stage, 0) not in self.shards])

    def ends(self) -> Mapping[str, str]:
        """Return the processes that have ended, or a coordinator that is too late to listen, each with the reason."""
        started = self.shards | ({COORDINATOR: self.coordinator} if self.coordinator else {})
        ends = {name: reason for name, process in started.items() if (reason := process.end()) is not None}
        if self.coordinator and not self.coordinator.listening.done() and time.monotonic() > self._listens_by_s:
            ends.setdefault(COORDINATOR, f"{COORDINATOR} does not listen in time (start_timeout_s)")
        return ends

    def start_coordinator(self) -> None:
        """Start a coordinator, which replaces the present one. Do not wait for it."""
        self.end_coordinator()
        # Outside the bundles: it computes next to nothing.
        self.coordinator = start_process(Coordinator, self.spans, self.secret, name=COORDINATOR, num_cpus=0)
        self.coordinator.serve()
        self._listens_by_s = time.monotonic() + self.blueprint.options.start_timeout_s

    def end_coordinator(self) -> None:
        if self.coordinator is not None:
            kill([self.coordinator])
        self.coordinator = None

    def close(self) -> None:
        started = [*self.shards.values(), *([self.coordinator] if self.coordinator is not None else [])]
        self.shards.clear()
        self.coordinator = None
        for meeting in self._meetings.values():
            meeting.close()
        if ray.is_initialized():  # else all have ended with Ray, which any call would start again
            kill(started)
            self._bundles.close()

    def _start_stages(self, stages: Sequence[int]) -> None:
        """Start all shards of these stages. The first time, divide the layers between the stages by free memory, and
        fit the KV cache to the smallest shard. Shards in one place share its memory evenly."""
        blueprint, options = self.blueprint, self.blueprint.options
        timeout_s = options.start_timeout_s
        meeting_places: list[str | None] = []
        starting: list[Process] = []
        for stage in stages:
            if options.tensor > 1:
                self._meetings[stage] = Rendezvous(node_address())
            for rank in range(options.tensor):
                of_shard = (blueprint, self.secret, stage, rank)
                name = rank_name(stage, rank)
                starting.append(self._bundles.start(blueprint.shard_type, *of_shard, name=name, stage=stage))
                meeting_places.append(self._meetings[stage].address if options.tensor > 1 else None)
        try:
            rooms = wait_for([process.ask("room") for process in starting], timeout_s)
            self._places |= {process.name: place for process, (place, _) in zip(starting, rooms, strict=True)}
            if not self.spans:
                self.spans = self._cut(rooms)
            loading = [
                process.ask("load", self.spans, meeting_place)
                for process, meeting_place in zip(starting, meeting_places, strict=True)
            ]
            for process, loaded in zip(starting, wait_for(loading, timeout_s), strict=True):
                if self.loaded.get(process.name, loaded).weights != loaded.weights:
                    raise CheckpointError(
                        f"{process.name} loaded other weights than the shard before it: the files of model "
                        f"{blueprint.config.model!r}, or of an adapter, have changed meanwhile; load the model again"
                    )
                self.loaded[process.name] = loaded
            if not self.cache_size.num_slots:
                wait_for([process.ask("rehearse") for process in starting], timeout_s)
                sharing = Counter(self._places.values())
                fitting = [process.ask("num_slots", sharing[self._places[process.name]]) for process in starting]
                num_slots = min(blueprint.num_slots, *wait_for(fitting, timeout_s))
                self.cache_size = cache_size(blueprint.config, num_slots, blueprint.window)
                self.cuts = weakest([loaded.cuts for loaded in self.loaded.values()])
            for process in starting:
                process.serve(self.cache_size, self.cuts)
            wait_for([process.listening for process in starting], timeout_s)
        except RayspecError:
            for process in starting:
                process.discard()
            raise
        self.shards |= {process.name: process for process in starting}

    def _cut(self, rooms: Sequence[tuple[str, int]]) -> tuple[tuple[int, int], ...]:
        """Divide the sublayers. A stage has the memory of its smallest rank; shards in one place share it evenly."""
        sharing = Counter(place for place, _ in rooms)
        free = [bytes_free // sharing[place] for place, bytes_free in rooms]
        num_ranks = self.blueprint.options.tensor
        self.devices = tuple(
            Device(name=stage_name(stage), bytes_free=min(free[stage * num_ranks : (stage + 1) * num_ranks]))
            for stage in range(self.num_stages)
        )
        return spans_of(partition(self.blueprint.costs, self.devices, self.blueprint.options.layers))


def spans_of(layers: Sequence[range]) -> tuple[tuple[int, int], ...]:
    """Return the sublayers [first, last) of stages that hold these decoder layers."""
    return tuple((2 * span.start, 2 * span.stop) for span in layers)
