"""The check that generates text: drafted text against plain text."""

from __future__ import annotations

from typing import Any

from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF
from rayspec.bench.run import run_bench
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, Table, judged
from rayspec.bench.workloads import WorkloadOptions
from rayspec.config import EngineConfig, SpeculationOptions

# Some middle sublayers of the bundled model's 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)
_CONTEXT = 384


def check_drafted_text(options: SelfcheckOptions) -> Outcome:
    """Compare texts in float32, where rounding cannot change the most likely token of these texts."""
    engine = EngineConfig(
        model="demo",
        dtype="float32",
        device=options.device,
        num_threads=1,  # with matrices this small a second thread is slower
        speculation=SpeculationOptions(strategy="static", skip=_SKIPPED),
    )
    asked = BenchOptions(
        engine=engine,
        workloads=WorkloadOptions(inputs=("demo",), contexts=(_CONTEXT,), num_prompts=1 if options.is_quick else 3),
        strategies=("static", "auto"),
        max_tokens=24 if options.is_quick else 48,
        batch=1,
        repeats=1,
        widen=1,
        hf=True,
    )
    rows = run_bench(asked, _say_nothing)["workloads"][0]["results"]
    others = [row for row in rows if row["strategy"] != BASELINE]
    return judged(
        is_good=all(row["identical"] == row["total"] for row in others),
        found="; ".join(f"{_full_name(row)}: {row['identical']} of {row['total']} texts are plain's" for row in others),
        numbers=[{key: row[key] for key in ("strategy", "identical", "total", "acceptance_rate")} for row in rows],
        tables=[_text_table(rows)],
        counted=f"Greedy texts of the bundled model in float32, against plain decoding token by token. static skips "
        f"the sublayers {', '.join(map(str, _SKIPPED))}.",
    )


def _say_nothing(line: str) -> None:
    """Drop the benchmark's progress: the self-check prints one line for each check."""


def _full_name(row: dict[str, Any]) -> str:
    return "transformers generate" if row["strategy"] == HF else str(row["strategy"])


def _text_table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        headings=["written by", "same texts", "acceptance"],
        rows=[
            [_full_name(row), f"{row['identical']} of {row['total']}", _percent(row["acceptance_rate"])] for row in rows
        ],
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
