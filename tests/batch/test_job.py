"""The driver of a job on a real Ray: what dies in mid-run, what is told to end, and what a next run makes of it.

A driver that is killed is in tests/jobs/test_summarize.py.

The engine is the bundled model; a task around it notes which rows were begun and ended, and does harm at a chosen one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from rayspec import LLM, demo
from rayspec.batch.documents import input_row
from rayspec.batch.job import Job, JobOptions, Source
from rayspec.batch.ray_backend import RayBackend
from rayspec.batch.rows import Row
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import CheckpointError
from tests.batch.noted_task import NotedTask, kill_engine, noted, terminate
from tests.batch.test_documents import write_lines
from tests.batch.test_run_folder import manifest_of

NUM_ROWS = 60

pytestmark = [pytest.mark.ray, pytest.mark.slow]
on_ray = pytest.mark.usefixtures("ray_cluster")
exhaustive = pytest.mark.exhaustive


def documents(num_rows: int = NUM_ROWS) -> list[Row]:
    samples = demo.sample_documents(num_rows, num_sentences=4)
    return [input_row(sample.id, source=sample.id, text=sample.text) for sample in samples]


def job(task: NotedTask, output: Path | str, **options: Any) -> Job:
    return Job(
        backend=RayBackend(),
        task=task,
        output=str(output),
        name="summaries",
        text_column="summary",
        options=JobOptions(**options),
    )


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The merged file, which has each id once."""
    rows = pq.read_table(folder / "summaries.parquet").to_pylist()
    assert max(Counter(row["id"] for row in rows).values()) == 1
    return {row["id"]: row for row in rows}


def texts_of(folder: Path) -> dict[str, str]:
    return {row_id: row["summary"] for row_id, row in rows_of(folder).items()}


