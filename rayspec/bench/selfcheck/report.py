"""Options, outcomes and report of a self-check, as Markdown and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rayspec.bench.result import markdown_table, save_json
from rayspec.config import DType
from rayspec.model.weights import resolve_device

Status = Literal["passed", "failed", "not here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckOptions:
    """device: auto, cpu, cuda, cuda:1, ... dtype: compared in addition to float32. is_quick: fewer models."""

    device: str = "auto"
    dtype: DType = "bfloat16"
    num_threads: int | None = None
    is_quick: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The device. Raises ConfigError if the device does not exist."""
        return resolve_device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, "bfloat16" if self.dtype == "auto" else self.dtype)
        return dtype


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


def judged(*, is_good: bool, found: str, numbers: Any, tables: Sequence[Table], counted: str = "") -> Outcome:
    """Return a passed or failed outcome."""
    status: Status = "passed" if is_good else "failed"
    return Outcome(status=status, found=found, numbers=numbers, tables=tables, counted=counted)


def not_here(why: str) -> Outcome:
    return Outcome(status="not here", found=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckReport:
    """All outcomes of a self-check, by check, with its seconds. environment: see `describe_environment`."""

    options: SelfcheckOptions
    device: str
    environment: Mapping[str, Any]
    outcomes: Mapping[str, tuple[Outcome, float]]

    @property
    def has_failed(self) -> bool:
        return any(outcome.status == "failed" for outcome, _ in self.outcomes.values())

    @property
    def summary(self) -> str:
        counts = Counter(outcome.status for outcome, _ in self.outcomes.values())
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def save(self, folder: Path) -> None:
        """Write selfcheck.md and selfcheck.json; earlier files are overwritten."""
        found = {
            "ok": not self.has_failed,
            "options": asdict(self.options),
            "device": self.device,
            "environment": dict(self.environment),
            "load_average": os.getloadavg(),
            "checks": [
                {"name": name, "seconds": seconds} | {key: getattr(one, key) for key in ("status", "found", "numbers")}
                for name, (one, seconds) in self.outcomes.items()
            ],
        }
        save_json(found, folder / "selfcheck.json")
        (folder / "selfcheck.md").write_text(self.as_markdown(), encoding="utf-8")

    def as_markdown(self) -> str:
        environment = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        where = (
            f"On {self.device} ({environment['hardware']}), {environment['threads']} threads, load {load} at the end; "
            f"{versions}; commit {environment['commit'] or 'unknown'}, {environment['date']}."
        )
        lines = [
            "# Self-check",
            "",
            f"`{environment['command']}`",
            "",
            where,
            "",
            f"{self.summary}.",
            "",
            markdown_table(
                ("check", "status", "seconds", "found"),
                ([name, one.status, f"{seconds:.1f}", one.found] for name, (one, seconds) in self.outcomes.items()),
            ),
        ]
        for name, (one, _) in self.outcomes.items():
            lines += ["", f"## {name}: {one.status}", "", f"{one.found}.", *(["", one.counted] if one.counted else [])]
            for table in one.tables:
                lines += ["", markdown_table(table.headings, table.rows, num_left=1)]
            if isinstance(one.numbers, dict) and "traceback" in one.numbers:
                lines += ["", "```", one.numbers["traceback"].rstrip(), "```"]
        return "\n".join([*lines, ""])
