"""Interfaces between a pool and its owner: how an actor loads its engine, and how the engine handles an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rayspec.config import EngineConfig
from rayspec.decode.progress import Progress
from rayspec.types import EngineLoad, EngineStats, RayspecError

Tell = Callable[[Any], None]
"""Takes a new part of an item's result before the item is done. Any thread may call it."""

Beginning = str | Sequence[int] | None
"""An item's prompt, or the beginning of it, as text or tokens. None: there is nothing to choose an engine by."""


class LoadedEngine(Protocol):
    """A loaded engine, in its actor."""

    @property
    def facts(self) -> Any:
        """Description of the loaded engine for the pool's owner. It must be picklable."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""

    @property
    def death(self) -> RayspecError | None:
        """Error that has ended the engine; None while it runs."""

    async def handle(self, item: Any, tell: Tell) -> Any:
        """Return the result for an item; errors of the item are part of the result. tell: takes parts of the result.
        Raises EngineDeadError when the engine cannot go on. Cancelling the wait ends the work on the item."""

    async def ping(self) -> None:
        """Wait until the engine has answered. Raises EngineDeadError."""

    def stop(self) -> None: ...


class Recipe(Protocol):
    """Loads the engines of a pool. It must be picklable, because it is sent to the actors."""

    @property
    def engine(self) -> EngineConfig:
        """Options of the whole pool: `parallel.replicas` is the number of engines."""

    def load(self, config: EngineConfig) -> LoadedEngine:
        """Load the engine of an actor; called once, on a thread of its own. config: options of this engine alone.
        Raises ConfigError, CheckpointError, and with shards PlacementError."""

    def beginning(self, item: Any) -> Beginning:
        """Return how an item's prompt begins, for the choice among several engines. It must be quick."""
