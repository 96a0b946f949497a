"""The report of a job as one HTML file, without scripts and outside resources."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Protocol

import yaml
from jinja2 import Environment, FileSystemLoader

import rayspec
from rayspec.choices import Choice, described
from rayspec.types import EngineStats, PlanRecord

_HERE = Path(__file__).parent
_LEAST_SHARE = 0.005
_MAX_BARS = 96
_MAX_PLANS = 12
_SOURCES = {
    "own text": "copied from the document or from the text so far",
    "corpus": "copied from earlier texts",
    "recycled": "recycled: the tokens that were likely after the same token before",
    "model": "drafted by the model with cheaper or skipped sublayers",
    "form": "given by the form of the output",
}
_BY_MODEL = "written by the full model, token by token"
_CHOICES: Final[Mapping[Choice, tuple[str, str]]] = {
    "full": ("#1f4e8c", "as in the model"),
    "int8": ("#3f7fcb", "8-bit weights"),
    "int4": ("#8fbbea", "4-bit weights"),
    "window": ("#7a3b0c", "first and newest keys only"),
    "pages": ("#e08a2b", "most attended keys only"),
    "int8+window": ("#a5622a", "both"),
    "int8+pages": ("#f0a75a", "both"),
    "int4+window": ("#c9a27e", "both"),
    "int4+pages": ("#f7d1a8", "both"),
    "skip": ("transparent", "left out"),
}
_REMEDIES = {
    "prompt_too_long": "Raise --max-model-len, or use --long map-reduce (truncate cuts the text).",
    "empty_file": "Fill the file, or leave it out.",
    "unreadable_file": "Check the path and the permissions, then run the same command again.",
    "malformed_row": "Correct the line of the input, then run again with --changed redo.",
    "missing_column": "Name the column of the text, see --help.",
    "duplicate_id": "Give every row an id of its own, or use --id-column none.",
    "invalid_value": "Correct the value in the input.",
    "empty_prompt": "The row has no text: fill it, or leave it out.",
    "does_not_shrink": "The summaries of the parts are as long as the parts: lower --max-tokens.",
    "engine_killed": "This row ended the engine twice: run it alone and read the log.",
    "out_of_memory": "Lower --max-num-seqs or --kv-cache-tokens.",
    "non_finite_logits": "The model overflowed: use --dtype float32 or bfloat16.",
    "unfinished_form": "Raise --max-tokens: the output ended before its form was complete.",
}


class Timeline:
    """Tokens over time, in at most `_MAX_BARS` bars whose width `bar_s` grows with the run."""

    def __init__(self) -> None:
        self.bar_s = 0.5
        self.bars: list[float] = []

    def add(self, num_tokens: int, begin_s: float, end_s: float) -> None:
        """Spread tokens evenly over a time; seconds since the start."""
        begin_s = max(0.0, min(begin_s, end_s))
        while end_s >= self.bar_s * _MAX_BARS:
            self.bars = [sum(pair) for pair in zip_longest(self.bars[::2], self.bars[1::2], fillvalue=0.0)]
            self.bar_s *= 2
        first, last = int(begin_s / self.bar_s), int(end_s / self.bar_s)
        self.bars += [0.0] * (last + 1 - len(self.bars))
        for at in range(first, last + 1):
            covered_s = min(end_s, (at + 1) * self.bar_s) - max(begin_s, at * self.bar_s)
            self.bars[at] += num_tokens * (covered_s / (end_s - begin_s) if end_s > begin_s else 1.0)

    @property
    def rates(self) -> list[float]:
        """Tokens per second in each bar."""
        return [tokens / self.bar_s for tokens in self.bars]


class Reported(Protocol):
    """What the page needs of a `RunReport`, where the fields are described."""

    stats: EngineStats
    timeline: Timeline
    num_rows: int
    num_earlier: int
    num_output_tokens: int
    errors: Counter[str]
    examples: dict[str, str]
    texts: list[tuple[str, str]]

    @property
    def num_failed(self) -> int: ...
    @property
    def elapsed_s(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...


def page_of(name: str, **values: Any) -> str:
    """Return one of the pages here, with its style: a file without scripts or outside resources."""
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True)
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    page: str = environment.get_template(name).render(style=style, **values)
    return page


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


def report_page(
    report: Reported,
    *,
    config: Mapping[str, Any],
    title: str,
    price: float | None,
    totals: Sequence[tuple[str, str]],
    rows: Mapping[str, Any],
) -> str:
    """Return the page. price: dollars per hour of all machines. totals: names and values. rows: the template's
    `row_headings`, `rows`, `plan_headings` and `plans`."""
    stats, rates = report.stats, report.timeline.rates
    times = [
        (name, part / stats.total_s)
        for name, part in (
            ("reading prompts", stats.prefill_s),
            ("drafting by the model", stats.draft_s),
            ("verifying, and decoding without drafts", stats.verify_s),
            ("searching plans", stats.optimise_s),
        )
        if stats.total_s and part / stats.total_s >= _LEAST_SHARE
    ]
    restarts = _restarts(report, len(rates) * report.timeline.bar_s)
    drafting = stats.gate_reason or "no rows were decoded, or the strategy never drafts"
    return page_of(
        "report.html",
        title=f"{title}: rayspec report",
        headline=title,
        setting=f"{setting_of(config)}. rayspec {rayspec.__version__}, {dt.datetime.now(tz=dt.timezone.utc):%d %B %Y}.",
        cards=_cards(report, price),
        sources=token_sources(stats) if stats.num_generated_tokens else [],
        times=times,
        bars=rates,
        most=max(rates, default=0.0) or 1.0,
        bar_s=report.timeline.bar_s,
        restarts=restarts,
        restart_note=f"Dashed lines: an engine died and was replaced ({len(restarts)})." if restarts else "",
        drafting=f"{drafting[0].upper()}{drafting[1:]}.",
        **_choice_maps(stats.plans),
        errors=[
            (kind, count, report.examples.get(kind, ""), _REMEDIES.get(kind, "See the message."))
            for kind, count in report.errors.most_common()
        ],
        texts=report.texts,
        totals=totals,
        options=yaml.safe_dump(dict(config), sort_keys=False),
        more=f"Tokens per second: of one row, after its first token; rows share the engine. {rows['more']}",
        **{name: value for name, value in rows.items() if name != "more"},
    )


def setting_of(config: Mapping[str, Any]) -> str:
    """Return the main options in words."""
    speculation, threads = config.get("speculation", {}), config.get("num_threads") or "as measured"
    where = f"{config.get('dtype')} on {config.get('device')}, threads {threads}"
    how = f"strategy {speculation.get('strategy')}, verification {speculation.get('verification')}"
    return f"Model {config.get('model')}, {where}, {how}"


def _cards(report: Reported, price: float | None) -> list[tuple[str, str, str]]:
    """Return value, name and note of each card."""
    stats, seconds = report.stats, report.elapsed_s
    earlier = f", {report.num_earlier} of them by an earlier run" if report.num_earlier else ""
    cards = []
    if stats.speed_up is not None:
        note = f"decoding only; estimated from this run's {stats.num_plain_rounds:,} rounds without drafts"
        cards.append((f"{stats.speed_up:.1f}x", "the speed of plain decoding", note))
    tokens = f"{report.num_output_tokens:,} tokens in {seconds:,.0f} s, with loading and prompts"
    cards += [
        (f"{report.num_rows:,}", "rows" if report.num_rows != 1 else "row", f"{report.num_failed:,} failed{earlier}"),
        (f"{report.tokens_per_s:,.1f}", "output tokens per second", tokens),
    ]
    if stats.num_generated_tokens and stats.num_accepted_tokens:
        share = stats.num_accepted_tokens / stats.num_generated_tokens
        cards.append((f"{100 * share:.0f} %", "of the tokens from drafts", "the rest is written by the full model"))
    if stats.acceptance_rate is not None:
        cards.append((f"{100 * stats.acceptance_rate:.0f} %", "acceptance", "of draft tokens, copied ones included"))
    if price is not None:
        cost = dollars_per_million(price, report.tokens_per_s)
        cards.append((cost, "per million output tokens", f"at ${price:,.2f} per hour for all machines"))
    return cards


def _restarts(report: Reported, shown_s: float) -> list[float]:
    """Return when engines died, as shares of the time that the timeline shows."""
    began_s = time.time() - report.elapsed_s
    return [min(1.0, (at_s - began_s) / shown_s) for at_s in report.stats.died_at_s if shown_s]


def _choice_maps(plans: Sequence[PlanRecord]) -> dict[str, Any]:
    """Return the template's `maps` and `legend`: the plans that were in use longest, by context."""
    drafting = sorted((one for one in plans if one.plan.drafts), key=lambda one: one.num_tokens)[-_MAX_PLANS:]
    drafting.sort(key=lambda one: one.context)
    present = [choice for choice in _CHOICES if any(choice in one.plan.choices for one in drafting)]
    return {
        "maps": [
            (
                f"{one.context:,}",
                described(one.plan.choices),
                {
                    "width": len(one.plan.choices) // 2,
                    "rects": [(at // 2, at % 2, _CHOICES[choice][0]) for at, choice in enumerate(one.plan.choices)],
                },
            )
            for one in drafting
        ],
        "legend": [(choice, *_CHOICES[choice]) for choice in present],
    }
