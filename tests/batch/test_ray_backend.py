"""How jobs read their rows: on a real Ray, and in this process."""

import gzip
import json
import os
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import OutOfDiskError

from rayspec.batch import documents, ray_backend
from rayspec.batch.documents import input_row
from rayspec.batch.input_files import find_files
from rayspec.batch.job import LocalBackend, Order, Source, in_sample
from rayspec.batch.ray_backend import (
    _READER_THREADS,
    RayBackend,
    ReadingError,
    errors_of_reading,
    reader_threads,
    reading,
    rows_of,
)
from rayspec.batch.rows import Row
from rayspec.pool import worker
from rayspec.ray_session import refuse_client
from rayspec.types import ConfigError
from tests.waiting import all_cpus, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def read(backend: LocalBackend, source: Source, *indices: int, order: Order = "input") -> Generator[Row]:
    """The rows of a scan with these indices, or all."""
    rows = backend.scan(source).rows
    return backend.rows(source, rows.take(pa.array(indices)) if indices else rows, order)


def source_of(folder: Path, *, limit: int | None = None, sample: float | None = None) -> Source:
    return Source(files=find_files([str(folder)]).files, limit=limit, sample=sample)


both = pytest.mark.parametrize("backend", [RayBackend(), LocalBackend()], ids=["Ray", "in process"])


@both
def test_only_wanted_rows_are_read_from_files_of_all_types(tmp_path: Path, backend: LocalBackend) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        write_rows(tmp_path / name, [{"id": f"{name}{n}", "text": f"text {n}"} for n in range(1, 41)])
    (tmp_path / "d.txt").write_text("a text", encoding="utf-8")
    found = sorted(read(backend, source_of(tmp_path), 2, 56, 119, 120), key=lambda row: row.id)
    assert [(row.id, row.source, row.document) for row in found] == [
        ("a.jsonl3", "a.jsonl:3", "text 3"),
        ("b.jsonl.gz17", "b.jsonl.gz:17", "text 17"),
        ("c.parquet40", "c.parquet:40", "text 40"),
        ("d.txt", "d.txt", "a text"),
    ]
    given = Source(rows=[input_row(str(n), source=f"s{n}", text="t") for n in range(100)])
    assert sorted(row.source or "" for row in read(backend, given, 1, 64, 99)) == ["s1", "s64", "s99"]


@both
def test_a_scan_is_in_order_and_without_texts_and_has_a_limit(tmp_path: Path, backend: LocalBackend) -> None:
    for name in "abc":
        lines = [json.dumps({"id": f"{name}{number}", "text": "t"}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "no json"]), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    scan = backend.scan(source_of(tmp_path))
    assert scan.rows["id"].to_pylist() == [f"{name}{n}" for name in "abc" for n in range(50)]
    assert [row.id for row in scan.errors] == ["a.jsonl:51", "b.jsonl:51", "c.jsonl:51", "d.txt"]
    assert scan.errors[0].error_kind == "malformed_row"
    assert scan.row(51) == input_row("b1", source="b.jsonl:2", text="t").without_input()

    some = backend.scan(source_of(tmp_path, limit=53, sample=0.5))  # a share of the first rows
    first = [*(f"a{n}" for n in range(50)), "b0", "b1"]  # and an error
    assert some.rows["id"].to_pylist() == [row_id for row_id in first if in_sample(row_id, 0.5)]
    assert len(some.errors) == int(in_sample("a.jsonl:51", 0.5))


def test_limited_scans_that_end_with_their_tasks_do_the_driver_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n' * 30, encoding="utf-8")
    assert {len(RayBackend().scan(source_of(tmp_path, limit=5)).rows) for _ in range(50)} == {5}


@both
@pytest.mark.parametrize(("order", "ids"), [("longest", "bdca"), ("prefix", "adcb")])
def test_rows_in_an_order(tmp_path: Path, order: Order, ids: str, backend: LocalBackend) -> None:
    texts = {"a": "one", "b": "two, three", "c": "one, two", "d": "one, then"}
    write_rows(tmp_path / "a.jsonl", [{"id": row_id, "text": text} for row_id, text in texts.items()])
    assert "".join(row.id for row in read(backend, source_of(tmp_path), order=order)) == ids


