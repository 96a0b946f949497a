"""The supervisor starts engines, replaces engines that die, and gives their items to other engines."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import ray

from rayspec.decode.engine_loop import EngineDeadError, LoopThread
from rayspec.pipeline.placement import NoPlaceError, ShardEndedError, sized
from rayspec.pipeline.recovery import Restarts
from rayspec.pool.dispatch import Dispatch, Slot, part_hashes
from rayspec.pool.worker import Beginning, Callback, CommonDType, EngineFactory, RemoteEngine, WorkerMethod, num_engines
from rayspec.types import EngineLoad, EngineStats, RayspecError

_SURPLUS = 1.25
_POOL_STOP_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 5.0
_PLACE_AGAIN_S = 30.0
_LEAST_CALLS = 4096
_SIGNALS_S = 1.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DrainingError(RayspecError):
    """The pool starts no new item, because the job is about to end."""

    kind = "aborted"


class EngineSupervisor:
    """Passes items to engines. When an engine dies, a new one takes its place, and its items go to live engines.

    Each item gets one result, however many engines have worked on it. An item that kills engines fails alone (see
    `dispatch`). An engine that dies more often than `max_restarts` without a completed item in between is lost; deaths
    at which an item is alone for the first time are counted apart, those of a culprit are not counted. When all engines
    are lost, all items fail until `begin`. start: makes an engine that is not loaded yet; may block. max_items: of an
    engine at a time. silence_s: after which a process counts as dead; None: never.
    """

    def __init__(
        self,
        start: Callable[[], RemoteEngine],
        *,
        num_engines: int = 1,
        max_restarts: int,
        max_items: int | None = None,
        silence_s: float | None = None,
        beginning: Callable[[Any], Beginning] = lambda item: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._start, self._sleep = start, sleep
        self._max_restarts = max_restarts
        self._beginning, self._silence_s = beginning, silence_s
        self._slots = [
            Slot(number=number, restarts=Restarts(max_restarts), restarts_alone=Restarts(max_restarts))
            for number in range(num_engines)
        ]
        self._dispatch = Dispatch(self._slots, max_items=max_items)
        self._numbers = itertools.count()
        self._info: Any = None
        self._was_loaded = False
        self._changed = asyncio.Event()  # set when an engine came up or a slot was given up
        self._failure: Exception | None = None
        self._takes_no_more = False
        self._died_at_s: list[float] = []

    async def begin(self) -> Any:
        """Count restarts anew, wait until one engine is up, and return its info; others may follow. Raises
        EngineDeadError, and the error of an engine that fails to load."""
        if not self._takes_no_more:
            self._failure = None
        for slot in self._slots:
            slot.failure = None
            if (engine := slot.engine) is not None:
                try:
                    await engine.ask("ping")
                except EngineDeadError as error:
                    self._handle_end(slot, engine, error)
            slot.renew_restarts()
        while not self._engines:
            self._require_alive()
            self._changed.clear()
            self._start_missing()
            await self._changed.wait()
        self._start_missing()
        return self._info

    async def handle(self, item: Any, listen: Callable[[], Callback] | None = None) -> Any:
        """Run an item on an engine and return the result. listen: makes the function that takes parts of the result;
        called again each time the item starts again. Raises EngineKilledError, EngineDeadError, DrainingError."""
        number = next(self._numbers)
        hashes = part_hashes(self._beginning(item)) if len(self._slots) > 1 else ()
        try:
            while True:
                self._require_alive()
                turn = self._dispatch.turn(number, hashes)
                self._deal()
                try:
                    slot, engine = await turn
                finally:
                    self._dispatch.withdraw(number)
                try:
                    result = await engine.handle(item, listen() if listen is not None else None)
                except EngineDeadError as error:
                    self._handle_end(slot, engine, error)
                    if (judgement := self._dispatch.judgement(number)) is not None:
                        raise judgement from None
                else:
                    slot.renew_restarts()
                    return result
        finally:
            self._dispatch.leave(number)
            self._deal()

    def _deal(self) -> None:
        if self._dispatch.has_waiting and self._failure is None:
            self._start_missing()
        self._dispatch.deal()

    async def drain(self) -> None:
        """Let later and waiting items fail with DrainingError. Items that an engine already has go on."""
        self._takes_no_more = True
        if self._failure is None:
            self._fail(DrainingError("the engine takes no new rows"))

    async def stats(self) -> EngineStats:
        stats = merged_stats(await self._answers("stats"))
        stats.num_lost_replicas, stats.died_at_s = self._num_lost, [*self._died_at_s]
        return stats

    async def load(self) -> EngineLoad:
        nothing = EngineLoad(num_running=0, num_waiting=0, kv_used_tokens=0, kv_total_tokens=0)
        return sum(await self._answers("load_now"), start=nothing)

    async def ping(self) -> None:
        """Wait until all engines that run have answered. Raises the error of an engine, or of having none."""
        self._require_alive()
        if not self._engines:
            raise EngineDeadError("no engine is up: they are being started")
        await asyncio.gather(*(engine.ask("ping") for engine in self._engines))

    @property
    def num_up(self) -> int:
        return len(self._engines)

    async def stop(self) -> None:
        """End the engines. Unfinished items and all later items fail with EngineDeadError."""
        self._takes_no_more = True
        self._fail(EngineDeadError("the engine was shut down"))
        for task in (task for slot in self._slots for task in (slot.starting, slot.watch) if task is not None):
            task.cancel()
        engines = self._engines
        for slot in self._slots:
            slot.engine = None
        await asyncio.gather(*map(self._end, engines))

    async def kill(self) -> None:
        """Kill the engines at once, then do as `stop`."""
        for slot in self._slots:
            if slot.engine is not None:
                slot.engine.end()
                slot.engine = None
        await self.stop()

    async def _end(self, engine: RemoteEngine) -> None:
        try:
            await asyncio.wait_for(engine.ask("stop"), 10.0)
        except Exception as error:  # noqa: BLE001 - the engine is ended in any case
            logger.info("the engine did not stop by itself: %s", error)
        finally:
            engine.end()

    @property
    def _engines(self) -> list[RemoteEngine]:
        return [slot.engine for slot in self._slots if slot.engine is not None]

    @property
    def _num_lost(self) -> int:
        return sum(slot.failure is not None for slot in self._slots)

    async def _answers(self, method: WorkerMethod) -> list[Any]:
        """Ask all engines that run. Return the answers that come within `_ANSWER_TIMEOUT_S`."""
        asked = [asyncio.wait_for(engine.ask(method), _ANSWER_TIMEOUT_S) for engine in self._engines]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _handle_end(self, slot: Slot, engine: RemoteEngine, error: EngineDeadError) -> None:
        """Record the death of an engine; only the first call has an effect."""
        if engine is not slot.engine:
            return
        slot.engine = None
        self._died_at_s.append(time.monotonic())
        engine.end()
        num_alone = self._dispatch.died(slot, error)
        num_items = len(slot.under_way)
        slot.under_way.clear()
        delay_s: float | None = 0.0  # at a second death alone: the item is the culprit
        if num_alone < 2:
            delay_s = (slot.restarts_alone if num_alone else slot.restarts).next_delay_s()
        if delay_s is None:
            self._lose(slot, self._spent(error))
        else:
            slot.delay_s = delay_s
            logger.warning("%s; the %s rows that it had are given to an engine again", error, num_items)

    def _start_missing(self) -> None:
        for slot in self._slots:
            if slot.engine is None and slot.failure is None and slot.starting is None:
                delay_s, slot.delay_s, slot.has_place = slot.delay_s, 0.0, True
                slot.starting = asyncio.create_task(self._start_until_loaded(slot, delay_s))

    async def _start_until_loaded(self, slot: Slot, delay_s: float) -> None:
        next_delay_s: float | None = delay_s
        while next_delay_s is not None:
            await self._sleep(next_delay_s)
            if slot.failure is not None:
                break
            try:
                engine = await asyncio.to_thread(self._start)
                try:
                    self._info = await engine.load()
                except BaseException:
                    engine.end()
                    raise
                self._was_loaded = slot.has_place = True
                if not slot.is_usable:  # it was lost meanwhile, with another
                    engine.end()
                    break
                slot.engine = engine
                engine.share = partial(self._share, engine)
                break
            except Exception as error:  # noqa: BLE001 - reported to everyone who waits
                next_delay_s = self._delay_after(slot, error)
        slot.starting = None
        if slot.engine is not None and self._silence_s is not None:
            slot.watch = asyncio.create_task(self._watch(slot, slot.engine, self._silence_s))
        self._changed.set()
        self._deal()

    async def _watch(self, slot: Slot, engine: RemoteEngine, silence_s: float) -> None:
        """Notice the end of an engine that has no items, or a frozen process, and start another engine."""
        while engine is slot.engine:
            try:
                await asyncio.wait_for(engine.answer(), silence_s)
                await self._sleep(2.0)
            except asyncio.TimeoutError:  # noqa: PERF203 - the watch ends with its engine
                silence = EngineDeadError(f"the engine's process has not answered for {silence_s:g} s")
                self._handle_end(slot, engine, silence)
            except EngineDeadError as error:
                self._handle_end(slot, engine, error)
        if self._failure is None:
            self._start_missing()

    def _share(self, engine: RemoteEngine, texts: bytes) -> None:
        """Give finished texts of an engine to the others, which then copy from them."""
        for other in self._engines:
            if other is not engine:
                other.remember(texts)

    def _delay_after(self, slot: Slot, error: Exception) -> float | None:
        """Return how long to wait before the next attempt to load an engine; None: the slot is lost."""
        slot.has_place = not isinstance(error, NoPlaceError)
        if not slot.has_place and any(each.has_place and (each.engine or each.starting) for each in self._slots):
            self._deal()  # isolated items go elsewhere
            logger.warning("an engine finds no place, and is tried again in %.0f s: %s", _PLACE_AGAIN_S, error)
            return _PLACE_AGAIN_S
        can_pass = self._was_loaded or isinstance(error, EngineDeadError | ShardEndedError)
        delay_s = slot.restarts.next_delay_s() if can_pass else None
        if delay_s is not None:
            logger.warning("an engine could not be loaded, and is started again: %s", error)
            return delay_s
        # If no engine has found a place, those that would try again later need not wait.
        waiting = [] if slot.has_place else [each for each in self._slots if not each.has_place and each is not slot]
        for each in (*waiting, slot):
            self._lose(each, self._spent(error) if can_pass else error)
        return None

    def _spent(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(
            f"{error} (max_engine_restarts is {self._max_restarts}, and no row was completed since the last restarts)"
        )

    def _lose(self, slot: Slot, error: Exception) -> None:
        slot.failure = error
        self._changed.set()
        if self._num_lost == len(self._slots):
            self._fail(error)
        else:
            logger.warning("replica %d of %d is lost for good: %s", slot.number, len(self._slots), error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()
        self._dispatch.fail(error)

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure


class EnginePool:
    """A supervisor for all threads except the pool's own."""

    def __init__(self, factory: EngineFactory, *, max_restarts: int) -> None:
        self.supervisor = EngineSupervisor(**supervision(factory, max_restarts))
        self._thread = LoopThread("rayspec-pool")

    def begin(self) -> Any:
        info = self.ask(self.supervisor.begin())
        while not wait([info], _SIGNALS_S).done:
            pass  # a signal that came to another thread is handled only when this one runs
        return info.result()

    def submit(self, item: Any, listen: Callable[[], Callback] | None = None) -> Future[Any]:
        """Return a future of the result, see `EngineSupervisor.handle`. Cancelling it ends the work on the item."""
        return self.ask(self.supervisor.handle(item, listen))

    def drain(self) -> None:
        """Start `EngineSupervisor.drain` and return at once. A signal handler may call this."""
        self._thread.call_soon(lambda: asyncio.ensure_future(self.supervisor.drain()))

    def stats(self) -> EngineStats:
        return self.ask(self.supervisor.stats()).result()

    def ask(self, question: Coroutine[Any, Any, T]) -> Future[T]:
        return self._thread.start(question)

    def stop(self) -> None:
        """End the engines and the thread. Later calls do nothing."""
        self._thread.close(self.supervisor.stop, _POOL_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the engines at once, then end the thread. Later calls do nothing."""
        self._thread.close(self.supervisor.kill, _POOL_STOP_TIMEOUT_S)


def supervision(factory: EngineFactory, max_restarts: int, *, reserves_cpu: bool = True) -> dict[str, Any]:
    """Return the arguments of an EngineSupervisor, which can be pickled. An engine gets the items that it decodes at
    once and a quarter more, so that it never waits; items that only wait in it are isolated, too, when it dies."""
    return {
        "start": partial(RemoteEngine, factory, CommonDType(), reserves_cpu=reserves_cpu),
        "num_engines": num_engines(factory.engine),
        "max_restarts": max_restarts,
        "max_items": math.ceil(_SURPLUS * sized(factory.engine).num_seqs),
        "silence_s": 60.0,  # a busy machine may keep a process waiting for seconds
        "beginning": factory.beginning,
    }


def start_supervisor(factory: EngineFactory, *, max_restarts: int) -> Any:
    """Start an EngineSupervisor in an actor, for callers in other processes. If the actor ends, Ray starts it again,
    with new engines, and repeats the calls."""
    again = {"max_restarts": -1, "max_task_retries": -1}
    # The engines of several datasets would hold the CPUs that tasks of these datasets wait for.
    arguments = supervision(factory, max_restarts, reserves_cpu=False)
    # Each row is a call: all that engines have, as many that wait, and the calls of other methods.
    max_calls = max(_LEAST_CALLS, 2 * arguments["num_engines"] * arguments["max_items"])
    kind: Any = ray.remote(EngineSupervisor).options(num_cpus=0, max_concurrency=max_calls, **again)
    return kind.remote(**arguments)


def merged_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of several engines as of one: add up counts and seconds, sort all plans by the time they
    were made, and take the first text of each kind."""
    total = EngineStats()
    for part in parts:
        for field in dataclasses.fields(EngineStats):
            value, sum_so_far = getattr(part, field.name), getattr(total, field.name)
            if isinstance(value, int | float):
                setattr(total, field.name, sum_so_far + value)
            elif isinstance(value, dict):
                for key, count in value.items():
                    sum_so_far[key] = sum_so_far.get(key, 0) + count
            elif isinstance(value, str) and not sum_so_far:
                setattr(total, field.name, value)
    total.plans = sorted((plan for part in parts for plan in part.plans), key=lambda plan: plan.elapsed_s)
    return total
