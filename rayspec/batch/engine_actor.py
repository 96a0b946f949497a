"""One engine behind a Ray actor: many clients hand in rows, one loop runs them together."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from rayspec.command.loading import load_llm
from rayspec.command.settings import Settings
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.placement import wants_gpu
from rayspec.types import EngineStats, RayspecError

if TYPE_CHECKING:
    from rayspec.async_engine import AsyncEngine

MAX_CONCURRENT_ROWS = 4096
_MIN_CPUS_TO_RESERVE = 3

Handler = Callable[[Any], Awaitable[Any]]


class Recipe(Protocol):
    """The engine that a job wants, and what is done there with each row. Travels to the actor."""

    @property
    def settings(self) -> Settings: ...

    def handler(self, engine: AsyncEngine) -> Handler:
        """Called once, where the engine is. The handler raises EngineDeadError; what is wrong with a row is in what
        it returns."""


class EngineWorker:
    """Owns a model and the loop that runs it. A plain class: `start_engine` makes it an actor."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._engine: AsyncEngine | None = None
        self._is_ready = asyncio.Event()

    async def load(self) -> dict[str, Any]:
        """Called once. Returns all options in force, as a config file has them. Rows that come earlier wait.

        Raises ConfigError, CheckpointError, and with shards PlacementError.
        """
        try:
            return await asyncio.to_thread(self._load)
        finally:
            self._is_ready.set()

    def _load(self) -> dict[str, Any]:
        # Imported here, so that who only talks to the actor does not wait seconds for torch and transformers.
        from rayspec.async_engine import AsyncEngine  # noqa: PLC0415

        config = self._recipe.settings.engine
        if config.parallel is None:
            # Ray sets OMP_NUM_THREADS to the actor's num_cpus, a reservation and not what the engine should use.
            config = config.replace(num_threads=config.num_threads or os.cpu_count() or 1)
        self._engine = AsyncEngine(load_llm(config))
        self._handle = self._recipe.handler(self._engine)
        return self._recipe.settings.resolved(self._engine.llm.config)

    async def handle(self, row: Any) -> Any:
        """The recipe's result for a row. Raises EngineDeadError."""
        await self._is_ready.wait()
        if self._engine is None:
            raise EngineDeadError("the engine could not be loaded")
        return await self._handle(row)

    async def stats(self) -> EngineStats:
        return copy.deepcopy(self._loaded.stats)

    async def death(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs, and where it was never loaded."""
        return self._engine.death if self._engine is not None else None

    async def process_id(self) -> int:
        return os.getpid()

    async def node_id(self) -> str:
        """For `is_node_alive`."""
        return str(ray.get_runtime_context().get_node_id())

    async def stop(self) -> None:
        self._loaded.stop()

    @property
    def _loaded(self) -> AsyncEngine:
        assert self._engine is not None, "load comes first"
        return self._engine


def start_engine(recipe: Recipe) -> Any:
    """An actor handle of an EngineWorker. Not restarted when it dies: its callers see the error."""
    options = {
        "num_cpus": cpus_to_reserve(ray.cluster_resources().get("CPU", 0)),  # type: ignore[no-untyped-call]
        "num_gpus": 1 if wants_gpu(recipe.settings.engine) else 0,
        "max_concurrency": MAX_CONCURRENT_ROWS,
        "max_restarts": 0,
        "name": f"rayspec-engine-{secrets.token_hex(8)}",  # by which its placement groups are known
    }
    return ray.remote(EngineWorker).options(**options).remote(recipe)


def cpus_to_reserve(num_cpus: float) -> float:
    """For an engine in a cluster of so many CPUs. It uses what it likes, whatever it has reserved; but Ray Data will
    not start on less than a whole CPU that nobody has, beside those it reads with."""
    return 1.0 if num_cpus >= _MIN_CPUS_TO_RESERVE else 0.0


def call(reference: Any) -> Any:
    """`ray.get`, with our own errors as they were raised, without the actor's traceback."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


async def answer(reference: Awaitable[Any]) -> Any:
    """`call` for coroutines."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, RayspecError):
            raise error.cause from None
        raise


def death_of_process(error: RayActorError) -> EngineDeadError:
    """What a call to an engine's actor says when the actor is gone, as an error of the engine."""
    reason = str(error).splitlines()[0]
    return EngineDeadError(f"the engine's process has ended: {reason} Was it killed, or out of memory?")


def is_node_alive(node_id: str) -> bool:
    """Whether the cluster still has this node."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == node_id and node["Alive"] for node in nodes)
