"""The rows of a run as they come: counts with the exit code they add up to, a progress line, and the report."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rayspec.batch.report_page import Timeline, report_page, setting_of
from rayspec.batch.rows import Row
from rayspec.choices import described
from rayspec.command.terminal import EXIT_BUDGET, EXIT_FAILED, EXIT_OK, EXIT_SOME_FAILED
from rayspec.types import EngineStats, PlanRecord

REPORT_NAMES = ("report.md", "report.html")
_MAX_LISTED = 50
_MAX_KINDS = 4
_MAX_TEXTS = 3
_PASSING_KINDS = frozenset({"unreadable_file"})
_PLAIN_INTERVAL_S = 5.0
_MINUTE_S = 60.0
_ABOUT_S = 10.0  # the time left is given in steps of so many seconds below two minutes
_NOTHING = frozenset({"-", "0 %"})
_MARKUP = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])")


@dataclass(slots=True, kw_only=True)
class RunReport:
    """Collects rows as they come. At the end it writes `report.html` and its short form, `report.md`.

    clock: returns seconds. num_left: the rows that this run has to do; None while that is not known. num_under_way:
    rows that must be done before the time left is estimated, because the first rows to finish are short. num_cut: rows
    whose text ended at `max_tokens`. num_shared: rows with the result of an equal row. stopped: the option whose budget
    is spent, so that rows are left. listed: table rows for the first rows, under DOCUMENT_HEADINGS. examples: one error
    message for every kind. texts: ids and texts of the first rows of this run. stats: of the engines, once the run is
    done. timeline: output tokens over the run.
    """

    clock: Callable[[], float] = time.perf_counter
    num_left: int | None = None
    num_under_way: int = 1
    num_rows: int = 0
    num_earlier: int = 0
    num_done: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cut: int = 0
    num_shared: int = 0
    stopped: str = ""
    errors: Counter[str] = field(default_factory=Counter)
    listed: list[tuple[str, ...]] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    texts: list[tuple[str, str]] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    timeline: Timeline = field(default_factory=Timeline)
    started_s: float = 0.0
    begun_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def add(self, row: Row, *, is_shared: bool = False) -> None:
        """Add a row of this run. is_shared: it has the result of an equal row, which counts the tokens."""
        self._list(row)
        if row.text and len(self.texts) < _MAX_TEXTS:
            self.texts.append((row.id, row.text))
        self.num_rows += 1
        self.num_shared += is_shared
        if is_shared:
            row = replace(row, num_prompt_tokens=0, num_output_tokens=0)
        self.num_output_tokens += row.num_output_tokens
        if row.num_output_tokens:
            self.timeline.add(row.num_output_tokens, self.elapsed_s - (row.decode_s or 0.0), self.elapsed_s)
        self.num_draft_tokens += row.num_draft_tokens
        self.num_accepted_tokens += row.num_accepted_tokens
        self.num_cut += row.finish_reason == "length"
        if row.error_kind is not None:
            self.errors[row.error_kind] += 1
        else:
            self.num_prompt_tokens += row.num_prompt_tokens
        if self.num_left is not None and not is_shared:
            if self.num_done == 0:  # the time in which the engine loaded does not count
                self.begun_s = self.clock() - (row.latency_s or 0.0)
            self.num_done += 1

    def add_earlier(self, kinds: Counter[str | None], rows: Callable[..., Iterable[Row]]) -> None:
        """Add the rows of an earlier run, which do not count for the speed of this run.

        kinds: numbers of rows by kind of error; None is the kind of those that succeeded. rows: returns the rows;
        `with_text` says whether with their texts. Only as many are read as the report needs.
        """
        self.num_rows += kinds.total()
        self.num_earlier += kinds.total()
        self.errors.update({kind: number for kind, number in kinds.items() if kind is not None})
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

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def exit_code(self, *, accepts_failed: bool = False) -> int:
        """Return the exit code: 0 if every row succeeded, 1 if none did, 3 if some failed, 4 if a budget ended the run.
        accepts_failed: it is 0 even
        if rows failed, unless a file could not be read, because another run may succeed in reading it."""
        if self.stopped:
            return EXIT_BUDGET
        is_final = not self.errors.keys() & _PASSING_KINDS
        if self.num_rows > 0 and (self.num_failed == 0 or (accepts_failed and is_final)):
            return EXIT_OK
        return EXIT_FAILED if self.num_failed == self.num_rows else EXIT_SOME_FAILED

    def __str__(self) -> str:
        acceptance = "" if self.acceptance_rate is None else f", acceptance {self.acceptance_rate:.2f}"
        kinds = [f"{kind} {count}" for kind, count in self.errors.most_common(_MAX_KINDS)]
        kinds += ["..."] * (len(self.errors) > _MAX_KINDS)
        failed = f", {self.num_failed} failed ({', '.join(kinds)})" if self.num_failed else ""
        speed = f"{self.num_output_tokens} tokens, {self.tokens_per_s:.1f} tokens/s"
        earlier = f" ({self.num_earlier} of an earlier run)" if self.num_earlier else ""
        cut = f", {self.num_cut} ended at max_tokens" if self.num_cut else ""
        cut += f", {self.num_shared} had the result of an equal row" if self.num_shared else ""
        cut += f"; ended by option {self.stopped!r} with rows left: run it again to go on" if self.stopped else ""
        return f"{self.num_rows} row{'s' * (self.num_rows != 1)}{earlier}{failed}, {speed}{acceptance}{cut}"

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds that are left; None while there is no estimate. Rows under way count as not begun, so the
        first estimates are too long."""
        if self.num_left is None or self.num_done < self.num_under_way:
            return None
        return max(0, self.num_left - self.num_done) * (self.clock() - self.begun_s) / self.num_done

    @property
    def progress(self) -> str:
        """The line of a run under way."""
        if self.num_left is None:
            return str(self)
        num_to_do = max(0, self.num_left - self.num_done)
        time_left = "time left not known yet"
        if (seconds := self.seconds_left) is not None:
            hours, minutes = divmod(round(seconds / _MINUTE_S), 60)
            time_left = f"about {hours} h {minutes} min left" if hours else f"about {minutes} min left"
            if seconds < 2 * _MINUTE_S:
                time_left = f"about {max(1, round(seconds / _ABOUT_S)) * _ABOUT_S:.0f} s left"
        rows = f"{num_to_do} row{'s' * (num_to_do > 1)}"
        return f"{self}, {rows} to do, {time_left}" if num_to_do else f"{self}, all rows are done"

    def write(
        self, folder: Path, *, config: Mapping[str, Any], title: str, price: float | None = None
    ) -> tuple[Path, Path]:
        """Write the report into `folder`, which must exist. Return the paths of REPORT_NAMES. price: dollars per hour
        of all machines."""
        stats, totals = self.stats, self._totals()
        more = self.num_rows - len(self.listed)
        more_rows = f"{more} more rows are in the output file." if more else ""
        plans = [_plan_cells(one) for one in stats.plans[-_MAX_LISTED:]]
        setting = f"{_inert(setting_of(config))}. The same with charts: {REPORT_NAMES[1]}."
        parts = [f"# {_inert(title)}", setting, _table(("what", "value"), totals)]
        if self.errors:
            kinds = [(kind, str(count), self.examples.get(kind, "")) for kind, count in self.errors.most_common()]
            parts += ["## Failed rows", _table(("kind", "rows", "for example"), kinds)]
        if self.texts:
            parts += ["## Texts", _table(("id", "text"), self.texts)]
        parts += ["## Documents", _table(DOCUMENT_HEADINGS, self.listed)]
        parts += [more_rows] * bool(more)
        if plans:
            note = "Rates are of one sequence: as predicted, as measured in use, and as predicted without a draft."
            parts += ["## Plans", note, _table([_heading(*each) for each in _PLAN_HEADINGS], plans)]
        page = report_page(
            self,
            config=config,
            title=title,
            price=price,
            totals=totals,
            rows={
                "row_headings": _ROW_HEADINGS, "rows": self.listed, "more": more_rows,
                "plan_headings": _PLAN_HEADINGS, "plans": plans,
            },
        )  # fmt: skip
        short, full = (folder / name for name in REPORT_NAMES)
        short.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        full.write_text(page, encoding="utf-8")
        return short, full

    def _totals(self) -> list[tuple[str, str]]:
        """Return names and values. Totals that are zero or unknown are left out."""
        stats = self.stats
        seconds = (
            ("prefill", stats.prefill_s),
            ("draft", stats.draft_s),
            ("verify", stats.verify_s),
            ("plan search", stats.optimise_s),
        )
        lines = [
            ("rows", f"{self.num_rows}, {self.num_failed} failed"),
            ("prompt tokens", f"{self.num_prompt_tokens}"),
            ("prompt tokens found in the KV cache", _share(stats.cache_hit_rate)),
            ("output tokens", f"{self.num_output_tokens}"),
            ("wall time", f"{self.elapsed_s:.1f} s"),
            ("throughput", f"{self.tokens_per_s:.1f} output tokens/s"),
            ("draft acceptance", _share(stats.acceptance_rate)),
            ("mean tokens per round with drafts", _number(stats.mean_accepted_length)),
            ("output tokens by source", _sources(stats)),
            ("rounds", f"{stats.num_rounds}, {stats.num_plain_rounds} without a draft"),
            *((f"time in {name}", _share(part / stats.total_s if stats.total_s else None)) for name, part in seconds),
            ("drafting", stats.gate_reason or "-"),
        ]
        if stats.num_lost_replicas:
            lines.append(("replicas lost for good", str(stats.num_lost_replicas)))
        if stats.speed_up is not None:
            lines.append(("speed over plain decoding, estimated", f"{stats.speed_up:.2f}x"))
        for name, number in (("engines replaced", len(stats.died_at_s)), ("stages replaced", stats.num_replays)):
            lines += [(name, str(number))] * bool(number)
        return [line for line in lines if line[1] not in _NOTHING]


