"""One engine of a pool in a Ray actor (`EngineWorker`), and the supervisor's handle of it (`RemoteEngine`)."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rayspec.config import KV_CACHE_SHARE, EngineConfig, ParallelOptions
from rayspec.decode.engine_loop import Client, EngineDeadError
from rayspec.pipeline.placement import PlacementError, gpus_per_shard, remove_orphaned_groups, wants_gpu
from rayspec.pool.calls import BatchedCalls, Callback, CalledHere, CallOutcome, ItemCall
from rayspec.pool.stopped import Place, ProcessStoppedError, answer_of
from rayspec.types import EngineLoad, EngineStats, RayspecError

_MAX_CONCURRENT_CALLS = 64
_MIN_CPUS_TO_RESERVE = 3


Beginning = str | Sequence[int] | None
"""An item's prompt, or the beginning of it, as text or tokens. None: there is nothing to choose an engine by."""


class NodeLostError(EngineDeadError):
    """The engine ended with its node, or was preempted: no item is to blame."""


class LoadedEngine(Protocol):
    """A loaded engine, in its actor."""

    @property
    def client(self) -> Client: ...

    @property
    def info(self) -> Any:
        """Description of the loaded engine for the pool's owner. It must be picklable."""

    async def handle(self, item: Any, callback: Callback) -> Any:
        """Return the result for an item; errors of the item are part of the result. callback: takes parts of the
        result. Raises EngineDeadError when the engine cannot go on. Cancelling the wait ends the work on the item."""

    def stop(self) -> None: ...


class EngineFactory(Protocol):
    """Loads the engines of a pool. It must be picklable, because it is sent to the actors."""

    @property
    def engine(self) -> EngineConfig:
        """Options of the whole pool: `parallel.replicas` is the number of engines."""

    def load(self, config: EngineConfig) -> LoadedEngine:
        """Load the engine of an actor, on a thread of its own. config: options of this engine alone.
        Raises ConfigError, CheckpointError, and with shards PlacementError."""

    def beginning(self, item: Any) -> Beginning:
        """Return how an item's prompt begins, for the choice among several engines. It must be quick."""


class EngineWorker:
    """Owns a model and the loop that runs it. A plain class: `start_worker` makes it an actor."""

    _engine: LoadedEngine
    _calls: CalledHere

    def __init__(self, factory: EngineFactory, config: EngineConfig) -> None:
        self._factory, self._config = factory, config

    async def load(self, dtype: str | None = None) -> tuple[Any, str]:
        """Load the engine and return its info and data type. Called before all other methods. dtype: data type of the
        weights instead of the option's; an engine that is loaded already is stopped first.

        Raises ConfigError, CheckpointError, and with shards PlacementError.
        """
        if dtype is not None:
            self._config = self._config.replace(dtype=dtype)
        if hasattr(self, "_engine"):
            await self.stop()
            del self._engine, self._calls
        self._engine = await asyncio.to_thread(self._factory.load, self._config)
        self._calls = CalledHere(self._engine.handle)
        return self._engine.info, self._engine.client.info.config.dtype

    async def take(self, calls: Sequence[ItemCall]) -> None:
        self._calls.take(calls)

    async def cancel(self, numbers: Sequence[int]) -> None:
        self._calls.cancel(numbers)

    async def outcomes(self) -> AsyncGenerator[list[CallOutcome], None]:
        async for ready in self._calls.outcomes():
            yield ready

    async def stats(self) -> EngineStats:
        return copy.deepcopy(self._engine.client.stats)

    async def load_now(self) -> EngineLoad:
        return self._engine.client.load

    async def ping(self) -> None:
        """Wait until the engine has answered. Raises the error that has ended the engine."""
        await asyncio.wrap_future(self._engine.client.ping())

    async def answer(self) -> None:
        """Return at once. Raises EngineDeadError if the engine is stuck."""
        if (problem := self._engine.client.progress.problem()) is not None:
            raise EngineDeadError(f"the engine {problem}")

    async def place(self) -> Place:
        return Place.here()

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


@dataclass(slots=True)
class CommonDType:
    """The data type of all engines of a pool: that of the first that has loaded. With the option `auto`, each machine
    would choose for itself, and a text depends on the data type."""

    name: str | None = None


