"""An engine behind an actor, with the bundled model, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rayspec import LLM, SamplingParams, demo
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.documents import input_row
from rayspec.batch.engine_actor import EngineWorker, call, cpus_to_reserve, death_of_process, start_engine
from rayspec.command.settings import make_settings
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import CheckpointError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def task(**options: Any) -> DocumentTask:
    common = {"model": "demo", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 512}
    settings = make_settings(flags=common | options, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    return DocumentTask(settings=settings, template="{text}")


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Any:
    """Loaded; the last test kills it."""
    worker = start_engine(task(strategy="ar"))
    config = call(worker.load.remote())
    assert (config["model"], config["num_threads"], config["sampling"]["max_tokens"]) == ("demo", 1, 8)
    return worker


def test_documents_of_many_callers_are_completed_as_by_an_llm(engine: Any) -> None:
    samples = demo.sample_documents(5, num_sentences=8)
    documents = [input_row(sample.id, source=sample.id, text=sample.text) for sample in samples]
    long = input_row("long", source="long", text="word " * 2000)
    rows = ray.get([engine.handle.remote(document) for document in (*documents, long, documents[0])])
    with LLM(**task(strategy="ar").settings.engine.model_dump()) as llm:
        chats = [[{"role": "user", "content": sample.text}] for sample in samples]
        expected = [output.outputs[0].text for output in llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=8))]
    assert [row.text for row in rows[:5]] == expected
    assert [row.error_kind for row in rows[5:]] == ["prompt_too_long", None]
    assert rows[6].text == expected[0]
    assert call(engine.stats.remote()).num_generated_tokens == sum(row.num_output_tokens for row in rows)


def test_a_model_that_cannot_be_loaded_is_our_own_error() -> None:
    async def load_and_ask() -> None:
        worker = EngineWorker(task(model="no/such-model"))
        with pytest.raises(CheckpointError, match="no/such-model"):
            await worker.load()
        assert await worker.death() is None  # nothing is there that could have died
        with pytest.raises(EngineDeadError, match="could not be loaded"):
            await worker.handle(input_row("any", source="s", text="word"))

    asyncio.run(load_and_ask())


@pytest.mark.exhaustive
def test_it_is_where_the_engine_is_in_another_process() -> None:
    worker = start_engine(task(model="no/such-model"))
    with pytest.raises(CheckpointError, match="no/such-model"):
        call(worker.load.remote())
    assert call(worker.death.remote()) is None  # its process is there, and nothing that could have died
    with pytest.raises(EngineDeadError, match="could not be loaded"):
        call(worker.handle.remote(input_row("any", source="s", text="word")))


@pytest.mark.exhaustive
def test_rows_that_come_while_the_engine_is_loading_wait_for_it() -> None:
    worker = start_engine(task(strategy="ar"))
    early = worker.handle.remote(input_row("early", source="s", text="The annual review."))
    loading = worker.load.remote()
    assert call(early).error_kind is None
    assert call(loading)["model"] == "demo"


def test_an_engine_leaves_ray_data_a_cpu() -> None:
    """With its tasks that read: a whole one, and half of one."""
    assert [cpus_to_reserve(num_cpus) for num_cpus in (0, 1, 2, 3, 64)] == [0, 0, 0, 1, 1]


def test_a_stopped_engine_says_so_and_a_killed_one_too(engine: Any) -> None:
    assert call(engine.death.remote()) is None
    call(engine.stop.remote())
    assert "it was stopped" in str(call(engine.death.remote()))
    with pytest.raises(EngineDeadError, match="it was stopped"):
        call(engine.handle.remote(input_row("late", source="late", text="word")))
    os.kill(call(engine.process_id.remote()), signal.SIGKILL)
    with pytest.raises(RayActorError) as killed:
        call(engine.death.remote())
    assert "the engine's process has ended" in str(death_of_process(killed.value))
