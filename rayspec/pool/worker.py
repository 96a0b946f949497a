"""One engine of a pool in a Ray actor (`EngineWorker`), and the supervisor's handle of it (`RemoteEngine`)."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import pickle
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rayspec.config import KV_CACHE_SHARE, EngineConfig, ParallelOptions
from rayspec.decode.engine_loop import EngineDeadError, EngineLoop
from rayspec.machine import keep_loaded
from rayspec.pipeline.placement import (
    NoPlaceError,
    errors_of_actor,
    first_line,
    gpus_per_shard,
    remove_orphaned_groups,
    reserving_nothing,
    sized,
    wants_gpu,
)
from rayspec.pool.stopped import Place, ProcessStoppedError, answer_of
from rayspec.types import EngineLoad, EngineStats, RayspecError, RequestError, TransportError

# Finished texts travel with outputs to the pool, and with later items to the other engines, as an item of their own.
_TEXTS, _MAX_TEXTS, _MAX_MESSAGES = -1, 16, 64
NO_ROOM = (ObjectStoreFullError, OutOfDiskError)  # in Ray's store, and on the disk where it would spill
PATIENCE_S = 30.0
"""After which the log says what a job waits for."""

logger = logging.getLogger(__name__)

Callback = Callable[[Any], None]
"""Takes a new part of an item's result before the item is done. Any thread may call it."""
Beginning = str | Sequence[int] | None
"""An item's prompt, or the beginning of it, as text or tokens. None: there is nothing to choose an engine by."""

WorkerMethod = Literal["ping", "answer", "stats", "load_now", "stop"]


class NodeLostError(EngineDeadError):
    """The engine ended with its node, was preempted, cannot be reached, or has no room for outputs: no item is to
    blame."""


class LoadedEngine(Protocol):
    @property
    def client(self) -> EngineLoop: ...

    @property
    def info(self) -> Any:
        """Description of the loaded engine for the pool's owner. It must be picklable."""

    async def handle(self, item: Any, callback: Callback) -> Any:
        """Return the result for an item; errors of the item are part of the result. callback: takes parts of the
        result. Raises EngineDeadError when the engine cannot go on. Cancelling the wait ends the work on the item."""

    def stop(self) -> None: ...


class EngineFactory(Protocol):
    """Loads the engines of a pool. It must be picklable, because it is sent to the actors."""

    @property
    def engine(self) -> EngineConfig:
        """Options of the whole pool: `parallel.replicas` is the number of engines."""

    def load(self, config: EngineConfig) -> LoadedEngine:
        """Load the engine of an actor, on a thread of its own. config: options of this engine alone.
        Raises ConfigError, CheckpointError, and with shards PlacementError."""

    def beginning(self, item: Any) -> Beginning:
        """Return how an item's prompt begins, for the choice among several engines. It must be quick."""


