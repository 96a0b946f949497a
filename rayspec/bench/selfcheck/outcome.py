"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers for people. The first column names the row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """found: one or two sentences. numbers: for programs, as JSON. counted: what the numbers are, where names do not
    say it."""

    status: Status
    found: str
    numbers: Any = None
    tables: Sequence[Table] = ()
    counted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOutcome:
    """With the check that it is of, and the seconds that the check took. quiet_share: of the time that threads wanted a
    core, the part that they had one; None where the system does not say."""

    name: str
    seconds: float
    quiet_share: float | None
    outcome: Outcome = field(repr=False)


def judged(*, is_good: bool, found: str, numbers: Any, tables: Sequence[Table], counted: str = "") -> Outcome:
    """Passed or failed."""
    status: Status = "passed" if is_good else "failed"
    return Outcome(status=status, found=found, numbers=numbers, tables=tables, counted=counted)


def measured(found: str, *, numbers: Any, tables: Sequence[Table], counted: str = "") -> Outcome:
    """A measurement without a bound passes when it is there."""
    return judged(is_good=True, found=found, numbers=numbers, tables=tables, counted=counted)


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)
