"""The result of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "not here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for the report. The first column names the row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a check. found: one or two sentences. numbers: JSON values for programs. counted: explains the
    numbers, if their names are not enough."""

    status: Status
    found: str
    numbers: Any = None
    tables: Sequence[Table] = ()
    counted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOutcome:
    """An outcome with the name and the duration of its check. quiet_share: CPU time over CPU time plus time spent
    waiting for a core; None if unknown."""

    name: str
    seconds: float
    quiet_share: float | None
    outcome: Outcome = field(repr=False)


def judged(*, is_good: bool, found: str, numbers: Any, tables: Sequence[Table], counted: str = "") -> Outcome:
    """Return a passed or failed outcome."""
    status: Status = "passed" if is_good else "failed"
    return Outcome(status=status, found=found, numbers=numbers, tables=tables, counted=counted)


def measured(found: str, *, numbers: Any, tables: Sequence[Table], counted: str = "") -> Outcome:
    """Return a passed outcome: a measurement without a bound cannot fail."""
    return judged(is_good=True, found=found, numbers=numbers, tables=tables, counted=counted)


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)
