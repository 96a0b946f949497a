"""Report on the recommended layout, its predicted performance, and the certainty of the prediction."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig

from rayspec.ops.plan.choice import rank_layouts
from rayspec.ops.plan.flags import flags_of
from rayspec.ops.plan.forecast import EFFICIENCIES, PROFILE_ERROR, Forecast, Forecaster, Outcome, Range
from rayspec.ops.plan.latency import load_profile
from rayspec.ops.plan.layouts import Layout
from rayspec.ops.plan.options import PlanOptions
from rayspec.ops.plan.placement import for_model

_GIB = 2**30
_NUM_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Result of a plan. candidates: the best layouts that fit, in order. others: layouts that do not fit, the smallest
    shortage first. measured_on: the profile's device, None for rooflines."""

    options: PlanOptions
    candidates: tuple[Forecast, ...]
    others: tuple[Layout, ...]
    measured_on: str | None

    @property
    def fits(self) -> bool:
        return bool(self.candidates)

    @property
    def missing_bytes(self) -> int:
        """Smallest shortage of the layouts that do not fit; 0 where all layouts fit."""
        return self.others[0].missing_bytes if self.others else 0


def make_plan(config: PretrainedConfig, options: PlanOptions) -> PlanReport:
    """Rank all layouts, and compute ranges for the shown ones. Raises ConfigError, UnsupportedModelError."""
    options = for_model(options, config)
    profile, key = load_profile(options.profile) if options.profile else (None, {})
    ranking = rank_layouts(config, options, profile=profile)
    forecaster = Forecaster(config, options, profile)
    return PlanReport(
        options=options,
        candidates=tuple(map(forecaster.with_ranges, ranking.candidates[:_NUM_SHOWN])),
        others=ranking.others,
        measured_on=str(key.get("device", "an unknown device")) if profile else None,
    )


def plan_table(report: PlanReport) -> Group:
    """Return the report as text and a table."""
    if not report.fits:
        return Group(
            f"nothing fits: at least {report.missing_bytes / _GIB:.1f} GiB are missing; use more or larger GPUs, "
            "quantization, or plan for fewer or shorter sequences"
        )
    return Group(_heading(report), _table(report), *_notes(report), *_carried_over(report))


def save_plan(report: PlanReport, path: Path) -> None:
    """Save options and candidates as JSON, in seconds, bytes, and output tokens per second."""
    content = {
        "options": report.options.model_dump(mode="json"),
        "measured_on": report.measured_on,
        "num_layouts_that_do_not_fit": len(report.others),
        "missing_bytes": report.missing_bytes,
        "flags": asdict(flags_of(report.candidates[0].layout, report.options)) if report.fits else None,
        "candidates": [_as_json(candidate, report.options.price) for candidate in report.candidates],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _heading(report: PlanReport) -> str:
    options, best = report.options, report.candidates[0].layout
    return (
        f"recommended for {options.goal}: {best.title}; for {options.concurrency} sequences at once, of "
        f"{options.num_tokens} tokens with an answer of {options.output_tokens}"
    )


def _table(report: PlanReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    headings = ["layout", "GPUs", "GiB\nleft", "tokens/s\nplain", "tokens/s\nwith drafts", "gain"]
    headings += ["first\ntoken s", "alone\nfirst s", "alone ms\na token", "idle"]
    headings += ["$ a million\ntokens"] if report.options.price else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for candidate in report.candidates:
        table.add_row(*_cells(candidate, report.options.price))
    return table


def _cells(candidate: Forecast, price: float | None) -> list[str]:
    layout, plain, drafted, best = candidate.layout, candidate.plain, candidate.drafted, candidate.best
    cells = [layout.name, str(layout.num_gpus), f"{layout.bytes_left / _GIB:.1f}", _range(plain.tokens_per_s)]
    cells += [
        _range(drafted.tokens_per_s) if drafted else "-",
        f"{drafted.tokens_per_s.middle / plain.tokens_per_s.middle:.2f}x" if drafted else "-",
        f"{best.first_token_s:.2f}" if best.first_token_s is not None else "-",
        f"{best.alone_first_token_s:.2f}",
        f"{1000 * candidate.alone_token_s:.1f}",
        f"{best.idle_share:.0%}",
    ]
    return [*cells, f"{best.dollars(layout.num_gpus, price):.2f}"] if price else cells


def _range(spread: Range) -> str:
    return f"{spread.middle:.0f} ({spread.low:.0f}-{spread.high:.0f})"


def _notes(report: PlanReport) -> list[str]:
    options = report.options
    low, middle, high = options.acceptances
    source = (
        f"{middle:.2f} ({low:.2f} to {high:.2f}), as published for drafts like these, not measured: give --acceptance"
        if options.acceptance is None
        else f"{middle:.2f}, as given"
    )
    notes = [
        f"drafts leave out {options.skip:.0%} of the layers; acceptance {source}. Lookup is not counted.",
        (
            f"assumed, not measured: {options.hop_us:g} us for a hop between stages, {options.all_reduce_us:g} us and "
            f"more for an all-reduce; prompts are read {options.max_num_batched_tokens} tokens between two rounds"
        ),
        (
            "layout: stages x tensor-parallel ranks x replicas; first token: median under this load; alone: a request "
            "that has a replica to itself"
        ),
        _certainty(report.measured_on),
    ]
    if report.others:
        notes.append(f"{len(report.others)} other layouts do not fit")
    return notes


def _carried_over(report: PlanReport) -> list[Text]:
    """Return the flags of the best layout, each set on one unbroken line, for pasting."""
    flags = flags_of(report.candidates[0].layout, report.options)
    lines = {
        "jobs, rayspec serve": flags.engine,
        "Python": f"LLM(MODEL, {flags.python})",
        "rayspec placement": flags.placement,
        "rayspec k8s render": flags.render or "not possible: the copies are on unlike GPUs",
    }
    pasted = [Text(f"  {f'{name}:':21}{text}", no_wrap=True, overflow="ignore") for name, text in lines.items()]
    return [Text("to use the recommended layout:"), *pasted]


def _certainty(measured_on: str | None) -> str:
    if measured_on is not None:
        return (
            f"how sure: fairly, where a stage is one GPU: passes as measured on {measured_on}, ranges as far as such "
            f"predictions may be off ({PROFILE_ERROR:.0%}); tensor-parallel ranks are taken to share evenly"
        )
    low, middle, high = EFFICIENCIES
    return (
        f"how sure: not very: rooflines, of which engines reach {low:.0%} to {high:.0%} ({middle:.0%} taken); give "
        "--profile, a file that `rayspec profile` has saved on one such GPU"
    )


def _as_json(candidate: Forecast, price: float | None) -> dict[str, Any]:
    layout = candidate.layout

    def outcome(found: Outcome) -> dict[str, Any]:
        return asdict(found) | {"dollars_per_million_tokens": found.dollars(layout.num_gpus, price) if price else None}

    return {
        "stages": layout.stages,
        "tensor": layout.tensor,
        "replicas": layout.replicas,
        "num_gpus": layout.num_gpus,
        "layers": [len(stage.layers) for stage in layout.groups[0].placement.stages],
        "weight_bytes": [stage.weight_bytes for stage in layout.groups[0].placement.stages],
        "kv_bytes": [stage.kv_bytes for stage in layout.groups[0].placement.stages],
        "bytes_left": layout.bytes_left,
        "plain": outcome(candidate.plain),
        "drafted": outcome(candidate.drafted) if candidate.drafted else None,
    }
