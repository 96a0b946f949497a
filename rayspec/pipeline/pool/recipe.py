"""What a pool is made for: the engine that each of its actors loads, and what is done there with an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rayspec.config import EngineConfig
from rayspec.types import EngineLoad, EngineStats, RayspecError

Tell = Callable[[Any], None]
"""Takes what is new of an item that is not done yet. May be called from any thread."""

Beginning = str | Sequence[int] | None
"""What an item's prompt begins with: text, or tokens."""


class LoadedEngine(Protocol):
    """An engine at work, in the actor."""

    @property
    def facts(self) -> Any:
        """What the pool's owner is told of the engine once it is loaded. Travels."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def death(self) -> RayspecError | None:
        """Why the engine has ended; None while it runs."""

    async def handle(self, item: Any, tell: Tell) -> Any:
        """What becomes of the item. Raises EngineDeadError when the engine cannot go on; what is wrong with the item is
        in the result. Cancelling the wait ends the work on the item."""

    async def ping(self) -> None:
        """Returns when the engine has come round. Raises EngineDeadError."""

    def stop(self) -> None: ...


class Recipe(Protocol):
    """Travels to the actors."""

    @property
    def engine(self) -> EngineConfig:
        """Of the whole pool: `parallel.replicas` says how many engines there are."""

    def load(self, config: EngineConfig) -> LoadedEngine:
        """Called once in an actor, on a thread of its own. config: of one engine. Raises ConfigError, CheckpointError,
        and with shards PlacementError."""

    def beginning(self, item: Any) -> Beginning:
        """For the choice of an engine. Called for every item where there are several engines: it must be quick."""
