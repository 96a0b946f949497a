"""The processes of a replica: actors in a placement group. The actors of shards are made here and nowhere else."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayspec.config import LARGE_GPU_BYTES, EngineConfig, ParallelOptions
from rayspec.types import ConfigError, RayspecError

_GROUP_PREFIX = "rayspec:"
# Ray's resource of a node names its GPUs. All of these have at least `LARGE_GPU_BYTES`, which not every A100 has.
_LARGE_NAMES = ("A100-80G", "AMD-Instinct-MI3", "B200", "B300", "GB200", "GB300", "GH200", "H100", "H20")
_LARGE_GPUS = tuple(f"accelerator_type:{name}" for name in _LARGE_NAMES)  # beginnings
# One thread runs `serve` until the process ends; the others answer calls meanwhile.
_MAX_CONCURRENCY = 4

T = TypeVar("T")


class PlacementError(RayspecError):
    """The cluster has no place for the shards, or they cannot be started."""

    kind = "placement"


class NoPlaceError(PlacementError):
    """The cluster had no place in time. It may have one later, when a node is added."""


class ShardEndedError(PlacementError):
    """A shard's process ended while it was started. The next start may be better."""


class Process:
    """An actor of a replica, which is called and then serves until it ends. Calls return futures: ray.get would make
    Ray warn where the engine's own process is an async actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor
        self.served: Future[None] = Future()
        self.listening: Future[str] = Future()

    def ask(self, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    def serve(self, *arguments: object) -> None:
        """Let the actor serve. `listening` is done when it listens."""
        self.served, self.listening = self.ask("serve", *arguments), self.ask("address")

    @property
    def listens(self) -> bool:
        return self.listening.done() and self.listening.exception() is None

    @property
    def address(self) -> str:
        return self.listening.result(0.0)

    def end(self) -> str | None:
        """Return why the process has ended; None while it serves."""
        if not self.served.done():
            return None
        error = self.served.exception()
        if error is None:
            return f"{self.name} has ended"
        return f"{self.name} has ended: {first_line(error.cause if isinstance(error, RayTaskError) else error)}"

    def discard(self) -> None:
        """Kill the actor at once, even if it is frozen."""
        if ray.is_initialized():  # else it has ended with Ray, which the call would start again
            with contextlib.suppress(RayError):
                ray.kill(self._actor, no_restart=True)


class Bundles:
    """The placement group of a replica: one bundle for each stage, so that all ranks of a stage share a node."""

    def __init__(self, options: ParallelOptions, *, num_gpus: float, timeout_s: float) -> None:
        """Reserve the resources of all shards. Raises ConfigError, and NoPlaceError if they are not free in time."""
        self._cpus, self._gpus = options.cpus_per_shard, num_gpus
        of_a_stage = (("CPU", options.tensor * self._cpus), ("GPU", options.tensor * num_gpus))
        bundle = {name: round(amount, 4) for name, amount in of_a_stage if amount > 0}  # Ray's own precision
        if not bundle:
            raise ConfigError("options 'cpus_per_shard' and 'gpus_per_shard' are both 0: reserve something for a shard")
        remove_orphaned_groups()
        context = ray.get_runtime_context()
        owner = (context.get_actor_name() if context.get_actor_id() is not None else None) or ""
        placement = None if options.topology else options.placement or "PACK"
        self._group: PlacementGroup = placement_group(
            [bundle] * options.stages,
            strategy=placement,
            bundle_label_selector=[options.labels] * options.stages if options.labels else None,
            topology_strategy=options.topology,
            name=f"{_GROUP_PREFIX}{owner if _lives(owner) else ''}:{secrets.token_hex(8)}",
        )
        if not self._group.wait(timeout_s):
            remove_placement_group(self._group)
            available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            labels = f" with labels {options.labels}" if options.labels else ""
            free = ", ".join(f"{available.get(name, 0):g} {name}" for name in bundle)
            raise NoPlaceError(
                f"no place for {options.stages} stages of {bundle}, each on one node{labels}, "
                f"placed {options.topology or placement}, within {timeout_s:.0f} s (free: {free}): add nodes, "
                "lower tensor, cpus_per_shard or gpus_per_shard, or choose another placement or other labels"
            )

    def start(self, kind: type, *arguments: object, name: str, stage: int) -> Process:
        """Start the actor `kind(*arguments)` in the bundle of a stage. Ray does not restart it."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=stage)
        place = {"num_cpus": self._cpus, "num_gpus": self._gpus, "scheduling_strategy": strategy}
        return start_process(kind, *arguments, name=name, **place)

    def close(self) -> None:
        """Remove the placement group, which ends all its actors."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


def remove_orphaned_groups() -> None:
    """Remove placement groups whose owner, the actor that made them, was killed.

    Ray ends the shards together with their owner, but keeps their placement group until the job ends. Orphaned groups
    are recognised only if their owner had a name in this process's namespace.
    """
    for group in placement_group_table().values():
        owner = group["name"].removeprefix(_GROUP_PREFIX).rpartition(":")[0]
        if not group["name"].startswith(_GROUP_PREFIX) or group["state"] == "REMOVED" or not owner or _lives(owner):
            continue
        with contextlib.suppress(ValueError, RayError):  # of another namespace, or removed meanwhile
            remove_placement_group(get_placement_group(group["name"]))


def _lives(name: str) -> bool:
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def start_process(kind: type, *arguments: object, name: str, **place: Any) -> Process:
    """Start the actor `kind(*arguments)`. place: Ray's options for where it runs."""
    options = {**place, "max_concurrency": _MAX_CONCURRENCY, "max_restarts": 0}
    return Process(name, ray.remote(kind).options(**options).remote(*arguments))