class EngineWorker:
    """Owns a model and the loop that runs it. A call of an actor costs both processes about a millisecond. So a message
    brings all items that came meanwhile, and one stream returns the outputs in the order in which they are ready."""

    _engine: LoadedEngine

    def __init__(self, factory: EngineFactory, config: EngineConfig) -> None:
        self._factory, self._config = factory, config
        self._ready: asyncio.Queue[ItemOutput] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def load(self, dtype: str | None = None) -> tuple[Any, str]:
        """Load the engine and return its info and data type. dtype: of the weights, instead of the option's; an engine
        that is loaded already is stopped first. Raises ConfigError, CheckpointError, and with shards PlacementError."""
        if dtype is not None:
            self._config = self._config.replace(dtype=dtype)
        if hasattr(self, "_engine"):
            await self.stop()
            del self._engine
        self._engine = await asyncio.to_thread(self._factory.load, self._config)
        keep_loaded()
        return self._engine.info, self._engine.client.info.config.dtype

    async def take(self, items: Sequence[tuple[int, bytes]]) -> None:
        """Begin to handle pickled items, each with a number that is unique among the items of the caller."""
        for number, item in items:
            if number != _TEXTS:
                self._tasks[number] = asyncio.create_task(self._handle(number, item))
            elif (engine := self._engine.client.engine) is not None:
                engine.remember(_restored(item, "a text"))

    async def cancel(self, number: int) -> None:
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def outputs(self) -> AsyncGenerator[list[ItemOutput], None]:
        """Yield the outputs of all items. Never ends; iterate it only once."""
        while True:
            ready = [await self._ready.get()]
            await asyncio.sleep(0.003)  # outputs that are ready within this time are sent together
            while not self._ready.empty():
                ready.append(self._ready.get_nowait())
            engine = self._engine.client.engine if num_engines(self._factory.engine) > 1 else None
            if engine is not None and (texts := engine.finished_texts(_MAX_TEXTS)):
                ready.append(_packed(_TEXTS, texts))
            yield ready

    async def _handle(self, number: int, item: bytes) -> None:
        loop = asyncio.get_running_loop()

        def callback(part: Any) -> None:
            loop.call_soon_threadsafe(self._ready.put_nowait, _packed(number, part, is_last=False))

        try:
            result = await self._engine.handle(_restored(item, "the item"), callback)
            self._ready.put_nowait(_packed(number, result))
        except Exception as error:  # noqa: BLE001 - the caller's to judge
            self._ready.put_nowait(_packed(number, error, is_error=True))
        finally:
            del self._tasks[number]

    async def stats(self) -> EngineStats:
        return copy.deepcopy(self._engine.client.stats)

    async def load_now(self) -> EngineLoad:
        return self._engine.client.load

    async def ping(self) -> None:
        """Wait until the engine has answered. Raises the error that has ended the engine."""
        await asyncio.wrap_future(self._engine.client.ping())

    async def answer(self) -> None:
        """Return at once. Raises EngineDeadError if the engine is stuck."""
        if (problem := self._engine.client.progress.problem()) is not None:
            raise EngineDeadError(f"the engine {problem}")

    async def place(self) -> Place:
        return Place.here()

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine.stop)


@dataclass(frozen=True, slots=True)
class ItemOutput:
    """New output of an item, pickled: a part of the result, or finally (`is_last`) the whole result or the error."""

    number: int
    value: bytes
    is_error: bool = False
    is_last: bool = True


def _packed(number: int, value: Any, *, is_error: bool = False, is_last: bool = True) -> ItemOutput:
    """Return the output with this value, or with an error if the value cannot be pickled and restored."""
    try:
        packed = _pickled(value, "the result")
        if is_error:  # its class may not take the arguments that it was pickled with
            pickle.loads(packed)  # noqa: S301 - our own bytes
    except Exception as error:  # noqa: BLE001 - its text is sent instead
        told = RayspecError(f"{type(value).__name__}: {value}") if is_error else error
        return ItemOutput(number, pickle.dumps(told), is_error=True)
    return ItemOutput(number, packed, is_error, is_last or is_error)


def _pickled(value: Any, name: str) -> bytes:
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return, no-untyped-call]
    except Exception as error:  # pickling runs the value's own code
        raise RequestError(f"{name} cannot be sent: {type(error).__name__}: {error}") from error


