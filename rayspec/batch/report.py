"""The rows of a run as they come: counts with the exit code they add up to, and a progress line. And the report of the
run: one HTML file, without scripts and outside resources, and a short form in Markdown."""

from __future__ import annotations

import datetime as dt
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, select_autoescape
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import rayspec
from rayspec.batch.rows import Row
from rayspec.choices import described
from rayspec.command.terminal import EXIT_BUDGET, EXIT_FAILED, EXIT_OK, EXIT_SOME_FAILED, inert
from rayspec.types import EngineStats

# Of `RunReport.listed`: names with units; None: a text.
ROW_HEADINGS = (
    ("id", ""), ("prompt", "tokens"), ("output", "tokens"), ("decoding", "tokens/s"), ("acceptance", "of drafts"),
    ("error", None),
)  # fmt: skip
_MAX_LISTED = 50
_MAX_KINDS = 4
_PLAIN_INTERVAL_S = 5.0
_MINUTE_S = 60.0
_ABOUT_S = 10.0  # the time left is given in steps of so many seconds below two minutes
_MAX_BARS, _LEAST_BAR_S = 96, 0.5
REPORT_NAMES = ("report.md", "report.html")
_HERE = Path(__file__).parent
_LEAST_SHARE = 0.005
_MAX_MAPS = 12
_MARKUP = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])")
_SOURCES = {
    "own text": "copied from the document or from the text so far",
    "corpus": "copied from earlier texts",
    "recycled": "recycled: the tokens that were likely after the same token before",
    "model": "drafted by the model with cheaper or skipped sublayers",
    "form": "given by the form of the output",
}
_BY_MODEL = "written by the full model, token by token"


@dataclass(slots=True, kw_only=True)
class RunReport:
    """Collects rows as they come, for the line of progress and for `report_pages`.

    num_left: the rows that this run has to do; None while that is not known. num_under_way: rows that must be done
    before the time left is estimated, because the first to finish are short. num_cut: rows whose text ended at
    `max_tokens`. num_shared: rows with the result of an equal row. stopped: the option whose budget is spent. listed:
    table rows under ROW_HEADINGS. examples: an error message for every kind. texts: ids and texts of the first rows.
    decoded: for each row, begin and end of its decoding, in seconds since the start, and its tokens.
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
    decoded: array[float] = field(default_factory=lambda: array("d"))
    started_s: float = 0.0
    begun_s: float = 0.0

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def add(self, row: Row, *, is_shared: bool = False) -> None:
        """Add a row of this run. is_shared: it has the result of an equal row, which counts the tokens."""
        self._list(row)
        if row.text and len(self.texts) < 3:
            self.texts.append((row.id, row.text))
        self.num_rows += 1
        self.num_shared += is_shared
        if is_shared:
            row = replace(row, num_prompt_tokens=0, num_output_tokens=0)
        self.num_output_tokens += row.num_output_tokens
        if row.num_output_tokens:
            end_s = self.elapsed_s + 1e-3
            self.decoded.extend((max(0.0, end_s - (row.decode_s or 1e-3)), end_s, row.num_output_tokens))
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

    @property
    def rates(self) -> list[float]:
        """Output tokens per second in equal parts of the run until now, at most 96."""
        if not self.decoded:
            return []
        begin_s, end_s, num_tokens = np.reshape(self.decoded, (-1, 3)).T
        num_bars = int(max(1, min(_MAX_BARS, end_s.max() / _LEAST_BAR_S)))
        edges_s = np.linspace(0.0, end_s.max(), num_bars + 1)
        so_far = [num_tokens @ np.clip((edge_s - begin_s) / (end_s - begin_s), 0.0, 1.0) for edge_s in edges_s]
        rates: list[float] = (np.diff(so_far) / edges_s[1]).tolist()
        return rates

    def exit_code(self, *, accepts_failed: bool = False) -> int:
        """Return the exit code: 0 if every row succeeded, 1 if none did, 3 if some failed, 4 if a budget ended the run.
        accepts_failed: it is 0 even if rows failed, unless a file could not be read, which another run may read."""
        if self.stopped:
            return EXIT_BUDGET
        is_final = "unreadable_file" not in self.errors
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
    def progress(self) -> str:
        """The line of a run under way. Rows under way count as not begun, so the first estimates are too long."""
        if self.num_left is None:
            return str(self)
        num_to_do = max(0, self.num_left - self.num_done)
        time_left = "time left not known yet"
        if self.num_done >= self.num_under_way:
            seconds = num_to_do * (self.clock() - self.begun_s) / self.num_done
            hours, minutes = divmod(round(seconds / _MINUTE_S), 60)
            time_left = f"about {hours} h {minutes} min left" if hours else f"about {minutes} min left"
            if seconds < 2 * _MINUTE_S:
                time_left = f"about {max(1, round(seconds / _ABOUT_S)) * _ABOUT_S:.0f} s left"
        rows = f"{num_to_do} row{'s' * (num_to_do > 1)}"
        return f"{self}, {rows} to do, {time_left}" if num_to_do else f"{self}, all rows are done"


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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def page_of(name: str, **values: Any) -> str:
    """Return one of the pages here. An HTML page has its style, and neither scripts nor outside resources."""
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    page: str = _environment().get_template(name).render(style=style, **values)
    return page.rstrip() + "\n"


@cache
def _environment() -> Environment:
    """Return the templates, each of which is compiled once."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=select_autoescape(),
        trim_blocks=True,
        finalize=lambda value: inert(value) if type(value) is str else value,
    )
    environment.filters["plain"] = lambda text: _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    return environment


