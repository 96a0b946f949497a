"""The place of one engine in a pool, and the interface of an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayspec.pool.recipe import Tell
from rayspec.pool.restart_budget import RestartBudget
from rayspec.types import EngineLoad, EngineStats


class Engine(Protocol):
    """Runs items. Its coroutines raise EngineDeadError once the engine has ended."""

    async def load(self) -> Any: ...

    async def handle(self, item: Any, tell: Tell | None) -> Any: ...

    async def check(self) -> None: ...

    async def answer(self) -> None:
        """Wait until the engine's process answers, regardless of what the engine is doing. Raises EngineDeadError also
        if the process is stopped or the engine is stuck."""

    async def stats(self) -> EngineStats: ...

    async def load_now(self) -> EngineLoad: ...

    async def stop(self) -> None: ...

    def end(self) -> None:
        """Kill the engine at once. Never raises; later calls do nothing."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """The place of an engine. restarts: budget for deaths that no suspect explains. trials: budget for the first deaths
    of suspects. under_way: when the engine got each of its items. watch_s: how long the next engine first lives without
    items. failure: why no engine is started here any more."""

    number: int
    restarts: RestartBudget
    trials: RestartBudget
    engine: Engine | None = None
    starting: asyncio.Task[None] | None = None
    under_way: dict[int, float] = field(default_factory=dict)
    delay_s: float = 0.0
    watch_s: float = 0.0
    watch: asyncio.Task[None] | None = None
    failure: Exception | None = None

    def renew_budgets(self) -> None:
        self.restarts.renew()
        self.trials.renew()
