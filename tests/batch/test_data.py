"""Ray Data around an engine's actor, on a real Ray."""

from __future__ import annotations

import asyncio
import json
import operator
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from rayspec.batch import data
from rayspec.batch.data import (
    _READER_THREADS,
    Remaining,
    complete_dataset,
    completed_rows,
    dataset_of,
    read_dataset,
    reader_threads,
    reading,
    remaining_rows,
    seen_rows,
)
from rayspec.batch.documents import Columns, input_row
from rayspec.batch.quarantine import EngineKilledError
from rayspec.batch.rows import Row
from rayspec.batch.supervisor import DrainingError
from rayspec.decode.engine_loop import EngineDeadError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


NUM_TOGETHER = 9  # more than two blocks hold


class Echo:
    """Waits with every document until some have been there together; "late" is one that comes after the job was told
    to end."""

    def __init__(self, num_together: int) -> None:
        self.num_together = num_together
        self.num_inside = 0
        self.enough = asyncio.Event()

    async def handle(self, document: Row) -> Row:
        if document.document == "late":
            raise DrainingError("the job was told to end")
        self.num_inside += 1
        if self.num_inside >= self.num_together:
            self.enough.set()
        await asyncio.wait_for(self.enough.wait(), timeout=30)
        self.num_inside -= 1
        return replace(document.without_input(), text=document.document, num_output_tokens=3)


@pytest.fixture(scope="module")
def echo(ray_cluster: None) -> Any:
    return ray.remote(Echo).options(max_concurrency=100, num_cpus=0).remote(NUM_TOGETHER)


def test_rows_pass_through_the_engine_together_and_bad_ones_around_it(echo: Any, tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": f"text {n}"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no json"]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    dataset = complete_dataset(read_dataset([str(tmp_path)], Columns()), echo)
    results = list(completed_rows(dataset))
    rows = {row.id: row for row in results}
    assert len(results) == len(rows) == 63
    assert {row.error_kind for row in results if not row.is_from_engine} == {
        "malformed_row",
        "unreadable_file",
    }
    assert {row_id: row.text for row_id, row in rows.items() if row_id.startswith("r")} == {
        f"r{n}": f"text {n}" for n in range(60)
    }
    assert {row.error_kind for row in rows.values()} == {None, "malformed_row", "unreadable_file"}
    assert rows["r0"].num_output_tokens == 3


@pytest.mark.exhaustive
def test_rows_that_come_too_late_never_were_the_engines() -> None:
    echo = ray.remote(Echo).options(max_concurrency=100, num_cpus=0).remote(1)
    texts = {"a": "early", "b": "late"}
    rows = dataset_of([input_row(row_id, source=row_id, text=text) for row_id, text in texts.items()])
    results = {row.id: (row.error_kind, row.is_from_engine) for row in completed_rows(complete_dataset(rows, echo))}
    assert results == {"a": (None, True), "b": ("aborted", False)}


class Failing:
    """What a supervisor says of rows: "deadly" ones are condemned, and no engine can be started for the others."""

    async def handle(self, document: Row) -> Row:
        if document.document == "deadly":
            raise EngineKilledError("engines died of this row")
        if document.document == "quick":
            return replace(document.without_input(), text="done")
        raise EngineDeadError("engines died too often")


def test_rows_that_no_engine_can_do_say_why_and_those_beside_them_are_not_lost() -> None:
    """Of rows with one id, the first is done and the others fail."""
    texts = {"a": "slow", "b": "quick", "c": "deadly", "d": "quick", "e": "slow"}
    documents = {row_id: input_row(row_id, source=f"of {row_id}", text=text) for row_id, text in texts.items()}
    doubles = [input_row("x", source=str(number), text="quick") for number in range(9)]
    engine = ray.remote(Failing).options(max_concurrency=100, num_cpus=0).remote()
    found = list(completed_rows(complete_dataset(dataset_of([*documents.values(), *doubles]), engine)))
    of_doubles = [(row.error_kind, row.is_from_engine) for row in found if row.id == "x"]
    assert sorted(of_doubles, key=str) == [("duplicate_id", False)] * 8 + [(None, True)]
    results = {row.id: row for row in found if row.id != "x"}
    assert {row_id: (row.error_kind, row.is_from_engine) for row_id, row in results.items()} == {
        "a": ("engine_dead", False),
        "b": (None, True),
        "c": ("engine_killed", True),
        "d": (None, True),
        "e": ("engine_dead", False),
    }
    assert {row_id: (row.source, row.input_hash) for row_id, row in results.items()} == {
        row_id: (document.source, document.input_hash) for row_id, document in documents.items()
    }
    assert not any(row.is_input_error for row in results.values())


def test_rows_that_are_done_are_left_out_and_others_with_their_ids_fail() -> None:
    documents = [input_row(row_id, source=source, text="t") for row_id, source in ("a1", "b2", "b3", "b4", "c5")]
    rows = dataset_of(documents)
    done = Remaining(takes=always, sources={"a": "1", "b": "2", "c": None}, refused=frozenset({("b", "3")}))
    assert [(row["id"], row["source"], row["error_kind"]) for row in remaining_rows(rows, done).take_all()] == [
        ("b", "4", "duplicate_id")
    ]
    left = remaining_rows(rows, Remaining(takes=partial(operator.eq, "b"))).take_all()
    assert [(row["source"], row["error_kind"]) for row in left] == [("2", None), ("3", None), ("4", None)]


def test_what_is_seen_of_an_input_is_in_order_and_without_its_texts(tmp_path: Path) -> None:
    for name in "abc":
        lines = [json.dumps({"id": f"{name}{number}", "text": "t"}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "no json"]), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    seen = list(seen_rows(read_dataset([str(tmp_path)], Columns())))
    assert [row.id for row in seen if row.error_kind is None] == [f"{name}{n}" for name in "abc" for n in range(50)]
    assert [row.id for row in seen if row.error_kind is not None] == ["a.jsonl:51", "b.jsonl:51", "c.jsonl:51", "d.txt"]
    assert seen[0] == input_row("a0", source="a.jsonl:1", text="t").without_input()
    assert (seen[0].input_hash, seen[0].text) == (input_row("a", source="", text="t").input_hash, None)


def always(_row_id: str) -> bool:
    return True


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": "t"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dataset = read_dataset([str(tmp_path)], Columns(), limit=5)
    assert [row["id"] for row in dataset.iter_rows()] == [f"r{n}" for n in range(5)]


def test_a_dataset_that_is_not_read_to_its_end_leaves_no_thread_that_could_come_to_ray(echo: Any) -> None:
    """One that does while Ray is shut down ends the process with a code of its own."""
    rows = dataset_of([input_row(str(number), source="s", text="t") for number in range(2000)])
    with reading(), closing(completed_rows(complete_dataset(rows, echo))) as read:
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
