"""Ray Data around an engine's actor, on a real Ray."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rayspec.service import data
from rayspec.service.data import (
    _READER_THREADS,
    DoneRows,
    arrivals,
    complete_dataset,
    dataset_of,
    read_dataset,
    reader_threads,
    reading,
    without_rows,
)
from rayspec.service.documents import Columns, Document
from rayspec.service.engine_actor import DrainingError
from rayspec.service.results import ResultRow

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


NUM_TOGETHER = 9  # more than two blocks hold


class Echo:
    """Waits with every document until some are there together; "late" is one that comes after the job was told to
    end."""

    def __init__(self, num_together: int = 1) -> None:
        self.num_together = num_together
        self.num_inside = 0
        self.enough = asyncio.Event()

    async def handle(self, document: Document) -> ResultRow:
        if document.text == "late":
            raise DrainingError("the job was told to end")
        self.num_inside += 1
        if self.num_inside >= self.num_together:
            self.enough.set()
        await asyncio.wait_for(self.enough.wait(), timeout=30)
        self.num_inside -= 1
        return ResultRow(id=document.id, text=document.text, num_output_tokens=3, acceptance_rate=None)


def echo(num_together: int = 1) -> Any:
    return ray.remote(Echo).options(max_concurrency=100, num_cpus=0).remote(num_together)


def test_rows_pass_through_the_engine_together_and_bad_ones_around_it(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": f"text {n}"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no json"]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    dataset = complete_dataset(read_dataset([str(tmp_path)], Columns()), echo(NUM_TOGETHER))
    results = list(arrivals(dataset))
    rows = {arrival.row.id: arrival.row for arrival in results}
    assert len(results) == len(rows) == 63
    assert {arrival.row.error_kind for arrival in results if not arrival.by_engine} == {
        "malformed_row",
        "unreadable_file",
    }
    assert {row_id: row.text for row_id, row in rows.items() if row_id.startswith("r")} == {
        f"r{n}": f"text {n}" for n in range(60)
    }
    assert {row.error_kind for row in rows.values()} == {None, "malformed_row", "unreadable_file"}
    assert rows["r0"].num_output_tokens == 3


def test_rows_that_come_too_late_never_were_the_engines() -> None:
    texts = {"a": "early", "b": "late"}
    rows = dataset_of([Document(id=row_id, source=row_id, text=text) for row_id, text in texts.items()])
    results = {come.row.id: (come.row.error_kind, come.by_engine) for come in arrivals(complete_dataset(rows, echo()))}
    assert results == {"a": (None, True), "b": ("aborted", False)}


class Mortal:
    """Ends with its process when "deadly" comes and so many rows are there; "quick" ones are done before, "slow" ones
    never."""

    def __init__(self, num_together: int) -> None:
        self.num_together = num_together
        self.num_inside = 0

    async def handle(self, document: Document) -> ResultRow:
        if document.text == "quick":
            return ResultRow(id=document.id, text="done")
        self.num_inside += 1
        while self.num_inside < self.num_together:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # what is quick comes first
        if document.text == "deadly":
            os._exit(1)
        await asyncio.sleep(60)
        raise AssertionError("the engine outlived it")


def test_rows_that_a_dying_engine_had_say_which_they_were_and_those_beside_them_are_not_lost() -> None:
    texts = {"a": "slow", "b": "quick", "c": "deadly", "d": "quick", "e": "slow"}
    rows = dataset_of([Document(id=row_id, source=f"of {row_id}", text=text) for row_id, text in texts.items()])
    engine = ray.remote(Mortal).options(max_concurrency=100, num_cpus=0).remote(3)
    results = {come.row.id: come for come in arrivals(complete_dataset(rows, engine))}
    assert {row_id for row_id, come in results.items() if come.by_engine} == {"b", "d"}
    for row_id in ("a", "c", "e"):
        assert results[row_id].under_way == {"a", "c", "e"}
        assert (results[row_id].row.error_kind, results[row_id].row.source) == ("engine_dead", f"of {row_id}")
    assert results["b"].under_way is None


def test_one_at_a_time_is_one_at_a_time() -> None:
    rows = dataset_of([Document(id=str(number), source="s", text="slow") for number in range(5)])
    engine = ray.remote(Alone).options(max_concurrency=100, num_cpus=0).remote()
    results = list(arrivals(complete_dataset(rows, engine, num_wanted=50, one_at_a_time=True)))
    assert [come.row.num_output_tokens for come in results] == [1] * 5


class Alone:
    """Says how many rows there were at most since the first."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.most = 0

    async def handle(self, document: Document) -> ResultRow:
        self.num_inside += 1
        self.most = max(self.most, self.num_inside)
        await asyncio.sleep(0.1)
        self.num_inside -= 1
        return ResultRow(id=document.id, num_output_tokens=self.most)


def test_rows_that_are_done_are_left_out_and_others_with_their_ids_fail() -> None:
    rows = dataset_of(
        [Document(id=row_id, source=source, text="t") for row_id, source in ("a1", "b2", "b3", "b4", "c5")]
    )
    done = DoneRows(sources={"a": "1", "b": "2", "c": None}, duplicates=frozenset({("b", "3")}))
    assert [(row["id"], row["source"], row["error_kind"]) for row in without_rows(rows, done, always).take_all()] == [
        ("b", "4", "duplicate_id")
    ]
    left = without_rows(rows, DoneRows(), partial(operator.eq, "b")).take_all()
    assert [(row["source"], row["error_kind"]) for row in left] == [("2", None), ("3", None), ("4", None)]


def always(_row_id: str) -> bool:
    return True


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": "t"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dataset = read_dataset([str(tmp_path)], Columns(), limit=5)
    assert [row["id"] for row in dataset.iter_rows()] == [f"r{n}" for n in range(5)]


def test_a_dataset_that_is_not_read_to_its_end_leaves_no_thread_that_could_come_to_ray() -> None:
    """One that does while Ray is shut down ends the process with a code of its own."""
    rows = dataset_of([Document(id=str(number), source="s", text="t") for number in range(2000)])
    with reading(), closing(arrivals(complete_dataset(rows, echo()))) as read:
        next(read)
        names = {thread.name for thread in reader_threads()}
        assert all(any(name.startswith(kind) for name in names) for kind in _READER_THREADS), "Ray has renamed them"
    assert not reader_threads()


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
