from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pyarrow as pa

from rayspec.batch.row_index import RowIndex, described_rows
from rayspec.batch.rows import Row


def done(row_id: str, input_hash: str | None = None) -> Row:
    return Row(id=row_id, finish_reason="stop", input_hash=input_hash)


def failed(row_id: str, kind: str) -> Row:
    return Row(id=row_id, finish_reason="error", error_kind=kind, input_hash="0f")


def duplicate(row_id: str, source: str) -> Row:
    return Row(id=row_id, finish_reason="error", error_kind="duplicate_id", source=source)


def index_of(*rows: Row) -> RowIndex:
    index = RowIndex()
    index.append(described_rows(rows), start=0)
    return index


def test_of_an_id_the_last_row_counts_but_no_transient_one_after_a_final_one() -> None:
    rows = [done("a"), failed("b", "stage_lost"), done("a"), failed("a", "engine_dead"), failed("b", "engine_dead")]
    index = index_of(*rows)
    assert index.counting.tolist() == [False, False, True, False, True]
    assert index.summary().as_dict() == {"total": 1, "succeeded": 1, "failed": {}}
    assert (len(index), index.is_complete) == (2, False)
    assert index.done["id"].to_pylist() == ["a"]


def test_an_aborted_row_is_not_final() -> None:
    assert not index_of(replace(done("a"), finish_reason="abort")).is_complete


def test_a_row_with_another_ones_id_stands_beside_it() -> None:
    index = index_of(duplicate("a", "f:2"), done("a", "h"), duplicate("a", "f:3"), duplicate("a", "f:2"))
    assert index.counting.tolist() == [False, True, True, True]
    assert index.done.to_pylist() == [{"id": "a", "input_hash": "h"}]
    assert index.summary().failed == Counter(duplicate_id=2)
    assert len(index_of(duplicate("a", "f:2")).done) == 0


def test_errors_of_the_input_of_earlier_sessions_do_not_count() -> None:
    index = RowIndex(described_rows([done("a"), duplicate("a", "f:2")]))
    assert index.ignores_some
    assert index.counting.tolist() == [True, False]
    index.append(described_rows([duplicate("a", "f:2")]), start=2)
    assert index.counting.tolist() == [True, False, True]


def test_a_row_that_is_to_be_done_again_counts_until_it_is() -> None:
    index = RowIndex(described_rows([done("a", "1"), done("b", "1"), done("a", "2"), failed("a", "engine_dead")]))
    index.reopen(pa.array(["a", "x"]))
    assert index.counting.tolist() == [False, True, True, False]
    assert (index.done["id"].to_pylist(), index.is_complete, index.summary().total) == (["b"], False, 1)
    index.append(described_rows([done("a", "3")]), start=4)
    assert index.counting.tolist() == [False, True, False, False, True]
    assert (sorted(index.done["input_hash"].to_pylist()), index.is_complete) == (["1", "3"], True)


def test_an_append_that_was_interrupted_can_be_made_again() -> None:
    index = index_of(done("a"))
    for _ in range(2):
        index.append(described_rows([done("b")]), start=1)
    assert (index.num_stored, len(index)) == (2, 2)


def test_nothing_is_stored_at_first() -> None:
    index = RowIndex()
    assert (len(index), index.is_complete, len(index.done), index.summary().total) == (0, True, 0, 0)


def test_decisions_do_not_depend_on_how_rows_came() -> None:
    chance = random.Random(3)
    for _ in range(100):
        kinds = chance.choices(["", "engine_dead", "empty_prompt"], k=10)
        ids = chance.choices("abc", k=10)
        rows = [failed(row_id, kind) if kind else done(row_id) for row_id, kind in zip(ids, kinds, strict=True)]
        index, at_once = RowIndex(described_rows(rows[:4])), index_of(*rows)
        for number, row in enumerate(rows[4:], start=4):
            index.append(described_rows([row]), start=number)
        assert index.counting.tolist() == at_once.counting.tolist() == by_loop(rows)


def by_loop(rows: list[Row]) -> list[bool]:
    last: dict[str, int] = {}
    for number, row in enumerate(rows):
        if row.is_final or row.id not in last or not rows[last[row.id]].is_final:
            last[row.id] = number
    return [last[row.id] == number for number, row in enumerate(rows)]
