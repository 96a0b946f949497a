from __future__ import annotations

import random

import pyarrow as pa
import pytest

from rayspec.batch.rows import Row
from rayspec.batch.scan import Comparison, Scan, compared, scan_rows
from rayspec.types import ConfigError


def row(row_id: str, source: str, input_hash: str = "h") -> Row:
    return Row(id=row_id, source=source, input_hash=input_hash)


def done(hashes: dict[str, str | None]) -> pa.Table:
    return pa.table({"id": pa.array(hashes, pa.large_string()), "input_hash": pa.array(hashes.values(), pa.string())})


def of(*rows: Row) -> Scan:
    return scan_rows(rows)


def errors_of(found: Comparison) -> list[tuple[str, str | None, str | None]]:
    return [(row.id, row.source, row.error_kind) for row in found.errors]


def test_changed_and_absent_rows_are_found() -> None:
    found = compared(of(row("a", "f:1"), row("b", "f:2", "new")), done({"a": "h", "b": "old", "c": "h"}))
    assert (found.changed.to_pylist(), found.absent.to_pylist(), found.left.tolist()) == (["b"], ["c"], [])
    assert found.redoable.tolist() == [1]
    assert found.describe() == (
        "1 rows have other text than when they were done ('b'), and 1 rows of the output are no longer in the input "
        "('c')"
    )


def test_a_part_of_the_input_says_nothing_of_absent_rows() -> None:
    assert len(compared(of(row("a", "f:1")), done({"a": "h", "b": "h"}), is_whole=False).absent) == 0


def test_rows_that_cannot_be_read_are_errors() -> None:
    bad = Row(id="f:1", source="f:1", error_kind="malformed_row", error="why")
    found = compared(of(bad, row("a", "f:2")), done({}))
    assert (found.errors, found.left.tolist()) == ([bad], [0])


def test_changes_are_refused_where_they_are_to_fail() -> None:
    ids = [f"r{number}" for number in range(9)]
    found = compared(of(*(row(row_id, "f", "new") for row_id in ids)), done(dict.fromkeys(ids, "old")))
    found.check("keep")
    found.check("redo")
    with pytest.raises(
        ConfigError, match=r"'changed' is 'fail', and 9 rows .* \('r0', 'r1', 'r2', ...\): pass --changed"
    ):
        found.check("fail")
    compared(of(row("a", "f")), done({"a": "h"})).check("fail")


def test_an_input_or_an_output_without_rows_is_no_error() -> None:
    assert compared(of(), done({"a": "h"})).absent.to_pylist() == ["a"]
    nothing = compared(of(), done({}))
    assert (nothing.left.tolist(), nothing.errors, nothing.describe()) == ([], [], "")


def test_decisions_on_columns_are_those_of_a_loop_over_rows() -> None:
    chance = random.Random(7)
    for _ in range(300):
        rows = [row(chance.choice("abcdef"), f"f:{n}", chance.choice("xyz")) for n in range(chance.randrange(12))]
        hashes = {row_id: chance.choice(["x", "y", None]) for row_id in "abcdefgh" if chance.random() < 0.5}
        found, (left, errors, changed) = compared(of(*rows), done(hashes)), by_loop(rows, hashes)
        assert [rows[index].source for index in found.left] == left
        assert [(row_id, source) for row_id, source, _ in errors_of(found)] == errors
        assert found.changed.to_pylist() == changed
        assert set(found.absent.to_pylist()) == hashes.keys() - {each.id for each in rows}


def by_loop(
    rows: list[Row], hashes: dict[str, str | None]
) -> tuple[list[str | None], list[tuple[str, str | None]], list[str]]:
    """Sources of the rows that are left, ids and sources of duplicates, ids of changed rows."""
    kept: dict[str, Row] = {}
    errors: list[tuple[str, str | None]] = []
    for each in rows:
        first = kept.setdefault(each.id, each)
        if first is each:
            continue
        if each.id in hashes and each.input_hash == hashes[each.id] != first.input_hash:
            kept[each.id], errors = each, [*errors, (first.id, first.source)]
        else:
            errors.append((each.id, each.source))
    in_order = [each for each in rows if kept[each.id] is each]
    left = [each.source for each in in_order if each.id not in hashes]
    changed = [each.id for each in in_order if hashes.get(each.id) not in (None, each.input_hash)]
    return left, errors, changed