def kill(processes: Collection[Process]) -> None:
    """Kill the actors and wait until their processes are gone, for 5 seconds at most."""
    for process in processes:
        process.discard()
    wait([process.served for process in processes], 5.0)


@contextlib.contextmanager
def errors_of_actor() -> Iterator[None]:
    """Raise a RayspecError of an actor as it was raised, without the actor's traceback."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


def wait_for(calls: Sequence[Future[T]], timeout_s: float) -> list[T]:
    """Return the results of calls of actors. Raises a RayspecError of an actor as it was raised, ShardEndedError after
    the death of an actor, and PlacementError after a timeout or any other error in an actor."""
    done, left = wait(calls, timeout_s, FIRST_EXCEPTION)
    try:
        with errors_of_actor():
            for call in done:
                call.result()
    except RayTaskError as error:
        raise PlacementError(f"a shard failed while it was started: {first_line(error.cause)}") from error
    except RayError as error:
        raise ShardEndedError(f"a shard ended while it was started: {first_line(error)}") from error
    if left:
        raise PlacementError(f"the shards were not ready within {timeout_s:.0f} s: raise start_timeout_s")
    return [call.result() for call in calls]


def reserving_nothing() -> dict[str, Any]:
    """Return Ray's options for a process that reserves nothing. A head node without CPUs, which may be small, gets the
    process only if there is no other node."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    bare = [node["NodeID"] for node in nodes if not node["Resources"].get("CPU")]
    if not 0 < len(bare) < len(nodes):
        return {"num_cpus": 0}
    return {"num_cpus": 0, "label_selector": {"ray.io/node-id": f"!in({', '.join(bare)})"}}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank, or the error's kind."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def wants_gpu(config: EngineConfig) -> bool:
    """Return whether the engine's own process needs a GPU. With shards it does not: they have GPUs of their own."""
    return config.parallel is None and _runs_on_gpu(config)


def sized(config: EngineConfig) -> EngineConfig:
    """Return the config with numbers where `max_num_seqs` and `max_num_batched_tokens` are unset, by the GPUs of the
    cluster: this process may have none. Ray must be running."""
    if not _runs_on_gpu(config):
        return config.sized(None)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    having = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    are_large = bool(having) and all(any(name.startswith(_LARGE_GPUS) for name in node) for node in having)
    return config.sized(LARGE_GPU_BYTES if are_large else 0)


def gpus_per_shard(config: EngineConfig, options: ParallelOptions) -> float:
    if not _runs_on_gpu(config):
        return 0.0
    return 1.0 if options.gpus_per_shard is None else options.gpus_per_shard


def _runs_on_gpu(config: EngineConfig) -> bool:
    if config.device != "auto":
        return config.device.startswith("cuda")
    num_gpus: float = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    return num_gpus > 0
