"""The engine of a pool whose items are rows of a dataset."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rayspec.batch.rows import Row
from rayspec.command.loading import load_llm
from rayspec.command.settings import Settings
from rayspec.config import EngineConfig
from rayspec.pipeline.pool.recipe import Beginning, Tell
from rayspec.types import EngineLoad, EngineStats, RayspecError

if TYPE_CHECKING:
    from rayspec.async_engine import AsyncEngine

Handler = Callable[[Any], Awaitable[Any]]


class RowTask(Protocol):
    """The engine that a job wants, and what is done there with each row. Travels to the actors."""

    @property
    def settings(self) -> Settings: ...

    def handler(self, engine: AsyncEngine) -> Handler:
        """Called once, where the engine is. The handler raises EngineDeadError; what is wrong with a row is in what
        it returns."""


@dataclass(frozen=True, slots=True)
class RowRecipe:
    """Engines that do a task."""

    task: RowTask

    @property
    def engine(self) -> EngineConfig:
        return self.task.settings.engine

    def load(self, config: EngineConfig) -> RowEngine:
        """Raises ConfigError, CheckpointError, and with shards PlacementError."""
        # Imported here, so that who only talks to the actor does not wait seconds for torch and transformers.
        from rayspec.async_engine import AsyncEngine  # noqa: PLC0415

        if config.parallel is None:
            # Ray sets OMP_NUM_THREADS to the actor's num_cpus, a reservation and not what the engine should use.
            config = config.replace(num_threads=config.num_threads or os.cpu_count() or 1)
        return RowEngine(self.task, AsyncEngine(load_llm(config)), self.engine)

    def beginning(self, item: Any) -> Beginning:
        """Of a document, or of what was prepared for the model."""
        if isinstance(item, Row):
            return item.messages or item.document
        found = next((item[name] for name in ("tokenized_prompt", "messages", "prompt") if item.get(name)), None)
        return found if found is None or isinstance(found, str) else str(found)


class RowEngine:
    """In the actor. asked: the options of the whole pool."""

    def __init__(self, task: RowTask, engine: AsyncEngine, asked: EngineConfig) -> None:
        self._task, self._engine, self._asked = task, engine, asked
        self._handle = task.handler(engine)

    @property
    def facts(self) -> dict[str, Any]:
        """All options in force, as a config file has them."""
        in_force = self._engine.llm.config.replace(parallel=self._asked.parallel)
        return self._task.settings.resolved(in_force)

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    @property
    def death(self) -> RayspecError | None:
        return self._engine.death

    async def handle(self, item: Any, tell: Tell) -> Any:
        return await self._handle(item)

    async def ping(self) -> None:
        await self._engine.ping()

    def stop(self) -> None:
        self._engine.stop()
