"""What tasks see of an input, on a real Ray."""

from __future__ import annotations

import json
import operator
import time
from functools import partial
from pathlib import Path

import pytest

from rayspec.batch.columns import Columns
from rayspec.batch.data import pieces_of
from rayspec.batch.documents import input_row
from rayspec.batch.scan import CountedRows, seen_rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_what_is_seen_of_an_input_is_in_order_and_without_its_texts(tmp_path: Path) -> None:
    for name in "abc":
        lines = [json.dumps({"id": f"{name}{number}", "text": "t"}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "no json"]), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    seen = seen_rows(pieces_of([str(tmp_path)]), Columns())
    assert seen.rows["id"].to_pylist() == [f"{name}{n}" for name in "abc" for n in range(50)]
    assert [row.id for row in seen.errors] == ["a.jsonl:51", "b.jsonl:51", "c.jsonl:51", "d.txt"]
    assert seen.errors[0].error_kind == "malformed_row"
    assert seen.row(51) == input_row("b1", source="b.jsonl:2", text="t").without_input()


def test_a_limit_is_of_the_first_rows_and_a_share_is_of_these(tmp_path: Path) -> None:
    for name in "ab":
        lines = ["no json", *(json.dumps({"id": f"{name}{n}", "text": "t"}) for n in range(5))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = pieces_of([str(tmp_path)])
    seen = seen_rows(found, Columns(), limit=8)
    assert (seen.rows["id"].to_pylist(), len(seen.errors)) == (["a0", "a1", "a2", "a3", "a4", "b0"], 2)
    some = seen_rows(found, Columns(), limit=8, takes=partial(operator.contains, ("a1", "b0", "b4")))
    assert (some.rows["id"].to_pylist(), some.errors) == (["a1", "b0"], [])


def test_limited_scans_that_end_with_their_tasks_do_the_driver_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n' * 30, encoding="utf-8")
    found = pieces_of([str(tmp_path)])
    assert {len(seen_rows(found, Columns(), limit=5).rows) for _ in range(200)} == {5}


def test_rows_are_counted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 30, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a text", encoding="utf-8")
    counted = CountedRows(pieces_of([str(tmp_path)]))
    deadline = time.monotonic() + 60
    while (num_rows := counted()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_rows == 31
