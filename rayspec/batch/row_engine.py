"""The engine of a pool whose items are rows of a dataset."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rayspec.batch.rows import Row
from rayspec.command.loading import load_llm
from rayspec.command.settings import Settings
from rayspec.config import DType, EngineConfig

if TYPE_CHECKING:
    from rayspec.llm import AsyncEngine
    from rayspec.pool.calls import Callback
    from rayspec.pool.worker import Beginning

Handler = Callable[[Any], Awaitable[Any]]


class RowTask(Protocol):
    """The engine options of a job, and the work on each row. The task is sent to the engines' actors."""

    @property
    def settings(self) -> Settings: ...

    def handler(self, engine: AsyncEngine) -> Handler:
        """Make the function that completes rows. It is called once, in the engine's actor. The function raises
        EngineDeadError; an error of a row is stored in the row that the function returns."""


@dataclass(frozen=True, slots=True)
class RowEngineFactory:
    """Loads engines that do a task. dtype: of the weights, in place of the task's; None: as the task says."""

    task: RowTask
    dtype: DType | None = None

    @property
    def engine(self) -> EngineConfig:
        asked = self.task.settings.engine
        return asked if self.dtype is None else asked.replace(dtype=self.dtype)

    def load(self, config: EngineConfig) -> RowEngine:
        """Load an engine for the task. Raises ConfigError, CheckpointError, and with shards PlacementError."""
        # Imported here, so that a process that only calls the actor does not load torch and transformers for seconds.
        from rayspec.llm import AsyncEngine  # noqa: PLC0415

        if "ray" in sys.modules:  # in an actor
            from rayspec.ray_session import forget_reserved_threads  # noqa: PLC0415

            forget_reserved_threads()
        return RowEngine(self.task, AsyncEngine(load_llm(config)), self.engine)

    def beginning(self, item: Any) -> Beginning:
        """Return the text of the item's prompt, by which the pool chooses an engine; None if there is none."""
        if isinstance(item, Row):
            return item.messages or item.document
        found = next((item[name] for name in ("tokenized_prompt", "messages", "prompt") if item.get(name)), None)
        return found if found is None or isinstance(found, str) else str(found)


class RowEngine:
    """An engine in an actor, with the handler of its task. asked: the options of the whole pool."""

    def __init__(self, task: RowTask, engine: AsyncEngine, asked: EngineConfig) -> None:
        self.client, self.stop = engine.client, engine.stop
        self.info = task.settings.resolved(engine.llm.config.replace(parallel=asked.parallel))
        self._handle = task.handler(engine)

    async def handle(self, item: Any, callback: Callback) -> Any:
        return await self._handle(item)
