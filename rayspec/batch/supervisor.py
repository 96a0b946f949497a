"""The supervisor owns the current engine, starts another when the engine dies, and gives that one the lost rows."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from rayspec.batch.engine_actor import (
    MAX_CONCURRENT_ROWS,
    Recipe,
    answer,
    death_of_process,
    is_node_alive,
    start_engine,
)
from rayspec.batch.quarantine import EngineKilledError, Quarantine, Verdict
from rayspec.batch.restart_budget import RestartBudget
from rayspec.config import EngineConfig
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.placement import remove_orphaned_groups
from rayspec.types import EngineStats, RayspecError

_WATCH_SHARE = 2.0  # of the time that an engine lived with one row
_LONGEST_WATCH_S = 120.0
_STOP_TIMEOUT_S = 10.0
_SURPLUS = 1.25

logger = logging.getLogger(__name__)


class DrainingError(RayspecError):
    """The job is about to end: no new row is begun."""

    kind = "aborted"


class NodeLostError(EngineDeadError):
    """The engine ended with its node, or was preempted: no row is to blame."""


class Engine(Protocol):
    """Runs rows. Its coroutines raise EngineDeadError once the engine has ended."""

    async def load(self) -> dict[str, Any]: ...

    async def handle(self, row: Any) -> Any: ...

    async def check(self) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def stop(self) -> None: ...

    def end(self) -> None:
        """At once, whatever runs. Never raises; more than once is fine."""


class EngineSupervisor:
    """Passes rows to the current engine. When the engine dies, another is started, and gets the rows that it had.

    A row is given out once, whatever engines did with it. A row that kills engines fails alone (see Quarantine).
    max_restarts: restarts for deaths that no row explains, and rows that seem to kill engines, without a completed row
    in between. After more, all rows fail until `begin`. max_rows: that an engine is given at a time. `start` makes an
    engine that is not loaded yet; it may block.
    """

    def __init__(
        self,
        start: Callable[[], Engine],
        *,
        max_restarts: int,
        max_rows: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._start = start
        self._clock, self._sleep = clock, sleep
        self._max_restarts, self._max_rows = max_restarts, max_rows
        self._restarts = RestartBudget(max_restarts)
        self._trials = RestartBudget(max_restarts)
        self._delay_s = 0.0
        self._quarantine: Quarantine | None = None  # from the first death on
        self._numbers = itertools.count()
        self._engine: Engine | None = None
        self._config: dict[str, Any] = {}
        self._starting: asyncio.Task[None] | None = None
        self._was_loaded = False
        self._watch_s = 0.0
        self._failure: Exception | None = None
        self._is_stopped = False
        self._num_completed = 0
        self._waiting: dict[int, asyncio.Future[Engine]] = {}
        self._under_way: dict[int, float] = {}
        self._condemned: dict[int, EngineKilledError] = {}

    async def begin(self) -> dict[str, Any]:
        """For a new dataset: an engine is up when this returns, and its restarts are counted anew. Returns all options
        in force. Raises EngineDeadError, and what an engine raises while it loads."""
        if not self._is_stopped:
            self._failure = None
        if self._engine is not None:
            await self._check(self._engine)
        self._renew_budgets()
        while self._engine is None:
            self._require_alive()
            await asyncio.shield(self._ensure_starting())
        return self._config

    async def handle(self, row: Any) -> Any:
        """What an engine makes of the row. Raises EngineKilledError, EngineDeadError, DrainingError."""
        number = next(self._numbers)
        try:
            while True:
                engine = await self._turn(number)
                try:
                    result = await engine.handle(row)
                except EngineDeadError as error:
                    self._bury(engine, error)
                    if number in self._condemned:
                        self._num_completed += 1
                        raise self._condemned[number] from None
                else:
                    self._num_completed += 1
                    self._renew_budgets()
                    return result
        finally:
            self._leave(number)

    async def drain(self) -> None:
        """No row is given to an engine any more: later and waiting rows fail with DrainingError. Rows that an engine
        has go on."""
        if self._failure is None:
            self._fail(DrainingError("the engine takes no new rows"))

    async def num_given(self) -> int:
        """Rows that were completed or condemned, and rows that an engine has."""
        return self._num_completed + len(self._under_way)

    async def stats(self) -> EngineStats:
        """Of the current engine."""
        return await self._engine.stats() if self._engine is not None else EngineStats()

    async def stop(self) -> None:
        """End the engine. Rows that are not done fail with EngineDeadError; so do all later ones."""
        self._is_stopped = True
        self._fail(EngineDeadError("the engine was shut down"))
        if self._starting is not None:
            self._starting.cancel()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            await asyncio.wait_for(engine.stop(), _STOP_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - the engine is ended in any case
            logger.info("the engine did not stop by itself: %s", error)
        finally:
            engine.end()

    # --- rows ---

    async def _turn(self, number: int) -> Engine:
        self._require_alive()
        turn: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting[number] = turn
        self._dispatch()
        try:
            return await turn
        finally:
            self._waiting.pop(number, None)

    def _dispatch(self) -> None:
        if self._engine is None:
            if self._waiting and self._failure is None:
                self._ensure_starting()
            return
        num_free = None if self._max_rows is None else max(0, self._max_rows - len(self._under_way))
        for number in self._admitted()[:num_free]:
            turn = self._waiting.pop(number)
            if not turn.done():
                self._under_way[number] = self._clock()
                turn.set_result(self._engine)

    def _admitted(self) -> list[int]:
        """The waiting rows that the engine may get now."""
        if self._quarantine is None:
            return list(self._waiting)
        return self._quarantine.admitted(self._waiting, self._under_way)

    def _leave(self, number: int) -> None:
        self._under_way.pop(number, None)
        self._condemned.pop(number, None)
        if self._quarantine is not None:
            self._quarantine.forget(number)
        self._dispatch()

    # --- engines ---

    def _bury(self, engine: Engine, error: EngineDeadError) -> None:
        """The first row that learns of a death calls this for all. Later calls do nothing."""
        if engine is not self._engine:
            return
        self._engine = None
        engine.end()
        under_way, self._under_way = self._under_way, {}
        lived_s = self._clock() - min(under_way.values(), default=0.0)
        self._watch_s = min(_WATCH_SHARE * lived_s, _LONGEST_WATCH_S) if len(under_way) == 1 else 0.0
        is_evidence = not isinstance(error, NodeLostError)
        verdict = self._died(under_way.keys(), lived_s) if is_evidence else Verdict()
        if verdict.is_guilty and verdict.suspect is not None:
            message = f"engines died of this row, also where it was the only row, the last time so: {error}"
            self._condemned[verdict.suspect] = EngineKilledError(message)
        delay_s = self._delay_after_death(verdict)
        if delay_s is None:
            self._fail(self._spent(error))
            return
        self._delay_s = delay_s
        logger.warning("%s; another engine gets the %s rows that it had", error, len(under_way))

    def _died(self, under_way: Collection[int], lived_s: float = 0.0) -> Verdict:
        if self._quarantine is None:
            self._quarantine = Quarantine()
        return self._quarantine.died(under_way, lived_s)

    def _delay_after_death(self, verdict: Verdict) -> float | None:
        """None: engines died too often."""
        if verdict.is_guilty:
            self._restarts.renew()
        if verdict.suspect is None:
            return self._restarts.next_delay_s()
        return 0.0 if verdict.is_known else self._trials.next_delay_s()

    def _ensure_starting(self) -> asyncio.Task[None]:
        if self._starting is None:
            delay_s, self._delay_s = self._delay_s, 0.0
            self._starting = asyncio.create_task(self._start_until_loaded(delay_s))
        return self._starting

    async def _start_until_loaded(self, delay_s: float) -> None:
        next_delay_s: float | None = delay_s
        while next_delay_s is not None:
            await self._sleep(next_delay_s)
            try:
                self._engine = await self._load_engine()
            except Exception as error:  # noqa: BLE001 - reported to everyone who waits
                self._died(())
                next_delay_s = self._delay_after(error)
            else:
                break
        self._starting = None
        self._dispatch()

    async def _load_engine(self) -> Engine:
        """An engine that lives. After the death of an engine with one row, the new engine lives for a while without a
        row first: kills from outside show then."""
        started_s = self._clock()
        engine = await asyncio.to_thread(self._start)
        try:
            self._config = await engine.load()
            self._was_loaded = True
            if self._watch_s > 0:
                await self._sleep(self._watch_s)
                await engine.check()
        except BaseException:
            engine.end()
            raise
        finally:
            if self._quarantine is not None:
                self._quarantine.idled(self._clock() - started_s)
        return engine

    def _delay_after(self, error: Exception) -> float | None:
        """Before the next attempt at an engine, where one could not be loaded. None: everyone who waits has failed."""
        can_pass = self._was_loaded or isinstance(error, EngineDeadError)
        delay_s = self._restarts.next_delay_s() if can_pass else None
        if delay_s is not None:
            logger.warning("an engine could not be loaded, and is started again: %s", error)
            return delay_s
        self._fail(self._spent(error) if can_pass else error)
        return None

    async def _check(self, engine: Engine) -> None:
        try:
            await engine.check()
        except EngineDeadError as error:
            self._bury(engine, error)

    def _spent(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(
            f"{error} (max_engine_restarts is {self._max_restarts}, and no row was completed since the last restarts)"
        )

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_exception(error)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _renew_budgets(self) -> None:
        self._restarts.renew()
        self._trials.renew()


class ActorEngine:
    """An EngineWorker's actor, whose errors are our own."""

    def __init__(self, recipe: Recipe) -> None:
        self._actor = start_engine(recipe)
        self._node_id: str | None = None
        self._has_shards = recipe.settings.engine.parallel is not None

    async def load(self) -> dict[str, Any]:
        options: dict[str, Any] = await self._answer(self._actor.load.remote())
        self._node_id = await self._answer(self._actor.node_id.remote())
        return options

    async def handle(self, row: Any) -> Any:
        return await self._answer(self._actor.handle.remote(row))

    async def check(self) -> None:
        death: EngineDeadError | None = await self._answer(self._actor.death.remote())
        if death is not None:
            raise death

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._answer(self._actor.stats.remote())
        return stats

    async def stop(self) -> None:
        await self._answer(self._actor.stop.remote())

    def end(self) -> None:
        with suppress(RayError):
            ray.kill(self._actor)
            if self._has_shards:
                remove_orphaned_groups()

    async def _answer(self, reference: Awaitable[Any]) -> Any:
        try:
            return await answer(reference)
        except RayActorError as error:
            death = death_of_process(error)
            is_node_lost = self._node_id is not None and not is_node_alive(self._node_id)
            raise NodeLostError(str(death)) if is_node_lost or error.preempted else death from None


def start_supervisor(recipe: Recipe, *, max_restarts: int) -> Any:
    """An actor handle of an EngineSupervisor for engines of this recipe.

    The actor loads no model library. When the supervisor's own process ends, Ray starts the supervisor again, with
    another engine, and repeats the calls.
    """
    options = {
        "num_cpus": 0,
        "max_concurrency": MAX_CONCURRENT_ROWS,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    start, max_rows = partial(ActorEngine, recipe), rows_at_a_time(recipe.settings.engine)
    return ray.remote(EngineSupervisor).options(**options).remote(start, max_restarts=max_restarts, max_rows=max_rows)


def rows_at_a_time(config: EngineConfig) -> int:
    """What an engine decodes at once, and a quarter more, so that it never waits for a row. Not more: rows that only
    wait in an engine would be under suspicion when the engine dies."""
    num_replicas = config.parallel.replicas if config.parallel is not None else 1
    return math.ceil(_SURPLUS * config.max_num_seqs * num_replicas)
