"""The result of a comparison in readable form: tables in the terminal, and a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from rayspec.bench.markdown import markdown_table
from rayspec.bench.result import save_bench

_Row = Mapping[str, Any]

_SPEED = ("strategy", "tokens/s", "min to max", "vs ar", "vs hf", "CPU vs ar", "all/s", "vs ar", "vs hf", "identical")
_WORK = ("strategy", "acceptance", "tokens a round", "predicted", "measured", "draft", "verify", "search", "quiet")
_NOTE = (
    "tokens/s: decoding; CPU vs ar: by CPU time; all/s: with prompts; predicted, measured: of one sequence; draft, "
    "verify, search: shares of the engine's time; quiet: of the time that threads wanted a core, how much they had one"
)


def save_report(result: dict[str, Any], folder: Path) -> None:
    """Write results.json and results.md; earlier files are overwritten."""
    save_bench(result, folder / "results.json")
    (folder / "results.md").write_text(bench_markdown(result), encoding="utf-8")


def bench_tables(result: dict[str, Any]) -> Group:
    """Return two tables for each workload: the speed of each strategy, and the shares of its time."""
    parts: list[str | Table] = [_heading(result)]
    for workload in result["workloads"]:
        parts += ["", f"{workload['name']}: {_prompts(workload)}"]
        parts += [_table(_SPEED, map(_speed_cells, workload["results"]))]
        parts += [_table(_WORK, map(_work_cells, workload["results"]))]
    return Group(*parts, _NOTE)


def bench_markdown(result: dict[str, Any]) -> str:
    """Return a page with command and hardware, all speed-ups in one table, and the tables of each workload."""
    environment, workloads = result["environment"], result["workloads"]
    lines = [
        "# Strategies side by side",
        "",
        f"`{environment['command']}`",
        "",
        f"{_heading(result)}. Commit {environment['commit'] or 'unknown'}, {environment['date']}.",
        "",
        "## Speed-up over `ar`",
        "",
        "Median over the repeats, with least and most; the best of each workload in bold.",
        "",
        markdown_table(
            ("strategy", *(workload["name"] for workload in workloads)), _speedup_rows(workloads), num_left=1
        ),
    ]
    for workload in workloads:
        results = workload["results"]
        lines += ["", f"## {workload['name']}", "", f"{_prompts(workload)}.", ""]
        lines += [markdown_table(_SPEED, map(_speed_cells, results), num_left=1), ""]
        lines.append(markdown_table(_WORK, map(_work_cells, results), num_left=1))
    return "\n".join([*lines, "", f"{_NOTE}.", ""])


def _heading(result: dict[str, Any]) -> str:
    options, environment = result["options"], result["environment"]
    return (
        f"{options['engine']['model']}{_width(options['widen'])} in {options['engine']['dtype']} on "
        f"{environment['hardware']}, {environment['threads']} threads, batch {options['batch']}, "
        f"{options['max_tokens']} output tokens, {options['repeats']} repeats"
    )


def _width(factor: int) -> str:
    return f" made {factor} times as wide" if factor > 1 else ""


def _prompts(workload: _Row) -> str:
    lengths = workload["prompt_tokens"]
    left_out = f", {workload['num_left_out']} longer ones left out" if workload["num_left_out"] else ""
    mixed = f" of {workload['domain']}" if workload["mix_ratio"] is not None else ""
    return f"{len(lengths)} prompts{mixed} of {min(lengths)} to {max(lengths)} tokens{left_out}"


def _speedup_rows(workloads: Sequence[_Row]) -> list[list[str]]:
    names = dict.fromkeys(row["strategy"] for workload in workloads for row in workload["results"])
    best = [max(row["speedup_vs_ar"] for row in workload["results"]) for workload in workloads]
    found = [{row["strategy"]: row for row in workload["results"]} for workload in workloads]
    return [[name, *(_speedup_cell(rows[name], top) for rows, top in zip(found, best, strict=True))] for name in names]


def _speedup_cell(row: _Row, best: float) -> str:
    spread, shown = row["speedup_spread"], _times(row["speedup_vs_ar"])
    shown = f"**{shown}**" if row["speedup_vs_ar"] == best else shown
    return f"{shown} ({spread['min']:.2f} to {spread['max']:.2f})"


def _speed_cells(row: _Row) -> list[str]:
    return [
        row["strategy"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['spread']['min']:.1f} to {row['spread']['max']:.1f}",
        *(_times(row[key]) for key in ("speedup_vs_ar", "speedup_vs_hf", "cpu_speedup_vs_ar")),
        f"{row['end_to_end_tokens_per_s']:.1f}",
        *(_times(row[key]) for key in ("end_to_end_speedup_vs_ar", "end_to_end_speedup_vs_hf")),
        f"{row['identical']} of {row['total']}",
    ]


def _work_cells(row: _Row) -> list[str]:
    return [
        row["strategy"],
        _percent(row["acceptance_rate"]),
        *(_one_decimal(row[key]) for key in ("mean_accepted_length", "predicted_tpt", "measured_tpt")),
        *(_percent(row[key]) for key in ("draft_share", "verify_share", "optimise_share", "quiet_share")),
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _one_decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
