"""The place of one engine in a pool, and what a pool asks of an engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayspec.pipeline.pool.recipe import Tell
from rayspec.pipeline.pool.restart_budget import RestartBudget
from rayspec.types import EngineLoad, EngineStats


class Engine(Protocol):
    """Runs items. Its coroutines raise EngineDeadError once the engine has ended."""

    async def load(self) -> Any: ...

    async def handle(self, item: Any, tell: Tell | None) -> Any: ...

    async def check(self) -> None: ...

    async def answer(self) -> None:
        """Returns when the engine's process answers, whatever the engine is doing."""

    async def stats(self) -> EngineStats: ...

    async def load_now(self) -> EngineLoad: ...

    async def stop(self) -> None: ...

    def end(self) -> None:
        """At once, whatever runs. Never raises; more than once is fine."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """The place of an engine. under_way: since when the engine has had which items. watch_s: how long the next engine
    lives without items first. failure: why no engine is started here any more."""

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
