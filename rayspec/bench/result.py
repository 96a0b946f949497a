"""What a benchmark found, a row of numbers for each strategy, as JSON and as Markdown, and how it was measured."""

from __future__ import annotations

import datetime as dt
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rayspec.machine import cpu_name, installed_version
from rayspec.types import EngineStats

BASELINE, HF = "ar", "hf"

_PACKAGES = ("rayspec", "torch", "transformers", "ray", "numpy")
_OF_PLANS = ("context", "predicted_tpt", "measured_tpt", "estimated_acceptance", "observed_acceptance", "num_tokens")
_LEAST_S = 1e-9  # lower bound of divisors
_NOTE = "tokens/s: decoding; all/s: with prompts; identical: texts that equal ar's (bfloat16 has near-ties)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All prompts completed once. seconds: with prefill."""

    token_ids: list[list[int]]
    seconds: float
    prefill_s: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """Tokens per second of the whole run, prefill included."""
        return self.num_tokens / max(_LEAST_S, self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding, without prefill and the first token of each output, which prefill gives."""
        return max(0, self.num_tokens - len(self.token_ids)) / max(_LEAST_S, self.seconds - self.prefill_s)


def bench_row(name: str, samples: Mapping[str, Sequence[Sample]], stats: EngineStats) -> dict[str, Any]:
    """Return the JSON row of a strategy. samples: by strategy, repeat by repeat. stats: of its engine in that time.

    Rates are medians over the repeats; speed-ups are medians of the ratios within a repeat, whose runs had the same
    machine load. Both measure decoding; "end_to_end" includes prefill. `identical` of `total` outputs have the tokens
    of our own plain decoding. Shares are of the engine's time. A value that is not known is None.
    """
    own, plain, hf = samples[name], samples[BASELINE], samples.get(HF)

    speed, whole_speed = attrgetter("tokens_per_s"), attrgetter("end_to_end_tokens_per_s")

    def ratios(other: Sequence[Sample] | None, rate: Callable[[Sample], float]) -> list[float]:
        return [rate(a) / max(_LEAST_S, rate(b)) for a, b in zip(own, other or (), strict=other is not None)]

    predicted = [one for one in stats.plans if one.predicted_tpt > 0]
    predicted_s = sum(one.num_tokens / one.predicted_tpt for one in predicted)
    measured_s = sum(one.sequence_s for one in stats.plans)
    vs_plain, reference = ratios(plain, speed), plain[0].token_ids
    return {
        "strategy": name,
        "tokens_per_s": median(map(speed, own)),
        "spread": _spread([speed(one) for one in own]),
        "speedup_vs_ar": median(vs_plain),
        "speedup_spread": _spread(vs_plain),
        "speedup_vs_hf": _median(ratios(hf, speed)),
        "end_to_end_tokens_per_s": median(map(whole_speed, own)),
        "end_to_end_speedup_vs_ar": median(ratios(plain, whole_speed)),
        "end_to_end_speedup_vs_hf": _median(ratios(hf, whole_speed)),
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "predicted_tpt": _divided(sum(one.num_tokens for one in predicted), predicted_s),
        "measured_tpt": _divided(sum(one.num_tokens for one in stats.plans), measured_s),
        "draft_share": _divided(stats.draft_s, stats.total_s),
        "verify_share": _divided(stats.verify_s, stats.total_s),
        "optimise_share": _divided(stats.optimise_s, stats.total_s),
        "identical": sum(a == b for sample in own for a, b in zip(sample.token_ids, reference, strict=True)),
        "total": len(own) * len(reference),
        "num_output_tokens": own[0].num_tokens,
        "gate_reason": stats.gate_reason or None,
        "plans": [
            {"choices": list(one.plan.choices)}
            | {name: getattr(one.plan, name) for name in ("num_draft_tokens", "num_lookup_tokens")}
            | {name: getattr(one, name) for name in _OF_PLANS}
            for one in stats.plans
        ],
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _divided(value: float, divisor: float) -> float | None:
    return value / divisor if divisor else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int | None = None) -> str:
    """Return a table. num_left: number of first columns aligned left; the others are aligned right. None: all left."""
    num_right = 0 if num_left is None else len(headings) - num_left
    rules = ["---"] * (len(headings) - num_right) + ["---:"] * num_right
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (headings, rules, *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bench_markdown(result: Mapping[str, Any]) -> str:
    """Return a page with command and hardware, all speed-ups in one table, and a table for each workload."""
    environment, options, workloads = result["environment"], result["options"], result["workloads"]
    width = f" made {options['widen']} times as wide" if options["widen"] > 1 else ""
    where = (
        f"{options['engine']['model']}{width} in {result['dtype']} on {environment['hardware']}, "
        f"{environment['threads']} threads, batch {options['batch']}, {options['max_tokens']} output tokens, "
        f"{options['repeats']} repeats. Commit {environment['commit'] or 'unknown'}, {environment['date']}."
    )
    lines = [
        "# Strategies side by side",
        "",
        f"`{environment['command']}`",
        "",
        where,
        "",
        "## Speed-up over `ar`",
        "",
        "Median over the repeats, with least and most; the best of each workload in bold.",
        "",
        markdown_table(("strategy", *(one["name"] for one in workloads)), _speedup_rows(workloads), num_left=1),
    ]
    for workload in workloads:
        lengths, rows = workload["prompt_tokens"], workload["results"]
        left_out = f", {workload['num_left_out']} longer ones left out" if workload["num_left_out"] else ""
        of_one = f"1 prompt of {lengths[0]} tokens"
        of_many = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens"
        prompts = f"{of_one if len(lengths) == 1 else of_many}{left_out}."
        lines += ["", f"## {workload['name']}", "", prompts, ""]
        cells = [[cell(row) for _, cell in _COLUMNS] for row in rows]
        lines += [markdown_table([heading for heading, _ in _COLUMNS], cells, num_left=1)]
    return "\n".join([*lines, "", f"{_NOTE}.", ""])


def _speedup_rows(workloads: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = dict.fromkeys(row["strategy"] for workload in workloads for row in workload["results"])
    rows = [[name] for name in names]
    for workload in workloads:
        found = {row["strategy"]: row for row in workload["results"]}
        best = max(row["speedup_vs_ar"] for row in found.values())
        for cells in rows:
            row = found[cells[0]]
            spread, shown = row["speedup_spread"], _shown(row["speedup_vs_ar"])
            shown = f"**{shown}**" if row["speedup_vs_ar"] == best else shown
            cells.append(f"{shown} ({spread['min']:.2f} to {spread['max']:.2f})")
    return rows


def _shown(value: float | None, form: str = "{:.2f}x") -> str:
    return "-" if value is None else form.format(value)


# Headings, and cells of a row.
_COLUMNS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("strategy", lambda row: row["strategy"]),
    ("tokens/s", lambda row: f"{row['tokens_per_s']:.1f}"),
    ("min to max", lambda row: f"{row['spread']['min']:.1f} to {row['spread']['max']:.1f}"),
    ("vs ar", lambda row: _shown(row["speedup_vs_ar"])),
    ("vs hf", lambda row: _shown(row["speedup_vs_hf"])),
    ("all/s", lambda row: f"{row['end_to_end_tokens_per_s']:.1f}"),
    ("vs ar", lambda row: _shown(row["end_to_end_speedup_vs_ar"])),
    ("vs hf", lambda row: _shown(row["end_to_end_speedup_vs_hf"])),
    ("acceptance", lambda row: _shown(row["acceptance_rate"], "{:.1%}").replace("%", " %")),
    ("tokens a round", lambda row: _shown(row["mean_accepted_length"], "{:.1f}")),
    ("identical", lambda row: f"{row['identical']} of {row['total']}"),
)


def describe_environment() -> dict[str, object]:
    """Return the command, versions (None: not installed), hardware, threads, commit of a source checkout, and date."""
    on_gpu = torch.cuda.is_available()
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES},
        "hardware": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if on_gpu else cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
    }


def _commit() -> str | None:
    """Return the commit of the checkout of this file, with a "+" if files differ from it; None without a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]  # git of PATH; the arguments are ours
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603

    try:
        git("ls-files", "--error-unmatch", __file__)  # an installed package may lie in a checkout of the user's
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
