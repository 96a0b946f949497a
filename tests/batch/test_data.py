"""Rows as Ray Data reads them, on a real Ray."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from ray.data.exceptions import ExecutionTimeoutError

from rayspec.batch import data
from rayspec.batch.columns import Columns
from rayspec.batch.data import (
    _READER_THREADS,
    Order,
    check_order,
    dataset_of,
    pieces_of,
    read_dataset,
    reader_threads,
    reading,
    rows_of,
)
from rayspec.batch.documents import input_row
from rayspec.batch.rows import Row
from rayspec.batch.scan import seen_rows
from rayspec.types import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_only_wanted_rows_are_read(tmp_path: Path, name: str) -> None:
    rows = [{"id": f"r{number}", "text": f"text {number}"} for number in range(1, 41)]
    write_rows(tmp_path / name, rows)
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    found = pieces_of([str(tmp_path)])
    read = read_dataset(found, Columns(), wanted={0: [3, 17, 40], 1: [0]}).take_all()
    assert [(row["id"], row["source"]) for row in read] == [
        *((f"r{number}", f"{name}:{number}") for number in (3, 17, 40)),
        ("b.txt", "b.txt"),
    ]
    assert read[1]["document"] == "text 17"


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


@pytest.mark.parametrize(("order", "ids"), [("longest", "dbca"), ("prefix", "adcb")])
def test_rows_in_an_order(tmp_path: Path, order: Order, ids: str) -> None:
    texts = {"a": "one", "b": "two, three", "c": "one, two", "d": "one, two, three"}
    if order == "prefix":
        texts["d"] = "one, t"
    write_rows(tmp_path / "a.jsonl", [{"id": row_id, "text": text} for row_id, text in texts.items()])
    rows = read_dataset(pieces_of([str(tmp_path)]), Columns(), order=order)
    assert "".join(row["id"] for row in rows.take_all()) == ids
    assert sorted(Row(**row).id for row in rows.iter_rows()) == list("abcd")


def _slow(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(2)
    return row


def test_a_run_may_stand_still_for_any_time() -> None:
    """While its rows are made here; while they are used in the test below, which needs a Ray of its own."""
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


@pytest.mark.exhaustive
def test_a_slow_consumer_gets_all_rows(tmp_path: Path) -> None:
    """Of more text than the object store holds, so that reading waits for the consumer."""
    for number in range(60):
        rows = [{"id": f"{number} {half}", "text": "text " * 600_000} for half in "ab"]
        write_rows(tmp_path / f"{number:02}.jsonl.gz", rows)
    script = Path(__file__).with_name("slow_consumer.py")
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.splitlines()[-1:] == ["120 rows"], run.stderr[-2000:]


def test_another_order_is_refused() -> None:
    assert check_order("prefix") == "prefix"
    with pytest.raises(ConfigError, match="option 'order' is 'shortest': give input, longest, prefix"):
        check_order("shortest")


def test_large_parquet_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_BYTES_PER_PIECE", 1)
    write_rows(tmp_path / "a.parquet", [{"id": f"r{number}", "text": "t"} for number in range(1, 31)])
    found = pieces_of([str(tmp_path)])
    assert [(piece.groups, piece.num_before) for piece in found] == [((n, 1), 7 * n) for n in range(5)]
    seen = seen_rows(found, Columns())
    assert seen.rows["id"].to_pylist() == [f"r{number}" for number in range(1, 31)]
    assert [seen.row(index).source for index in (0, 7, 29)] == ["a.parquet:1", "a.parquet:8", "a.parquet:30"]
    assert [row["id"] for row in read_dataset(found, Columns(), wanted={1: [8], 4: [29, 30]}).take_all()] == [
        "r8",
        "r29",
        "r30",
    ]
    monkeypatch.setattr(data, "_MAX_READ_TASKS", 1)
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


def test_readers_that_do_not_end_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data, "_READERS_END_WITHIN_S", 0.1)
    release = threading.Event()
    stuck = threading.Thread(target=release.wait, name="iter_threaded", daemon=True)
    stuck.start()
    with reading():
        pass
    assert "has not ended: iter_threaded" in caplog.text
    release.set()
    stuck.join()