class RemoteEngine:
    """An EngineWorker in its actor. Errors of Ray about the actor's end become EngineDeadError or NodeLostError.

    common: of the engines of the pool; None: the engine is alone.
    """

    def __init__(self, factory: EngineFactory, common: CommonDType | None = None) -> None:
        self._common = common or CommonDType()
        self._config = config_of_one(factory.engine)
        self._actor = start_worker(factory)
        self._calls = BatchedCalls(self._actor, self._death)
        self._place: Place | None = None
        options = factory.engine.parallel
        self._start_timeout_s = options.start_timeout_s if options is not None else None

    async def load(self) -> Any:
        try:
            self._place = await asyncio.wait_for(answer(self._actor.place.remote()), self._start_timeout_s)
        except asyncio.TimeoutError:
            raise PlacementError(
                f"no place for an engine within {self._start_timeout_s:.0f} s: add nodes, or lower cpus_per_shard, "
                "gpus_per_shard or replicas"
            ) from None
        except RayActorError as error:
            raise self._death(error) from None
        info, dtype = await self._answer(self._actor.load.remote(self._common.name))
        self._common.name = self._common.name or dtype
        if dtype != self._common.name:  # an engine on another kind of machine has loaded meanwhile
            info, _ = await self._answer(self._actor.load.remote(self._common.name))
        return info

    async def handle(self, item: Any, callback: Callback | None = None) -> Any:
        return await self._calls(item, callback)

    async def check(self) -> None:
        await self._answer(self._actor.ping.remote())

    async def answer(self) -> None:
        try:
            await answer_of(self._place, self._answer(self._actor.answer.remote()))
        except ProcessStoppedError as error:
            raise EngineDeadError(f"the engine cannot go on: {error}") from None

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._answer(self._actor.stats.remote())
        return stats

    async def load_now(self) -> EngineLoad:
        load: EngineLoad = await self._answer(self._actor.load_now.remote())
        return load

    async def stop(self) -> None:
        await self._answer(self._actor.stop.remote())

    def end(self) -> None:
        self._calls.close()
        with suppress(RayError):
            ray.kill(self._actor)
            if self._config.parallel is not None:
                remove_orphaned_groups()

    async def _answer(self, reference: Awaitable[Any]) -> Any:
        try:
            return await answer(reference)
        except RayActorError as error:
            raise self._death(error) from None

    def _death(self, error: RayError) -> Exception:
        """Convert Ray's error about the actor's end: NodeLostError if no item can be to blame, else EngineDeadError."""
        reason = str(error).splitlines()[0]
        message = f"the engine's process has ended: {reason} Was it killed, or out of memory?"
        is_node_lost = self._place is not None and not is_node_alive(self._place.node_id)
        is_preempted = isinstance(error, RayActorError) and error.preempted
        return NodeLostError(message) if is_node_lost or is_preempted else EngineDeadError(message)


def start_worker(factory: EngineFactory) -> Any:
    """Start an EngineWorker and return its actor handle. Ray does not restart it: its callers get the error."""
    config = config_of_one(factory.engine)
    num_sharing = engines_of_a_place(factory.engine)
    if num_sharing > 1:
        on_gpu = gpus_per_shard(factory.engine, factory.engine.parallel or ParallelOptions()) > 0
        usual = KV_CACHE_SHARE["cuda" if on_gpu else "cpu"]
        config = config.replace(kv_cache_share=(config.kv_cache_share or usual) / num_sharing)
    options = _resources(factory.engine, config) | {
        "max_concurrency": _MAX_CONCURRENT_CALLS,
        "max_restarts": 0,
        "name": f"rayspec-engine-{secrets.token_hex(8)}",  # identifies the placement groups that this actor makes
    }
    return ray.remote(EngineWorker).options(**options).remote(factory, config)


def config_of_one(config: EngineConfig) -> EngineConfig:
    """Return the options of one engine of a pool. If each of several engines is one process, it runs in the worker."""
    options = config.parallel
    if options is None:
        return config
    if options.replicas > 1 and options.stages * options.tensor == 1:
        num_threads = config.num_threads or max(1, int(options.cpus_per_shard))
        return config.replace(parallel=None, num_threads=num_threads)
    return config.replace(parallel=options.replace(replicas=1))


def engines_of_a_place(config: EngineConfig) -> int:
    """Return the most engines of a pool that may share a node's memory, or a GPU's. Each measures the free memory when
    it has loaded, so it does not see what the others are going to take."""
    options = config.parallel
    if options is None or options.replicas == 1:
        return 1
    num_gpus = gpus_per_shard(config, options)
    if num_gpus > 0:
        return max(1, min(options.replicas, int(1 / num_gpus)))
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    by_node = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    reserved = cpus_of_replica(options.cpus_per_shard, config, sum(by_node))
    fitting = int(max(by_node, default=0.0) / reserved) if reserved else options.replicas
    return max(1, min(options.replicas, fitting))


def num_engines(config: EngineConfig) -> int:
    return config.parallel.replicas if config.parallel is not None else 1


def cpus_to_reserve(num_cpus: float) -> float:
    """Return the CPUs to reserve for an engine in a cluster of `num_cpus`. The engine may use more than it reserves.
    Ray Data starts only if a whole CPU stays unreserved, in addition to those that it reads with."""
    return 1.0 if num_cpus >= _MIN_CPUS_TO_RESERVE else 0.0


def cpus_of_replica(wanted: float, config: EngineConfig, num_cpus: float) -> float:
    """Return the CPUs to reserve for each of several engines that run on CPUs, in a cluster of `num_cpus`. It is less
    than `wanted` if otherwise no whole CPU would be left for Ray Data."""
    return round(min(wanted, max(0.0, num_cpus - 1) / num_engines(config)), 4)


def is_node_alive(node_id: str) -> bool:
    """Return whether the cluster still has this node."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == node_id and node["Alive"] for node in nodes)


def call(reference: Any) -> Any:
    """Do `ray.get`, but raise a RayspecError of the actor as it was raised, without the actor's traceback."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


async def answer(reference: Awaitable[Any]) -> Any:
    """Await a reference, with errors as in `call`."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


def _resources(whole: EngineConfig, one: EngineConfig) -> dict[str, Any]:
    """Return what Ray reserves for the worker's own process; shards have reservations of their own."""
    num_cpus: float = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    if whole.parallel is not None and one.parallel is None:
        num_gpus = gpus_per_shard(whole, whole.parallel)
        wanted = whole.parallel.cpus_per_shard
        cpus = wanted if num_gpus else cpus_of_replica(wanted, whole, num_cpus)
        return {"num_cpus": cpus, "num_gpus": num_gpus, "label_selector": whole.parallel.labels or None}
    return {"num_cpus": cpus_to_reserve(num_cpus), "num_gpus": 1 if wants_gpu(one) else 0}