@contextmanager
def showing_progress(report: RunReport, console: Console) -> Iterator[Callable[[], None]]:
    """Give the block a function to call after every row that the report has got."""
    if console.is_terminal:
        columns = (SpinnerColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(report.progress, total=report.num_left)
            yield lambda: progress.update(task, description=report.progress, completed=report.num_done)
    else:
        shown_s = time.monotonic()

        def show() -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s >= _PLAIN_INTERVAL_S:
                console.print(report.progress, highlight=False, soft_wrap=True)
                shown_s = time.monotonic()

        yield show


def _sources(stats: EngineStats) -> str:
    """Return which share of the tokens was drafted by the model, copied or recycled; the rest was decoded plainly."""
    sources = sorted(stats.accepted_by_source.items(), key=itemgetter(1), reverse=True)
    return ", ".join(f"{_share(count / stats.num_generated_tokens)} {source}" for source, count in sources) or "-"


# Names with units; None: a text.
_ROW_HEADINGS = (
    ("id", ""), ("prompt", "tokens"), ("output", "tokens"), ("decoding", "tokens/s"), ("acceptance", "of drafts"),
    ("error", None),
)  # fmt: skip
_PLAN_HEADINGS = (
    ("chosen at", "s"), ("context", "tokens"), ("batch", "sequences"), ("attention", None), ("MLP", None),
    ("draft", "tokens"), ("estimated", "acceptance"), ("observed", "acceptance"), ("predicted", "tokens/s"),
    ("measured", "tokens/s"), ("plain", "tokens/s"), ("search", "ms"), ("reason", None),
)  # fmt: skip


def _heading(name: str, unit: str | None) -> str:
    return f"{name}, {unit}" if unit else name


DOCUMENT_HEADINGS = tuple(_heading(*each) for each in _ROW_HEADINGS)


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
