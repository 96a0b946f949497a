from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rayspec.batch.rows import Row
from rayspec.batch.tally import Tally
from rayspec.types import PromptTooLongError

GOOD = Row(id="a", num_prompt_tokens=100, num_output_tokens=30, num_draft_tokens=20, num_accepted_tokens=15)
BAD = Row(id="b").failed(PromptTooLongError("too long"))


def test_rows_add_up() -> None:
    seconds = iter([10.0, 14.0, 14.0, 14.0])
    tally = Tally(clock=lambda: next(seconds))
    for row in (GOOD, BAD, GOOD):
        tally.add(row)
    assert (tally.num_rows, tally.num_failed, tally.num_prompt_tokens, tally.num_output_tokens) == (3, 1, 200, 60)
    assert tally.tokens_per_s == 15.0
    assert tally.acceptance_rate == 0.75
    assert tally.errors == {"prompt_too_long": 1}


def test_rows_of_an_earlier_run_count_as_rows_and_not_as_work() -> None:
    tally = Tally(clock=lambda: 1.0)
    tally.add_earlier(Counter({None: 1, "prompt_too_long": 1}))
    tally.add(GOOD)
    assert (tally.num_rows, tally.num_earlier, tally.num_failed, tally.exit_code) == (3, 2, 1, 3)
    assert (tally.num_prompt_tokens, tally.num_output_tokens, tally.num_draft_tokens) == (100, 30, 20)
    assert str(tally).startswith("3 rows (2 of an earlier run), 1 failed (prompt_too_long 1), 30 tokens")


def test_without_drafts_there_is_no_acceptance() -> None:
    tally = Tally()
    tally.add(BAD)
    assert tally.acceptance_rate is None
    assert "acceptance" not in str(tally)


@pytest.mark.parametrize(("rows", "code"), [([GOOD], 0), ([GOOD, BAD], 3), ([BAD, BAD], 1), ([], 1)])
def test_the_exit_code_says_how_many_failed(rows: list[Row], code: int) -> None:
    tally = Tally()
    for row in rows:
        tally.add(row)
    assert tally.exit_code == code


def test_the_line_says_why_rows_failed() -> None:
    tally = Tally()
    kinds = ["a"] * 4 + ["b"] * 3 + ["c", "c", "d", "e"]
    for kind in kinds:
        tally.add(replace(BAD, error_kind=kind))
    assert "11 rows, 11 failed (a 4, b 3, c 2, d 1, ...), " in str(tally)


UNREADABLE = replace(BAD, error_kind="unreadable_file")


@pytest.mark.parametrize(
    ("rows", "code"), [([GOOD], 0), ([GOOD, BAD], 0), ([BAD], 0), ([GOOD, UNREADABLE], 3), ([UNREADABLE], 1), ([], 1)]
)
def test_failed_rows_may_be_accepted_but_not_files_that_could_not_be_read(rows: list[Row], code: int) -> None:
    tally = Tally()
    for row in rows:
        tally.add(row)
    assert tally.exit_code_of(accepts_failed=True) == code
    assert tally.exit_code_of(accepts_failed=False) == tally.exit_code
