"""An engine behind an actor, with the bundled model, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import ray
from ray.exceptions import ActorUnavailableError, OutOfDiskError, RayTaskError

from rayspec import SamplingParams
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.documents import input_row
from rayspec.batch.rows import RowEngineFactory
from rayspec.command.settings import make_settings
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.stages import Progress
from rayspec.pool import stopped, worker
from rayspec.pool.worker import (
    CommonDType,
    EngineWorker,
    NodeLostError,
    RemoteEngine,
    config_of_one,
    cpus_of_replica,
    engines_of_a_place,
)
from rayspec.types import ConfigError, RayspecError, RequestError, TransportError
from tests.pool.scripted_engine import Brittle, Scripted, Unlike
from tests.waiting import all_cpus, freeze

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def task(**options: Any) -> DocumentTask:
    common = {"model": "demo", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 512}
    settings = make_settings(flags=common | options, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    return DocumentTask(settings=settings, template="{text}")


def process_of(engine: RemoteEngine) -> int:
    assert engine._place is not None
    return engine._place.process_id


def test_items_travel_together_and_each_has_its_own_result_error_and_end() -> None:
    """Items and results that cannot be pickled, or cannot be restored on the other side, among others that can."""

    async def run() -> None:
        engine = RemoteEngine(Scripted(EngineConfig(model="demo")))
        await engine.load()
        num_sent, send = 0, engine._send

        async def counted() -> None:
            nonlocal num_sent
            num_sent += 1
            await send()

        engine._send = counted  # type: ignore[method-assign]
        results = await asyncio.gather(*(engine.handle(f"item {number}") for number in range(500)))
        assert results == [f"done item {number}" for number in range(500)]
        assert num_sent == 1
        parts: list[int] = []
        told, ours, foreign = await asyncio.gather(
            engine.handle("tell 20", parts.append),
            engine.handle("fail ours"),
            engine.handle("fail foreign"),
            return_exceptions=True,
        )
        assert (told, parts) == ("done tell 20", list(range(20)))
        assert (type(ours), str(ours)) == (ConfigError, "option 'a' is 1")
        assert (type(foreign), str(foreign)) == (RayspecError, "UnloadableError: 1 and 2")

        items = [threading.Lock(), Brittle("there"), "return lock", "return brittle", "tell lock", "well"]
        *errors, well = await asyncio.gather(*map(engine.handle, items), return_exceptions=True)
        assert well == "done well"
        assert [type(error) for error in errors] == [RequestError] * 5
        for error, what in zip(errors, ["the item", "the item", *["the result"] * 3], strict=True):
            assert str(error).startswith(f"{what} cannot be ")

        sleeping = asyncio.create_task(engine.handle("sleep"))
        await engine.handle("other")
        sleeping.cancel()
        while not await engine.handle("cancelled"):
            await asyncio.sleep(0.01)

        waiting = [engine.handle(item) for item in ("sleep", "sleep", "die")]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
        with pytest.raises(EngineDeadError, match="has ended"):
            await engine.handle("late")
        engine.end()

    asyncio.run(run())


def test_without_room_in_rays_store_no_item_is_to_blame() -> None:
    """Its disk is full too: it may have room later, so rows have no error of their own."""
    full = OutOfDiskError("Local disk is full")

    async def run() -> None:
        engine = RemoteEngine(Scripted(EngineConfig(model="demo")))
        await engine.load()
        engine._actor, actor = SimpleNamespace(take=Mock(remote=AsyncMock(side_effect=full))), engine._actor
        engine._reader = asyncio.create_task(asyncio.sleep(60))
        with pytest.raises(TransportError, match="the item cannot be sent to the engine: Local disk is full"):
            await engine.handle("large")
        engine._actor = actor
        engine._fail(engine._death(RayTaskError("outputs", "", full).as_instanceof_cause()))
        with pytest.raises(NodeLostError, match="the engine's outputs cannot be sent: Local disk is full"):
            await engine.handle("other")
        engine.end()

    asyncio.run(run())


def test_items_that_do_not_reach_an_engine_do_not_wait_for_ever_and_none_is_to_blame() -> None:
    """Where the network fails for a moment, the stream of outputs may go on."""
    lost = ActorUnavailableError("the connection failed", None)

    async def run() -> None:
        engine = RemoteEngine(Scripted(EngineConfig(model="demo")))
        await engine.load()
        engine._actor, actor = SimpleNamespace(take=Mock(remote=AsyncMock(side_effect=lost))), engine._actor
        engine._reader = asyncio.create_task(asyncio.sleep(60))
        with pytest.raises(NodeLostError, match=r"cannot be reached: .*the connection failed"):
            await asyncio.wait_for(engine.handle("item"), 10)
        engine._actor = actor
        engine.end()

    asyncio.run(run())


def test_a_stopped_process_is_a_dead_engine_and_a_silent_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = RemoteEngine(Scripted(EngineConfig(model="demo")))
        try:
            await engine.load()
            process_id = process_of(engine)
            freeze(process_id)
            with pytest.raises(EngineDeadError, match=r"its process is stopped \(SIGSTOP\)"):
                await engine.answer()
            os.kill(process_id, signal.SIGCONT)
            await engine.answer()
        finally:
            engine.end()

    monkeypatch.setattr(stopped, "_DOUBT_AFTER_S", 0.5)
    asyncio.run(run())


def test_a_node_is_asked_about_processes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    here = stopped.Place.here()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        place = stopped.Place(node_id=here.node_id, process_id=process.pid)
        monkeypatch.setattr(stopped.Place, "here", lambda: stopped.Place(node_id="another", process_id=1))
        assert not asyncio.run(stopped.is_stopped(place))
        freeze(process.pid)
        assert asyncio.run(stopped.is_stopped(place))
        process.kill()
    assert not asyncio.run(stopped.is_stopped(place))
    assert not asyncio.run(stopped.is_stopped(stopped.Place(node_id="ab" * 28, process_id=1))), "no such node"


def test_an_engine_whose_pass_never_ends_says_so_while_its_process_answers() -> None:
    async def run() -> None:
        worker = EngineWorker(factory, factory.engine)
        await worker.load()
        stages = worker._engine.client.engine.stages
        stages.progress = Progress(clock=lambda: 60 * time.monotonic())
        await worker._engine.handle(document, lambda _: None)
        await worker.answer()
        going_on, run_pass = threading.Event(), stages._run
        stages._run = lambda work: going_on.wait() and run_pass(work)
        rows = asyncio.ensure_future(worker._engine.handle(document, lambda _: None))
        with pytest.raises(EngineDeadError, match=r"has not finished a pass for \d+ s, and .* expected to take"):
            while True:
                await asyncio.sleep(0.02)
                await worker.answer()
        going_on.set()
        assert (await rows).error_kind is None
        await worker.answer()
        await worker.stop()

    factory, document = RowEngineFactory(task(strategy="ar")), input_row("a", source="a", text="A text.")
    asyncio.run(run())


def test_engines_of_a_pool_have_the_data_type_of_the_first(tmp_path: Path) -> None:
    """Also where another has loaded meanwhile, and in place of one that has died."""

    def num_choices() -> int:
        path = tmp_path / "loads"
        return path.stat().st_size if path.exists() else 0

    async def dtypes() -> list[str]:
        factory = Unlike(EngineConfig(model="demo", dtype="auto"), notes=tmp_path)
        common, meanwhile = CommonDType(), CommonDType()
        engines = [RemoteEngine(factory, common)]
        try:
            info = [await engines[0].load()]
            engines += [RemoteEngine(factory, meanwhile), RemoteEngine(factory, common)]
            loading = [asyncio.create_task(engine.load()) for engine in engines[1:]]
            while num_choices() < 2:
                await asyncio.sleep(0.01)
            meanwhile.name = common.name  # as if the first were of its pool, and had loaded now
            return [one.dtype for one in (*info, *await asyncio.gather(*loading))]
        finally:
            for engine in engines:
                engine.end()

    assert asyncio.run(dtypes()) == ["bfloat16"] * 3
    assert num_choices() == 2, "the third did not choose"


def test_an_engine_waits_for_a_cpu_and_says_so_and_one_with_shards_needs_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The owners of the shards of several jobs held the CPUs that their shards waited for."""
    monkeypatch.setattr(worker, "PATIENCE_S", 0.5)

    async def run() -> None:
        with all_cpus():
            whole = RemoteEngine(Scripted(EngineConfig(model="demo")))
            loading = asyncio.create_task(whole.load())
            options = ParallelOptions(stages=2, start_timeout_s=60)
            cut = RemoteEngine(Scripted(EngineConfig(model="demo", parallel=options)))
            await cut.load()
            assert not loading.done()
        await loading
        whole.end()
        cut.end()

    asyncio.run(run())
    assert "waits for a place (free: 0 CPU" in caplog.text


