from __future__ import annotations

import pytest

from rayspec.batch.rows import Row
from rayspec.batch.survey import Survey, check_changed, survey
from rayspec.types import ConfigError


def seen(row_id: str, source: str, input_hash: str = "h") -> Row:
    return Row(id=row_id, source=source, input_hash=input_hash)


def errors_of(found: Survey) -> list[tuple[str, str | None, str | None]]:
    return [(row.id, row.source, row.error_kind) for row in found.errors]


def test_rows_that_have_moved_are_done() -> None:
    """One row was inserted at the top: ids decide, not places."""
    done = {f"r{number}": "h" for number in range(1, 44)}
    found = survey((seen(f"r{number}", f"a:{number + 1}") for number in range(44)), done)
    assert (found.num_left, found.errors, found.changed, found.absent) == (1, [], [], [])
    assert found.sources["r1"] == "a:2"


def test_changed_and_absent_rows_are_found() -> None:
    found = survey([seen("a", "f:1"), seen("b", "f:2", "new")], {"a": "h", "b": "old", "c": "h"})
    assert (found.changed, found.absent, found.num_left) == (["b"], ["c"], 0)
    assert found.describe() == (
        "1 rows have other text than when they were done ('b'), and 1 rows of the output are no longer in the input "
        "('c')"
    )


def test_a_part_of_the_input_says_nothing_of_absent_rows() -> None:
    assert survey([seen("a", "f:1")], {"a": "h", "b": "h"}, is_whole=False).absent == []


def test_an_unknown_hash_is_no_change() -> None:
    assert survey([seen("a", "f:1")], {"a": None}).changed == []


def test_the_first_row_keeps_an_id() -> None:
    found = survey([seen("a", "f:1"), seen("a", "f:2"), seen("a", "f:1")], {})
    assert (found.sources, errors_of(found)) == ({"a": "f:1"}, [("a", "f:2", "duplicate_id")])
    assert (found.num_left, found.changed) == (1, [])


def test_the_row_that_was_done_keeps_its_id_before_the_first() -> None:
    found = survey([seen("a", "f:1", "new"), seen("a", "f:2", "old"), seen("a", "f:3", "old")], {"a": "old"})
    assert found.sources == {"a": "f:2"}
    assert errors_of(found) == [("a", "f:1", "duplicate_id"), ("a", "f:3", "duplicate_id")]
    assert (found.num_left, found.changed) == (0, [])


def test_rows_that_cannot_be_read_are_errors() -> None:
    bad = Row(id="f:1", source="f:1", error_kind="malformed_row", error="why")
    found = survey([bad, seen("a", "f:2")], {})
    assert (found.errors, found.num_left) == ([bad], 1)


def test_changes_are_refused_where_they_are_to_fail() -> None:
    found = survey(
        [seen(f"r{number}", "f", "new") for number in range(9)], {f"r{number}": "old" for number in range(9)}
    )
    for option in ("keep", "redo"):
        found.check(check_changed(option))
    with pytest.raises(
        ConfigError, match=r"'changed' is 'fail', and 9 rows .* \('r0', 'r1', 'r2', ...\): pass --changed"
    ):
        found.check("fail")
    survey([seen("a", "f")], {"a": "h"}).check("fail")


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="option 'changed' is 'drop': give keep, redo, fail"):
        check_changed("drop")