def parts_of(folder: Path) -> list[list[str]]:
    """Ids of the committed rows, part by part."""
    return [pq.read_table(path)["id"].to_pylist() for path in sorted((folder / "rows").glob("part-*.parquet"))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The texts of an engine that nothing happens to."""
    settings = noted(tmp_path_factory.mktemp("undisturbed")).settings
    chats = [[{"role": "user", "content": document.document or ""}] for document in documents()]
    with LLM(**settings.engine.model_dump()) as llm:
        outputs = llm.chat(chats, settings.sampling)
    return {document.id: output.outputs[0].text for document, output in zip(documents(), outputs, strict=True)}


@on_ray
@exhaustive
def test_only_the_row_that_the_engine_dies_of_fails(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    deadly = documents()[30].id
    task = noted(tmp_path, deadly=frozenset({deadly}))
    report = job(task, tmp_path / "out").run(Source(rows=documents()))
    assert (report.num_rows, dict(report.errors), report.exit_code()) == (NUM_ROWS, {"engine_killed": 1}, 3)
    rows = rows_of(tmp_path / "out")
    assert "engines died of this row, also where it was the only row" in rows[deadly]["error"]
    assert rows[deadly]["source"] == deadly
    assert texts_of(tmp_path / "out") == undisturbed | {deadly: None}
    assert manifest_of(tmp_path / "out")["status"] == "complete"
    assert task.read("begun").count(deadly) >= 2  # the first engine may have had it alone

    before = len(task.read("begun"))
    again = job(task, tmp_path / "out").run(Source(rows=documents()))
    assert (again.num_earlier, again.exit_code(), len(task.read("begun"))) == (NUM_ROWS, 3, before)


@exhaustive
def test_a_node_is_lost_with_its_engine(tmp_path: Path, undisturbed: dict[str, str], ray_environment: None) -> None:
    script = Path(__file__).parent / "job_node_loss.py"
    process = subprocess.run(
        [sys.executable, "-m", f"tests.batch.{script.stem}", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=script.parent.parent.parent,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    lost, took_over = noted(tmp_path).read("nodes")
    assert lost != took_over
    assert texts_of(tmp_path / "out") == undisturbed
    assert manifest_of(tmp_path / "out")["status"] == "complete"


@exhaustive
@on_ray
def test_an_engine_that_cannot_be_loaded_is_our_own_error_and_holds_nothing(tmp_path: Path) -> None:
    task = noted(tmp_path, model="no/such-model")
    with pytest.raises(CheckpointError, match="no/such-model") as kept:
        job(task, tmp_path / "out").run(Source(rows=documents(3)))
    assert kept.value  # with its traceback, in which the run is
    wanted = ray.cluster_resources()["CPU"]
    deadline = time.monotonic() + 10
    while (free := ray.available_resources().get("CPU", 0)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert free == wanted
    assert manifest_of(tmp_path / "out")["status"] == "interrupted"


@exhaustive
@pytest.mark.usefixtures("ray_environment")
@pytest.mark.parametrize("num_cpus", [1, 2])
def test_a_cluster_of_few_cpus_is_enough(tmp_path: Path, num_cpus: int) -> None:
    """Nothing may wait for a CPU that something else of the same job holds."""
    lines = ({"id": document.id, "text": document.document} for document in documents(40))
    write_lines(tmp_path / "a.jsonl", *lines)
    code = (
        f"import ray; ray.init(address='local', num_cpus={num_cpus}, include_dashboard=False)\n"
        "from pathlib import Path; from rayspec.batch.input_files import find_files\n"
        "from tests.batch.test_job import job, noted, Source\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "report = job(noted(folder), folder / 'out').run(Source(files=find_files([str(folder / 'a.jsonl')]).files))\n"
        "raise SystemExit(report.exit_code())"
    )
    root = Path(__file__).parent.parent.parent
    process = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=root, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert len(rows_of(tmp_path / "out")) == 40


@exhaustive
@on_ray
def test_an_engine_that_dies_again_and_again_ends_the_job_which_keeps_its_rows(tmp_path: Path) -> None:
    task = noted(tmp_path, kill_engine, after=40, once=False)
    with pytest.raises(EngineDeadError, match="the engine's process has ended"):
        job(task, tmp_path / "out", max_engine_restarts=0).run(Source(rows=documents()))
    committed = [row_id for part in parts_of(tmp_path / "out") for row_id in part]
    assert 0 < len(committed) < 40
    assert set(committed) <= set(task.read("ended"))
    assert manifest_of(tmp_path / "out")["status"] == "interrupted"


@exhaustive
@on_ray
def test_sigterm_finishes_the_rows_under_way_and_a_run_the_rest(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    task = noted(tmp_path, partial(terminate, os.getpid()), after=30)
    with pytest.raises(SystemExit) as exit_:
        job(task, tmp_path / "out", drain_s=30).run(Source(rows=documents()))
    assert exit_.value.code == 143
    committed = [row_id for part in parts_of(tmp_path / "out") for row_id in part]
    assert sorted(committed) == sorted(task.read("begun")) == sorted(task.read("ended"))
    assert 30 <= len(committed) < NUM_ROWS
    assert manifest_of(tmp_path / "out")["status"] == "interrupted"

    report = job(task, tmp_path / "out").run(Source(rows=documents()))
    assert (report.num_rows, report.num_earlier) == (NUM_ROWS, len(committed))
    assert sorted(task.read("begun")) == sorted(undisturbed)
    assert texts_of(tmp_path / "out") == undisturbed
    assert manifest_of(tmp_path / "out")["status"] == "complete"


@on_ray
def test_sigterm_while_the_engine_is_loading_ends_the_job_at_once(tmp_path: Path) -> None:
    def terminate_when_it_loads() -> None:
        while not any(one["name"].startswith("rayspec-engine-") for one in ray.util.list_named_actors(True)):
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # a signal to a process comes to any thread

    task = noted(tmp_path, load_s=30)
    thread = threading.Thread(target=terminate_when_it_loads)
    thread.start()
    with pytest.raises(SystemExit) as exit_:
        job(task, tmp_path / "out", drain_s=60).run(Source(rows=documents()))
    thread.join()
    assert exit_.value.code == 143
    assert task.read("begun") == []
    assert manifest_of(tmp_path / "out")["status"] == "interrupted"


@exhaustive
@on_ray
def test_rows_under_way_longer_than_the_grace_period_are_given_up(tmp_path: Path) -> None:
    task = noted(tmp_path, partial(terminate, os.getpid()), after=30)
    with pytest.raises(SystemExit) as exit_:
        job(task, tmp_path / "out", drain_s=0).run(Source(rows=documents()))
    assert exit_.value.code == 143
    assert sum(map(len, parts_of(tmp_path / "out"))) < len(task.read("begun"))
