"""The report of a run, in Markdown, with the picture of its plans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rayspec.batch.progress import Tally
from rayspec.batch.rows import Row
from rayspec.choices import described
from rayspec.types import EngineStats, PlanRecord

PLOT_NAME = "skip-map.png"
_MAX_LISTED = 50
_MARKUP = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])")


@dataclass(slots=True, kw_only=True)
class RunReport:
    """Collects rows as they come. At the end it writes `report.md` and, if matplotlib is here, the picture.

    listed: table rows for the first rows, under DOCUMENT_HEADINGS. examples: one error message for every kind.
    """

    tally: Tally = field(default_factory=Tally)
    listed: list[tuple[str, ...]] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.tally.add(row)
        self._list(row)

    def add_earlier(self, kinds: Counter[str | None], rows: Callable[..., Iterable[Row]]) -> None:
        """Add the rows of an earlier run, which do not count for the speed of this run.

        kinds: numbers of rows by kind of error; None is the kind of those that succeeded. rows: returns the rows;
        `with_text` says whether with their texts. Only as many are read as the report needs.
        """
        self.tally.add_earlier(kinds)
        for row in islice((row for row in rows(with_text=False) if row.is_final), _MAX_LISTED):
            self._list(row)

    def _list(self, row: Row) -> None:
        if row.error_kind is not None:
            self.examples.setdefault(row.error_kind, row.error or "")
        if len(self.listed) < _MAX_LISTED:
            # after the first token
            rate = (row.num_output_tokens - 1) / row.decode_s if row.decode_s and row.num_output_tokens > 1 else None
            self.listed.append(
                (
                    row.id,
                    str(row.num_prompt_tokens or "-"),
                    str(row.num_output_tokens or "-"),
                    _number(rate),
                    _share(row.acceptance_rate),
                    row.error_kind or "",
                )
            )

    def write(self, folder: Path, *, stats: EngineStats, config: Mapping[str, Any], title: str) -> Path:
        """Write the report into `folder`, which must exist. Return the path of `report.md`."""
        try:
            from rayspec.batch.plots import plot_plans  # noqa: PLC0415 - brings matplotlib

            plot_plans(stats, folder / PLOT_NAME, title=f"{title}: the drafts' plans")
            picture = f"![the drafts' plans]({PLOT_NAME})"
        except ModuleNotFoundError:
            picture = "The picture of the drafts' plans needs matplotlib: `pip install 'rayspec[plots]'`."
        tally = self.tally
        parts = [f"# {_inert(title)}", *self._summary(stats, config), picture]
        if tally.errors:
            kinds = [(kind, str(count), self.examples.get(kind, "")) for kind, count in tally.errors.most_common()]
            parts += ["## Failed rows", _table(("kind", "rows", "for example"), kinds)]
        parts += ["## Documents", _table(DOCUMENT_HEADINGS, self.listed)]
        if more := tally.num_rows - len(self.listed):
            parts.append(f"{more} more rows are in the output file.")
        if stats.plans:
            note = "Rates are of one sequence: as predicted, as measured in use, and as predicted without a draft."
            parts += ["## Plans", note, _table(_PLAN_HEADINGS, map(_plan_cells, stats.plans[-_MAX_LISTED:]))]
        path = folder / "report.md"
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        return path

    def _summary(self, stats: EngineStats, config: Mapping[str, Any]) -> list[str]:
        tally = self.tally
        seconds = (
            ("prefill", stats.prefill_s),
            ("draft", stats.draft_s),
            ("verify", stats.verify_s),
            ("plan search", stats.optimise_s),
        )
        lines = [
            ("rows", f"{tally.num_rows}, {tally.num_failed} failed"),
            ("prompt tokens", f"{tally.num_prompt_tokens}"),
            ("prompt tokens found in the KV cache", _share(stats.cache_hit_rate)),
            ("output tokens", f"{tally.num_output_tokens}"),
            ("wall time", f"{tally.elapsed_s:.1f} s"),
            ("throughput", f"{tally.tokens_per_s:.1f} output tokens/s"),
            ("draft acceptance", _share(stats.acceptance_rate)),
            ("tokens a drafted round", _number(stats.mean_accepted_length)),
            ("rounds", f"{stats.num_rounds}, {stats.num_plain_rounds} without a draft"),
            *((f"time in {name}", _share(part / stats.total_s if stats.total_s else None)) for name, part in seconds),
            ("drafting", stats.gate_reason or "-"),
        ]
        if stats.num_lost_replicas:
            lines.append(("replicas lost for good", str(stats.num_lost_replicas)))
        speculation = config.get("speculation", {})
        setting = ", ".join(
            f"{name} {_inert(str(value))}"
            for name, value in (
                ("model", config.get("model")),
                ("dtype", config.get("dtype")),
                ("device", config.get("device")),
                ("threads", config.get("num_threads")),
                ("strategy", speculation.get("strategy")),
                ("verification", speculation.get("verification")),
            )
        )
        return [f"With {setting}.", _table(("what", "value"), lines)]


DOCUMENT_HEADINGS = ("id", "prompt tokens", "output tokens", "tokens/s", "acceptance", "error")
_PLAN_HEADINGS = (
    "at, s", "context", "batch", "attention", "MLP", "draft", "acceptance", "observed",
    "tokens/s", "measured", "plain", "search, ms", "why",
)  # fmt: skip


def _plan_cells(record: PlanRecord) -> tuple[str, ...]:
    choices = record.plan.choices
    return (
        f"{record.elapsed_s:.1f}",
        str(record.context),
        str(record.batch),
        described(choices[::2]),
        described(choices[1::2]),
        str(record.plan.num_draft_tokens) if record.plan.drafts else "none",
        _share(record.estimated_acceptance if record.plan.drafts else None),
        _share(record.observed_acceptance),
        _number(record.predicted_tpt),
        _number(record.measured_tpt),
        _number(record.plain_tpt),
        f"{1000 * record.optimise_s:.0f}",
        record.reason,
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([_inert(" ".join(cell.split())) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inert(text: str) -> str:
    """Escape a text for Markdown, so that it never becomes markup: no link, no image, no other column."""
    return _MARKUP.sub(r"\\\g<0>", text)