def test_large_parquet_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BYTES_PER_PIECE", 1)
    write_rows(tmp_path / "a.parquet", [{"id": f"r{number}", "text": "t"} for number in range(1, 31)])
    source = source_of(tmp_path)
    assert [(piece.groups, piece.num_before) for piece in source.pieces] == [((n, 1), 7 * n) for n in range(5)]
    assert [row.source for row in read(LocalBackend(), source, 7, 28, 29)] == [f"a.parquet:{n}" for n in (8, 29, 30)]
    monkeypatch.setattr(documents, "_NUM_FILES_TO_SPLIT", 1)
    assert len(source_of(tmp_path).pieces) == 1


def _slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(1.5)
    return row


def _dying(*_: object) -> Iterator[Any]:
    os._exit(1)
    yield


def _full() -> None:
    raise OutOfDiskError("Local disk is full")


@pytest.mark.parametrize(("task", "reason"), [(_dying, "worker died unexpectedly"), (_full, "Local disk is full")])
def test_what_ray_loses_while_it_reads_is_one_line(task: Any, reason: str) -> None:
    with pytest.raises(ReadingError, match=rf"{reason}.* goes on from there"), errors_of_reading():
        ray.get(ray.remote(max_retries=0)(lambda: next(task() or iter(()))).remote())


@pytest.mark.exhaustive
def test_a_file_that_readers_die_of_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a text", encoding="utf-8")
    monkeypatch.setattr(ray_backend, "scan_pieces", _dying)
    with pytest.raises(ReadingError, match="worker died unexpectedly"):
        RayBackend().scan(source_of(tmp_path))


def test_an_address_of_rays_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no streams: a job ended with a traceback."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    refuse_client()  # this process has a Ray already
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="cannot stream results: use 'auto'"), RayBackend().session(None):
        pass


def test_a_run_may_stand_still_for_any_time() -> None:
    """While its rows are made."""
    context = ray.data.DataContext.get_current()
    usual, context.execution_no_progress_timeout_s = context.execution_no_progress_timeout_s, 0.5
    try:
        rows = ray.data.from_items([{"id": "a", "text": "a"}]).map(_slow)
        with pytest.raises(ExecutionTimeoutError, match="no progress"):
            rows.take_all()
        assert [row.id for row in rows_of(rows)] == ["a"]
        assert rows.context.execution_no_progress_timeout_s == 0.5
    finally:
        context.execution_no_progress_timeout_s = usual


def test_a_dataset_that_is_not_read_to_its_end_leaves_no_thread_that_could_come_to_ray() -> None:
    """One that does while Ray is shut down ends the process with a code of its own."""
    source = Source(rows=[input_row(str(number), source="s", text="t") for number in range(2000)])
    with reading(), closing(read(RayBackend(), source)) as rows:
        assert next(rows).document == "t"
        names = {thread.name for thread in reader_threads()}
        assert any(name.startswith(_READER_THREADS) for name in names), "Ray has renamed them"
    assert not reader_threads()


@pytest.mark.parametrize("order", ["input", "longest"])
def test_rows_are_read_while_engines_of_other_jobs_hold_all_cpus(tmp_path: Path, order: Order) -> None:
    """Jobs that began at the same time waited for each other for ever."""
    write_rows(tmp_path / "a.jsonl", [{"id": str(number), "text": "t"} for number in range(50)])
    rows = read(RayBackend(), source_of(tmp_path), order=order)
    thread = ThreadPoolExecutor(1)
    try:
        with all_cpus():
            assert len(thread.submit(list, rows).result(60)) == 50
    finally:
        thread.shutdown()


def test_a_job_that_waits_for_a_cpu_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "PATIENCE_S", 0.2)
    write_rows(tmp_path / "a.jsonl", [{"id": str(number), "text": "t"} for number in range(50)])
    source = source_of(tmp_path)
    left = RayBackend().scan(source).rows
    with ThreadPoolExecutor(2) as threads:
        with all_cpus():
            scan = threads.submit(RayBackend().scan, source)
            rows = threads.submit(RayBackend().rows, source, left, "longest")
            for late in ("no task has begun to scan the input", "the rows are not in their order"):
                wait_until(lambda late=late: f"after 0.2 s, {late}" in caplog.text, 60.0)  # type: ignore[misc]
            assert "waits for a free CPU (free: 0 CPU, " in caplog.text
            assert not scan.done()
            assert not rows.done()
        assert len(scan.result(60).rows) == len(list(rows.result(60))) == 50
