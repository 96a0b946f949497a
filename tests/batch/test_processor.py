"""The processor on a real Ray, with the bundled model."""

import gc
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data

from rayspec import LLM, SamplingParams, demo
from rayspec.batch.processor import _TYPES, ERROR_COLUMN, RowClient
from rayspec.config import ParallelOptions
from rayspec.data import Processor, ProcessorConfig, build_processor
from rayspec.pool import worker
from rayspec.types import ConfigError
from tests.batch.deadly_task import PARAMS, DeadlyTask, postprocess, preprocess
from tests.waiting import all_cpus, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 512,
    "speculation": {"strategy": "ar"},
}


def built(*, engine: Mapping[str, Any] | None = None, **options: Any) -> Processor:
    config = ProcessorConfig(model_source="demo", engine_kwargs=ENGINE | dict(engine or {}), **options)
    processor = build_processor(config, preprocess=preprocess, postprocess=postprocess)
    processor._task = DeadlyTask(task=processor._task)  # type: ignore[arg-type]
    return processor


def texts(num_rows: int, kills: Mapping[int, str] | None = None) -> ray.data.Dataset:
    items = [{"id": str(n), "text": f"Pump {n} failed.", "kills": (kills or {}).get(n)} for n in range(num_rows)]
    return ray.data.from_items(items)


def by_id(dataset: ray.data.Dataset) -> dict[str, dict[str, Any]]:
    """The rows of a dataset, none of which may come twice."""
    rows = dataset.take_all()
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def num_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


def wait_until_all_is_free() -> None:
    def is_free() -> bool:
        engines = [name for name in ray.util.list_named_actors() if name.startswith("rayspec-engine-")]
        return num_groups() == 0 and not engines

    wait_until(is_free)


@pytest.fixture(scope="module")
def processor(ray_cluster: None) -> Iterator[Processor]:
    with built(batch_size=4) as processor:
        yield processor


def test_rows_are_completed_as_by_an_llm_and_a_bad_row_is_one_bad_row(processor: Processor) -> None:
    samples = demo.sample_documents(10, num_sentences=6)
    bad = [{"id": text, "text": text} for text in ("fails", "bare", "wrong", "word " * 3000)]
    dataset = ray.data.from_items([{"id": one.id, "text": one.text} for one in samples] + bad)
    completed = processor(dataset)
    assert completed.context.execution_no_progress_timeout_s == -1
    assert dataset.context.execution_no_progress_timeout_s > 0
    rows = by_id(completed)
    assert len(rows) == 14
    with LLM("demo", **ENGINE) as llm:
        chats = [[{"role": "user", "content": one.text}] for one in samples]
        expected = llm.chat(chats, SamplingParams(**PARAMS))
    for one, output in zip(samples, expected, strict=True):
        row = rows[one.id]
        assert (row["summary"], row[ERROR_COLUMN]) == (output.outputs[0].text, "")
        assert (row["num_tokens"], row["prompt_tokens"]) == (6, len(output.prompt_token_ids))
        assert row["latency_s"] > 0
    assert "KeyError" in rows["fails"][ERROR_COLUMN]
    assert "none of 'messages'" in rows["bare"][ERROR_COLUMN]
    assert "did you mean 'temperature'" in rows["wrong"][ERROR_COLUMN]
    assert rows["word " * 3000][ERROR_COLUMN].startswith("prompt_too_long")


def test_files_of_failed_rows_and_others_can_be_read_together(processor: Processor, tmp_path: Path) -> None:
    plain = build_processor(ProcessorConfig(model_source="demo", engine_kwargs=ENGINE, batch_size=1), preprocess)
    plain._supervisor = processor._supervisor
    names = ["bare", "The pump failed.", "wrong"]
    for number, name in enumerate(names):
        plain(ray.data.from_items([{"id": name, "text": name}])).write_parquet(tmp_path / str(number))
    tables = [pq.read_table(tmp_path / str(number)) for number in range(len(names))]
    for table in tables:
        assert table.select(list(_TYPES)).schema.remove_metadata() == pa.schema(_TYPES)
    assert [bool(table[ERROR_COLUMN][0].as_py()) for table in tables] == [True, False, True]


def test_columns_of_the_user_are_not_replaced_but_those_of_an_earlier_processor_are(processor: Processor) -> None:
    mine = ray.data.from_items([{"id": "1", "text": "Pump 1 failed.", "request_id": "7"}])
    refused = r"rename_columns\(\{'request_id': 'my_request_id'\}\)"
    with pytest.raises(ConfigError, match=refused):
        processor(mine)
    with pytest.raises(Exception, match=refused):
        processor(mine.map(lambda row: row)).take_all()
    (row,) = by_id(processor(mine.add_column(ERROR_COLUMN, lambda batch: [""] * len(batch)))).values()
    assert (row["summary"] != "", row[ERROR_COLUMN]) == (True, "")