def _restored(value: bytes, name: str) -> Any:
    try:
        return cloudpickle.loads(value)
    except Exception as error:  # so does restoring it
        raise RequestError(f"{name} cannot be restored where it arrived: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class CommonDType:
    """The data type of all engines of a pool: that of the first that has loaded. With the option `auto`, each machine
    would choose for itself, and a text depends on the data type."""

    name: str | None = None


class RemoteEngine:
    """An EngineWorker in its actor, for coroutines of one event loop. Errors of Ray about the actor's end become
    EngineDeadError or NodeLostError. common: of the engines of the pool; None: the engine is alone. reserves_cpu: see
    `start_worker`."""

    def __init__(self, factory: EngineFactory, common: CommonDType | None = None, *, reserves_cpu: bool = True) -> None:
        self._common = common or CommonDType()
        self._config = config_of_one(factory.engine)
        self._actor = start_worker(factory, reserves_cpu=reserves_cpu)
        self._place: Place | None = None
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[asyncio.Future[Any], Callback | None]] = {}
        self._unsent: list[tuple[int, bytes]] = []
        self._texts: deque[bytes] = deque(maxlen=_MAX_MESSAGES)  # of other engines, unsent
        self.share: Callable[[bytes], None] = lambda texts: None  # takes finished texts for the other engines
        self._sending: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._end: Exception | None = None
        options = factory.engine.parallel
        self._start_timeout_s = options.start_timeout_s if options is not None else None

    async def load(self) -> Any:
        try:
            with saying_if_late("an engine has no process and waits for a place"):
                self._place = await asyncio.wait_for(answer(self._actor.place.remote()), self._start_timeout_s)
        except asyncio.TimeoutError:
            raise NoPlaceError(
                f"no place for an engine within {self._start_timeout_s:.0f} s: add nodes, or lower cpus_per_shard, "
                "gpus_per_shard or replicas"
            ) from None
        except RayActorError as error:
            raise self._death(error) from None
        info, dtype = await self._answer(self._actor.load.remote(self._common.name))
        self._common.name = self._common.name or dtype
        if dtype != self._common.name:  # an engine on another kind of machine has loaded meanwhile
            info, _ = await self._answer(self._actor.load.remote(self._common.name))
        return info

    async def handle(self, item: Any, callback: Callback | None = None) -> Any:
        """Return the result for an item. callback: takes the parts of the result. Cancelling the wait cancels the work.
        Raises the error of the engine's handler, EngineDeadError when the actor has ended, and RequestError if the item
        or the result cannot be sent."""
        loop = asyncio.get_running_loop()
        if self._end is not None:
            raise self._end
        if self._reader is None:
            self._reader = loop.create_task(self._read())
        packed = _pickled(item, "the item")
        number = next(self._numbers)
        result = loop.create_future()
        self._under_way[number] = result, callback
        if not self._unsent:
            sending = loop.create_task(self._send())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        self._unsent.append((number, packed))
        try:
            return await result
        except asyncio.CancelledError:
            loop.call_soon(partial(self._actor.cancel.remote, number))  # after the item itself
            raise
        finally:
            del self._under_way[number]

    def remember(self, texts: bytes) -> None:
        """Send another engine's texts with the next items. Of too many, the oldest are left out."""
        self._texts.append(texts)

    async def _send(self) -> None:
        items, self._unsent = [*((_TEXTS, one) for one in self._texts), *self._unsent], []
        self._texts.clear()
        try:
            await self._actor.take.remote(items)
        except RayActorError as error:
            self._fail(self._death(error))
        except RayError as error:
            kind = TransportError if isinstance(error, NO_ROOM) else RequestError
            for number, _ in items:
                self._settle(number, kind(f"the item cannot be sent to the engine: {error}"), is_error=True)

    async def _read(self) -> None:
        try:
            async for reference in self._actor.outputs.options(num_returns="streaming").remote():
                for output in await reference:
                    if output.number == _TEXTS:
                        self.share(output.value)
                        continue
                    try:
                        value, is_error = _restored(output.value, "the result"), output.is_error
                    except RequestError as error:
                        value, is_error = error, True
                    self._settle(output.number, value, is_error=is_error, is_last=output.is_last)
        except RayError as error:
            self._fail(self._death(error))

    def _settle(self, number: int, value: Any, *, is_error: bool = False, is_last: bool = True) -> None:
        result, callback = self._under_way.get(number, (None, None))
        if result is None or result.done():
            return
        if is_error:
            result.set_exception(value)
        elif is_last:
            result.set_result(value)
        elif callback is not None:
            callback(value)

    def _fail(self, error: Exception) -> None:
        self._end = self._end or error
        for number in self._under_way:
            self._settle(number, self._end, is_error=True)

    async def ask(self, method: WorkerMethod) -> Any:
        return await self._answer(getattr(self._actor, method).remote())

    async def answer(self) -> None:
        try:
            await answer_of(self._place, self.ask("answer"))
        except ProcessStoppedError as error:
            raise EngineDeadError(f"the engine cannot go on: {error}") from None

    def end(self) -> None:
        """Kill the actor. Unfinished and later items fail with EngineDeadError. May be called again."""
        if self._reader is not None:
            self._reader.cancel()
        self._fail(EngineDeadError("the engine was given up"))
        with suppress(RayError):
            ray.kill(self._actor)
            if self._config.parallel is not None:
                remove_orphaned_groups()

    async def _answer(self, reference: Awaitable[Any]) -> Any:
        try:
            return await answer(reference)
        except RayActorError as error:
            raise self._death(error) from None

    def _death(self, error: RayError) -> Exception:
        """Convert Ray's error about the actor's end: NodeLostError if no item can be to blame, else EngineDeadError."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, NO_ROOM):
            return NodeLostError(f"the engine's outputs cannot be sent: {first_line(cause)}")
        reason = str(error).splitlines()[0]
        if isinstance(error, ActorUnavailableError):
            return NodeLostError(f"the engine's process cannot be reached: {reason}")
        message = f"the engine's process has ended: {reason} Was it killed, or out of memory?"
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        is_node_lost = self._place is not None and self._place.node_id not in alive
        is_preempted = isinstance(error, RayActorError) and error.preempted
        return NodeLostError(message) if is_node_lost or is_preempted else EngineDeadError(message)


def start_worker(factory: EngineFactory, *, reserves_cpu: bool = True) -> Any:
    """Start an EngineWorker and return its actor handle. Ray does not restart it: its callers get the error.

    reserves_cpu: whether a single engine, which is one process, reserves a CPU, so that it waits for other jobs."""
    config = sized(config_of_one(factory.engine))
    num_sharing = engines_of_a_place(factory.engine)
    if num_sharing > 1:
        on_gpu = gpus_per_shard(factory.engine, factory.engine.parallel or ParallelOptions()) > 0
        usual = (on_gpu and config.gpu_memory_utilization) or KV_CACHE_SHARE["cuda" if on_gpu else "cpu"]
        config = config.replace(kv_cache_share=(config.kv_cache_share or usual) / num_sharing)
    whole, num_cpus = factory.engine, float(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    reserved: dict[str, Any] = {"num_cpus": 1.0, "num_gpus": int(wants_gpu(config))}
    if whole.parallel is not None and config.parallel is None:
        cpus = cpus_of_replica(whole.parallel.cpus_per_shard, whole, num_cpus)
        num_gpus, labels = gpus_per_shard(whole, whole.parallel), whole.parallel.labels or None
        reserved = {"num_cpus": cpus, "num_gpus": num_gpus, "label_selector": labels}
    elif config.parallel is not None or not reserves_cpu:
        # It would wait for its shards, or for rows: these wait for the CPUs that such workers hold.
        reserved |= reserving_nothing()
    options = reserved | {
        "max_concurrency": 64,
        "max_restarts": 0,
        "name": f"rayspec-engine-{secrets.token_hex(8)}",  # identifies the placement groups that this actor makes
    }
    return ray.remote(EngineWorker).options(**options).remote(factory, config)


def config_of_one(config: EngineConfig) -> EngineConfig:
    """Return the options of one engine of a pool. If each of several engines is one process, it runs in the worker."""
    options = config.parallel
    if options is None:
        return config
    if options.replicas > 1 and options.stages * options.tensor == 1:
        num_threads = config.num_threads or max(1, int(options.cpus_per_shard))
        return config.replace(parallel=None, num_threads=num_threads)
    return config.replace(parallel=options.replace(replicas=1))


def engines_of_a_place(config: EngineConfig) -> int:
    """Return the most engines of a pool that may share a node's memory, or a GPU's. Each measures the free memory when
    it has loaded, so it does not see what the others are going to take."""
    options = config.parallel
    if options is None or options.replicas == 1:
        return 1
    num_gpus = gpus_per_shard(config, options)
    if num_gpus > 0:
        return max(1, min(options.replicas, int(1 / num_gpus)))
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    by_node = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    reserved = cpus_of_replica(options.cpus_per_shard, config, sum(by_node))
    fitting = int(max(by_node, default=0.0) / reserved) if reserved else options.replicas
    return max(1, min(options.replicas, fitting))


def num_engines(config: EngineConfig) -> int:
    return config.parallel.replicas if config.parallel is not None else 1


def cpus_of_replica(wanted: float, config: EngineConfig, num_cpus: float) -> float:
    """Return the CPUs to reserve for each of several engines, in a cluster of `num_cpus`. It is less than `wanted` if
    otherwise no whole CPU would be left for Ray Data."""
    return round(min(wanted, max(0.0, num_cpus - 1) / num_engines(config)), 4)


@contextmanager
def saying_if_late(what: str) -> Iterator[None]:
    """Log what waits, and what of the cluster is free, if the block takes longer than PATIENCE_S."""

    def say() -> None:
        if not ray.is_initialized():  # the question would start Ray
            return
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        cpus, gpus = (f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        text = f"after {PATIENCE_S:g} s, {what} (free: {cpus}, {gpus}): `ray status` shows what is reserved"
        logger.warning(text)

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


async def answer(reference: Awaitable[Any]) -> Any:
    """Await a reference, with errors of the actor as they were raised."""
    with errors_of_actor():
        return await reference
