"""How jobs read their rows: on a real Ray, and in this process."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from ray.data.exceptions import ExecutionTimeoutError

from rayspec.batch import documents
from rayspec.batch.documents import input_row, pieces_of
from rayspec.batch.in_process import LocalBackend
from rayspec.batch.job import Backend, Order, Source
from rayspec.batch.ray_backend import (
    _READER_THREADS,
    RayBackend,
    dataset_of,
    reader_threads,
    reading,
    rows_of,
)
from rayspec.batch.rows import Row

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


both = pytest.mark.parametrize("backend", [RayBackend(), LocalBackend()], ids=["Ray", "in process"])


@both
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_only_wanted_rows_are_read(tmp_path: Path, name: str, backend: Backend) -> None:
    rows = [{"id": f"r{number}", "text": f"text {number}"} for number in range(1, 41)]
    write_rows(tmp_path / name, rows)
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    source = Source(inputs=[str(tmp_path)])
    scan = backend.scan(source).rows
    read = sorted(backend.rows(source, scan.take(pa.array([2, 16, 39, 40])), "input"), key=lambda row: str(row.source))
    assert [(row.id, row.source) for row in read] == [
        *((f"r{number}", f"{name}:{number}") for number in (17, 3, 40)),
        ("b.txt", "b.txt"),
    ]
    assert read[0].document == "text 17"
    given = Source(rows=read, sample=0.5)
    assert {row.id for row in backend.rows(given, None, "input")} == {row.id for row in read if given.share(row.id)}


@both
def test_a_scan_is_in_order_and_without_texts_and_has_a_limit(tmp_path: Path, backend: Backend) -> None:
    for name in "abc":
        lines = [json.dumps({"id": f"{name}{number}", "text": "t"}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "no json"]), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    scan = backend.scan(Source(inputs=[str(tmp_path)]))
    assert scan.rows["id"].to_pylist() == [f"{name}{n}" for name in "abc" for n in range(50)]
    assert [row.id for row in scan.errors] == ["a.jsonl:51", "b.jsonl:51", "c.jsonl:51", "d.txt"]
    assert scan.errors[0].error_kind == "malformed_row"
    assert scan.row(51) == input_row("b1", source="b.jsonl:2", text="t").without_input()

    source = Source(inputs=[str(tmp_path)], limit=53, sample=0.5)  # a share of the first rows, which an error is among
    some = backend.scan(source)
    first = [*(f"a{n}" for n in range(50)), "b0", "b1"]
    assert some.rows["id"].to_pylist() == [row_id for row_id in first if source.share(row_id)]
    assert len(some.errors) == int(source.share("a.jsonl:51"))


def test_limited_scans_that_end_with_their_tasks_do_the_driver_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n' * 30, encoding="utf-8")
    assert {len(RayBackend().scan(Source(inputs=[str(tmp_path)], limit=5)).rows) for _ in range(200)} == {5}


@both
@pytest.mark.parametrize(("order", "ids"), [("longest", "dbca"), ("prefix", "adcb")])
def test_rows_in_an_order(tmp_path: Path, order: Order, ids: str, backend: Backend) -> None:
    texts = {"a": "one", "b": "two, three", "c": "one, two", "d": "one, two, three"}
    if order == "prefix":
        texts["d"] = "one, t"
    write_rows(tmp_path / "a.jsonl", [{"id": row_id, "text": text} for row_id, text in texts.items()])
    rows = backend.rows(Source(inputs=[str(tmp_path)]), None, order)
    assert "".join(row.id for row in rows) == ids


def _slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(2)
    return row


def test_a_run_may_stand_still_for_any_time() -> None:
    """While its rows are made."""
    context = ray.data.DataContext.get_current()
    usual, context.execution_no_progress_timeout_s = context.execution_no_progress_timeout_s, 1.0
    try:
        rows = dataset_of([Row(id="a", text="a")]).map(_slow)
        with pytest.raises(ExecutionTimeoutError, match="no progress"):
            rows.take_all()
        assert [row.id for row in rows_of(rows)] == ["a"]
        assert rows.context.execution_no_progress_timeout_s == 1.0
    finally:
        context.execution_no_progress_timeout_s = usual


@both
def test_large_parquet_files_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(documents, "_BYTES_PER_PIECE", 1)
    write_rows(tmp_path / "a.parquet", [{"id": f"r{number}", "text": "t"} for number in range(1, 31)])
    source = Source(inputs=[str(tmp_path)])
    assert [(piece.groups, piece.num_before) for piece in source.pieces] == [((n, 1), 7 * n) for n in range(5)]
    scan = backend.scan(source)
    assert scan.rows["id"].to_pylist() == [f"r{number}" for number in range(1, 31)]
    assert [scan.row(index).source for index in (0, 7, 29)] == ["a.parquet:1", "a.parquet:8", "a.parquet:30"]
    some = backend.rows(source, scan.rows.take(pa.array([7, 28, 29])), "input")
    assert {row.id for row in some} == {"r8", "r29", "r30"}
    monkeypatch.setattr(documents, "_NUM_FILES_TO_SPLIT", 1)
    assert len(pieces_of([str(tmp_path)])) == 1


def test_a_dataset_that_is_not_read_to_its_end_leaves_no_thread_that_could_come_to_ray() -> None:
    """One that does while Ray is shut down ends the process with a code of its own."""
    rows = dataset_of([input_row(str(number), source="s", text="t") for number in range(2000)])
    with reading(), closing(rows_of(rows.map(unchanged))) as read:
        assert next(read).document == "t"
        names = {thread.name for thread in reader_threads()}
        assert any(name.startswith(_READER_THREADS) for name in names), "Ray has renamed them"
    assert not reader_threads()


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    return row