def test_engines_of_datasets_hold_no_cpu_that_their_tasks_wait_for_and_say_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many processors as CPUs waited for each other for ever, without a word."""
    monkeypatch.setattr(worker, "PATIENCE_S", 0.2)
    with built() as another:
        with all_cpus():
            completed = another(texts(2))
            client = RowClient(another._supervisor, None, None, should_continue=True)
            late = "no row has come to the engine: tasks before it take long, or wait for a free CPU (free: 0 CPU"
            wait_until(lambda: late in caplog.text, 60.0)
            del client
        assert len(by_id(completed)) == 2


@pytest.mark.exhaustive
def test_a_killed_engine_is_replaced_and_every_row_comes_once(processor: Processor, tmp_path: Path) -> None:
    disturbed = by_id(processor(texts(40, {20: str(tmp_path / "first"), 30: str(tmp_path / "second")})))
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
    assert [row[ERROR_COLUMN] for row in disturbed.values()] == [""] * 40
    undisturbed = by_id(processor(texts(40)))
    assert {name: row["summary"] for name, row in disturbed.items()} == {
        name: row["summary"] for name, row in undisturbed.items()
    }


@pytest.mark.exhaustive
def test_a_row_that_kills_engines_becomes_an_error_row(processor: Processor) -> None:
    rows = by_id(processor(texts(20, {7: "always"})))
    errors = {name: row[ERROR_COLUMN] for name, row in rows.items() if row[ERROR_COLUMN]}
    assert list(errors) == ["7"]
    assert errors["7"].startswith("engine_killed: engines died of this row")
    assert len(rows) == 20
    strict = built(should_continue_on_error=False)
    strict._supervisor = processor._supervisor
    with pytest.raises(Exception, match="engines died of this row"):
        strict(texts(20, {7: "always"})).take_all()
    assert len(by_id(processor(texts(5)))) == 5


@pytest.mark.exhaustive
def test_without_restarts_a_death_fails_the_dataset_and_shutdown_is_quiet() -> None:
    with pytest.raises(Exception, match="max_engine_restarts is 0"), built(max_engine_restarts=0) as processor:
        processor(texts(5, {2: "always"})).take_all()
    processor.shutdown()


@pytest.mark.exhaustive
def test_a_pipeline_whose_engine_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    parallel = {"stages": 2, "cpus_per_shard": 0.25, "heartbeat_timeout_s": 60.0}
    with built(engine={"parallel": parallel}) as processor:
        rows = by_id(processor(texts(30, {10: str(tmp_path / "once")})))
        assert [row[ERROR_COLUMN] for row in rows.values()] == [""] * 30
        assert num_groups() == 1
    assert num_groups() == 0


@pytest.mark.exhaustive
def test_first_calls_of_two_threads_start_one_engine(processor: Processor) -> None:
    processor.shutdown()
    wait_until_all_is_free()
    copied = pickle.loads(pickle.dumps(processor))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: by_id(copied(texts(5))), range(2)))
    assert [len(rows) for rows in found] == [5, 5]
    assert sum(name.startswith("rayspec-engine-") for name in ray.util.list_named_actors()) == 1
    copied.shutdown()
    wait_until_all_is_free()


@pytest.mark.exhaustive
def test_shutdown_in_mid_dataset_fails_the_dataset_and_the_next_one_works(processor: Processor) -> None:
    rows = iter(processor(texts(400)).iter_rows())
    next(rows)
    processor.shutdown()
    with pytest.raises(Exception, match="shut down"):
        list(rows)
    assert len(by_id(processor(texts(5)))) == 5


@pytest.mark.exhaustive
def test_a_processor_that_is_forgotten_ends_its_engine_once_its_datasets_are_forgotten(processor: Processor) -> None:
    processor.shutdown()
    wait_until_all_is_free()
    forgotten = built()
    dataset = forgotten(texts(100))
    del forgotten
    gc.collect()
    rows = iter(dataset.iter_rows())
    next(rows)
    del rows, dataset
    gc.collect()
    wait_until_all_is_free()


def test_engines_are_kept_busy_unless_the_user_says_otherwise() -> None:
    def num_batches(**options: Any) -> int:
        return ProcessorConfig(model_source="demo", **options).num_concurrent_batches

    assert num_batches() == 8
    assert num_batches(engine_kwargs={"max_num_seqs": 256}) == 114
    assert num_batches(engine_kwargs={"max_num_seqs": 256}, concurrency=3) == 342
    assert num_batches(engine_kwargs={"parallel": {"replicas": 2}, "max_num_seqs": 9}, batch_size=5) == 12
    assert num_batches(engine_kwargs={"max_num_seqs": 256}, batch_size=1000) == 61  # Ray Data runs 16 rows of a block
    assert num_batches(engine_kwargs={"max_num_seqs": 256}, max_concurrent_batches=3) == 3


def test_a_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown option 'batchsize'; did you mean 'batch_size'"):
        ProcessorConfig(model_source="demo", batchsize=3)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        build_processor(ProcessorConfig(model_source="demo", engine_kwargs={"max_num_seq": 3}))


def test_concurrency_is_replicas() -> None:
    config = ProcessorConfig(model_source="demo", concurrency=3, engine_kwargs={"parallel": {"stages": 2}})
    assert config.engine.parallel is not None
    assert (config.engine.parallel.replicas, config.engine.parallel.stages) == (3, 2)
    assert ProcessorConfig(model_source="demo", concurrency=(1, 3)).engine.parallel == ParallelOptions(replicas=3)
    for wrong in (0, (3, 1), (0, 2)):
        with pytest.raises(ConfigError, match=r"option 'concurrency' is .*: give 1 or more engines, or .least, most."):
            ProcessorConfig(model_source="demo", concurrency=wrong)
    with pytest.raises(ConfigError, match="name it as model_source"):
        ProcessorConfig(model_source="demo", engine_kwargs={"model": "demo-plain"})
