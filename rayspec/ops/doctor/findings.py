"""Findings of checks, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "problem", "skipped"]

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check. found: the observed state. remedy: advice to the user; empty where none is needed."""

    status: Status
    name: str
    found: str
    remedy: str = ""


ok, warning, problem, skipped = (partial(Finding, status) for status in _STYLES)


def has_problems(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "problem" for finding in findings)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table of the findings, with the number of each status below."""
    counts = Counter(finding.status for finding in findings)
    summary = ", ".join(f"{counts[status]} {status}" for status in _STYLES if counts[status])
    table = Table(box=box.SIMPLE_HEAD, caption=summary, caption_justify="left")
    for heading in ("check", "status", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.name, status, Text(finding.found), Text(finding.remedy))
    return table