def test_engines_on_cpus_leave_ray_data_a_cpu() -> None:
    four = EngineConfig(model="demo", parallel=ParallelOptions(replicas=4))
    assert [cpus_of_replica(2.0, four, num_cpus) for num_cpus in (1, 2, 4, 8, 9, 64)] == [0, 0.25, 0.75, 1.75, 2, 2]


def test_of_several_replicas_each_has_an_engine_of_its_own() -> None:
    def of_one(**parallel: Any) -> EngineConfig:
        return config_of_one(EngineConfig(model="demo", parallel=ParallelOptions(**parallel)))

    assert config_of_one(EngineConfig(model="demo")).parallel is None
    assert of_one(stages=1).parallel == ParallelOptions(stages=1), "a shard, as was asked for"
    whole = of_one(replicas=4, cpus_per_shard=3.0)
    assert (whole.parallel, whole.num_threads) == (None, 3)
    cut = of_one(replicas=4, stages=2, tensor=2)
    assert cut.parallel == ParallelOptions(replicas=1, stages=2, tensor=2)


def test_replicas_that_may_be_on_a_node_share_its_memory() -> None:
    num_cpus = ray.cluster_resources()["CPU"]

    def of(**parallel: Any) -> int:
        return engines_of_a_place(EngineConfig(model="demo", device="cpu", parallel=ParallelOptions(**parallel)))

    assert engines_of_a_place(EngineConfig(model="demo")) == of(stages=2) == 1
    assert of(replicas=3, cpus_per_shard=0.25) == 3
    assert of(replicas=2, cpus_per_shard=2 * num_cpus) == 2, "so much is not reserved, or nothing would be left to read"
    two = EngineConfig(model="demo", device="cpu", parallel=ParallelOptions(replicas=2))
    engine = RemoteEngine(Unlike(two.replace(dtype="float32")))
    try:
        assert asyncio.run(engine.load()).kv_cache_share == 0.125
    finally:
        engine.end()
