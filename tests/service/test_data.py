"""Ray Data around an engine's actor, on a real Ray."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import ray

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.service.data import complete_dataset, read_dataset, result_rows
from rayspec.service.documents import Columns, Document
from rayspec.service.results import ResultRow

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class SlowEcho:
    """Later documents finish sooner; "fatal" is the engine's end."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.most_at_once = 0

    async def handle(self, document: Document) -> ResultRow:
        if document.text == "fatal":
            raise EngineDeadError("the engine has ended: a test")
        self.num_inside += 1
        self.most_at_once = max(self.most_at_once, self.num_inside)
        await asyncio.sleep(0.3 / (1 + len(document.id)))
        self.num_inside -= 1
        return ResultRow(id=document.id, text=document.text, num_output_tokens=3, acceptance_rate=None)

    async def peak(self) -> int:
        return self.most_at_once


def test_rows_pass_through_the_engine_together_and_bad_ones_around_it(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": f"text {n}"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "no json"]) + "\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    engine: Any = ray.remote(SlowEcho).options(max_concurrency=100, num_cpus=0).remote()
    rows = {row.id: row for row in result_rows(complete_dataset(read_dataset([str(tmp_path)], Columns()), engine))}
    assert len(rows) == 63
    assert {row_id: row.text for row_id, row in rows.items() if row_id.startswith("r")} == {
        f"r{n}": f"text {n}" for n in range(60)
    }
    assert {row.error_kind for row in rows.values()} == {None, "malformed_row", "unreadable_file"}
    assert rows["r0"].num_output_tokens == 3
    assert ray.get(engine.peak.remote()) > 8


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{n}", "text": "t"}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    dataset = read_dataset([str(tmp_path)], Columns(), limit=5)
    assert [row["id"] for row in dataset.iter_rows()] == [f"r{n}" for n in range(5)]