def token_sources(stats: EngineStats) -> list[tuple[str, float]]:
    """Return shares of the tokens by where they came from, largest first, without shares that would round to nothing.
    The full model's own tokens are last."""
    num_tokens = max(1, stats.num_generated_tokens)
    by_source = sorted(stats.accepted_by_source.items(), key=itemgetter(1), reverse=True)
    shares = [(_SOURCES.get(name, name), count / num_tokens) for name, count in by_source]
    left = 1 - sum(share for _, share in shares)
    return [*((name, share) for name, share in shares if share >= _LEAST_SHARE), (_BY_MODEL, left)]


def dollars_per_million(price: float, tokens_per_s: float) -> str:
    """Return the cost of a million tokens, formatted. price: dollars per hour."""
    return f"${price / 3600 * 1e6 / tokens_per_s:,.2f}" if tokens_per_s else "-"


def report_pages(
    report: RunReport, *, config: Mapping[str, Any], title: str, price: float | None = None
) -> dict[str, str]:
    """Return the contents of the report's files, by REPORT_NAMES. price: dollars per hour of all machines."""
    stats, rates, more = report.stats, report.rates, report.num_rows - len(report.listed)
    seconds = {
        "reading prompts": stats.prefill_s,
        "drafting by the model": stats.draft_s,
        "verifying, and decoding without drafts": stats.verify_s,
        "searching plans": stats.optimise_s,
    }
    shown_s, began_s = max(report.decoded[1::3], default=0.0), time.monotonic() - report.elapsed_s
    mapped = sorted((one for one in stats.plans if one.plan.drafts), key=lambda one: one.num_tokens)[-_MAX_MAPS:]
    drafting = stats.gate_reason or "no rows were decoded, or the strategy never drafts"
    speculation, threads = config.get("speculation"), config.get("num_threads") or "as measured"
    if not isinstance(speculation, Mapping):  # in a manifest that was edited
        speculation = {}
    setting = (
        f"Model {config.get('model')}, {config.get('dtype')} on {config.get('device')}, threads {threads}, "
        f"strategy {speculation.get('strategy')}, verification {speculation.get('verification')}"
    )
    values: dict[str, Any] = {
        "title": f"{title}: rayspec report",
        "headline": title,
        "model": setting,
        "setting": f"{setting}. rayspec {rayspec.__version__}, {dt.datetime.now(tz=dt.timezone.utc):%d %B %Y}.",
        "report": report,
        "cost": None if price is None else dollars_per_million(price, report.tokens_per_s),
        "price": price,
        "sources": token_sources(stats) if stats.num_generated_tokens else [],
        "times": [
            (name, part_s / stats.total_s)
            for name, part_s in seconds.items()
            if stats.total_s and part_s / stats.total_s >= _LEAST_SHARE
        ],
        "bars": rates,
        "most": max(rates, default=0.0) or 1.0,
        "shown_s": shown_s,
        "restarts": [min(1.0, (at_s - began_s) / shown_s) for at_s in stats.died_at_s if shown_s],
        "drafting": f"{drafting[0].upper()}{drafting[1:]}.",
        "used": {choice for one in mapped for choice in one.plan.choices},
        "maps": [
            (one.context, described(one.plan.choices), one.plan.choices)
            for one in sorted(mapped, key=lambda one: one.context)
        ],
        "errors": [(kind, str(count), report.examples.get(kind, "")) for kind, count in report.errors.most_common()],
        "totals": _totals(report),
        "row_headings": ROW_HEADINGS,
        "more": f"{more} more rows are in the output file." if more else "",
        "options": yaml.safe_dump(dict(config), sort_keys=False),
    }
    return {name: page_of(name, **values) for name in REPORT_NAMES}


def _totals(report: RunReport) -> list[tuple[str, str]]:
    """Return names and values. Totals that are zero or unknown are left out."""
    stats = report.stats
    by_source = sorted(stats.accepted_by_source.items(), key=itemgetter(1), reverse=True)
    sources = [f"{_share(count / stats.num_generated_tokens)} {source}" for source, count in by_source]
    earlier = f"; {report.num_earlier} of an earlier run, which the lines below leave out"
    seconds = {
        "prefill": stats.prefill_s, "draft": stats.draft_s, "verify": stats.verify_s, "plan search": stats.optimise_s,
    }  # fmt: skip
    lines = [
        ("rows", f"{report.num_rows}, {report.num_failed} failed{earlier * (report.num_earlier > 0)}"),
        ("prompt tokens", f"{report.num_prompt_tokens}"),
        ("prompt tokens found in the KV cache", _share(stats.cache_hit_rate)),
        ("output tokens", f"{report.num_output_tokens}"),
        ("wall time", f"{report.elapsed_s:.1f} s"),
        ("throughput", f"{report.tokens_per_s:.1f} output tokens/s"),
        ("draft acceptance", _share(stats.acceptance_rate)),
        ("mean tokens per round with drafts", _number(stats.mean_accepted_length)),
        ("output tokens by source", ", ".join(sources) or "-"),
        ("rounds", f"{stats.num_rounds}, {stats.num_plain_rounds} without a draft"),
        *(
            (f"time in {name}", _share(part_s / stats.total_s if stats.total_s else None))
            for name, part_s in seconds.items()
        ),
        ("drafting", stats.gate_reason or "-"),
        ("quantised weights", stats.weights or "-"),
        ("replicas lost for good", str(stats.num_lost_replicas or "-")),
        ("speed over plain decoding, estimated", "-" if stats.speed_up is None else f"{stats.speed_up:.2f}x"),
        ("engines replaced", str(len(stats.died_at_s) or "-")),
        ("stages replaced", str(stats.num_replays or "-")),
    ]
    return [line for line in lines if line[1] not in {"-", "0 %"}]
