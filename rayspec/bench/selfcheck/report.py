"""The report of a self-check, as Markdown and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayspec.bench.markdown import markdown_table
from rayspec.bench.result import save_bench
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import NamedOutcome

_HEADINGS = ("check", "status", "seconds", "quiet", "found")
_NOTE = (
    "quiet: of the time that threads wanted a core, how much they had one. Far below 100 %, times are "
    "those of a busy machine."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckReport:
    """All outcomes of a self-check. environment: see `describe_environment`."""

    options: SelfcheckOptions
    device: str
    environment: Mapping[str, Any]
    outcomes: tuple[NamedOutcome, ...]

    @property
    def has_failed(self) -> bool:
        return any(one.outcome.status == "failed" for one in self.outcomes)

    @property
    def summary(self) -> str:
        counts = Counter(one.outcome.status for one in self.outcomes)
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.has_failed,
            "options": self.options.as_json(),
            "device": self.device,
            "environment": dict(self.environment),
            "load_average": os.getloadavg(),
            "checks": [
                {
                    "name": one.name,
                    "status": one.outcome.status,
                    "found": one.outcome.found,
                    "seconds": one.seconds,
                    "quiet_share": one.quiet_share,
                    "numbers": one.outcome.numbers,
                }
                for one in self.outcomes
            ],
        }

    def as_markdown(self) -> str:
        lines = ["# Self-check", "", f"`{self.environment['command']}`", "", self._where(), ""]
        lines += [f"{self.summary}.", "", markdown_table(_HEADINGS, map(_row, self.outcomes)), "", _NOTE]
        for one in self.outcomes:
            lines += _section(one)
        return "\n".join([*lines, ""])

    def save(self, folder: Path) -> None:
        """Write selfcheck.md and selfcheck.json; earlier files are overwritten."""
        save_bench(self.as_json(), folder / "selfcheck.json")
        (folder / "selfcheck.md").write_text(self.as_markdown(), encoding="utf-8")

    def _where(self) -> str:
        environment = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        load = " ".join(f"{each:.1f}" for each in os.getloadavg())
        return (
            f"On {self.device} ({environment['hardware']}), {environment['threads']} threads, load {load} at the end; "
            f"{versions}; commit {environment['commit'] or 'unknown'}, {environment['date']}."
        )


def _row(one: NamedOutcome) -> list[str]:
    quiet = "-" if one.quiet_share is None else f"{one.quiet_share:.0%}"
    return [one.name, one.outcome.status, f"{one.seconds:.1f}", quiet, one.outcome.found]


def _section(one: NamedOutcome) -> list[str]:
    outcome = one.outcome
    lines = ["", f"## {one.name}: {outcome.status}", "", f"{outcome.found}."]
    if outcome.counted:
        lines += ["", outcome.counted]
    for table in outcome.tables:
        lines += ["", markdown_table(table.headings, table.rows, num_left=1)]
    if outcome.status == "failed" and isinstance(outcome.numbers, dict) and "traceback" in outcome.numbers:
        lines += ["", "```", outcome.numbers["traceback"].rstrip(), "```"]
    return lines
