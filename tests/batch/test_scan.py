"""An input compared with the rows that are done."""

import pyarrow as pa
import pytest

from rayspec.batch.job import Comparison, LocalBackend, Source, compared
from rayspec.batch.rows import Row


def found(rows: str, done: dict[str, str | None], *, is_whole: bool = True) -> Comparison:
    """rows: ids and hashes, a character each. The row at place n has the source "n"."""
    given = [
        Row(id=row_id, source=str(n), input_hash=input_hash) for n, (row_id, input_hash) in enumerate(rows.split())
    ]
    table = pa.table({"id": pa.array(done, pa.large_string()), "input_hash": pa.array(done.values(), pa.string())})
    return compared(LocalBackend().scan(Source(rows=given)), table, is_whole=is_whole)


@pytest.mark.parametrize(
    ("rows", "done", "left", "duplicates", "changed"),
    [
        ("", {"a": "x"}, [], [], []),
        ("ax bx", {}, [0, 1], [], []),
        ("ax by cx", {"a": "x", "b": "x", "c": None}, [], [], ["b"]),
        ("ax bx ay ax", {}, [0, 1], ["2", "3"], []),  # the first of equal ids is kept,
        ("ax bx ay ax", {"a": "x"}, [1], ["2", "3"], []),
        ("ax ay ay", {"a": "y"}, [], ["0", "2"], []),  # or that whose text was done
        ("ax ay", {"a": "z"}, [], ["1"], ["a"]),
    ],
)
def test_each_id_is_done_once(
    rows: str, done: dict[str, str | None], left: list[int], duplicates: list[str], changed: list[str]
) -> None:
    comparison = found(rows, done)
    assert (comparison.left, list(comparison.changed)) == (left, changed)
    assert [(error.source, error.error_kind) for error in comparison.errors] == [
        (source, "duplicate_id") for source in duplicates
    ]


def test_a_row_that_stands_twice_is_one_row() -> None:
    row = Row(id="a", source="0", input_hash="x")
    none = pa.table({"id": pa.array([], pa.large_string()), "input_hash": pa.array([], pa.string())})
    comparison = compared(LocalBackend().scan(Source(rows=[row, row])), none)
    assert (comparison.left, comparison.errors) == ([0], [])


def test_changes_are_told() -> None:
    comparison = found("ax by dy ey fy", {"a": "x", "b": "x", "c": "x", "d": "x", "e": "x", "f": "x"})
    assert comparison.describe() == (
        "4 rows have other text than when they were done ('b', 'd', 'e', ...), and 1 rows of the output are no longer "
        "in the input ('c')"
    )
    assert found("ax", {"a": "x"}).describe() == ""
    assert found("ax", {"a": "x", "b": "x"}, is_whole=False).describe() == ""
