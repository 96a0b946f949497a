"""Checks that generate text: drafted text against plain text, and the speed of strategies."""

from __future__ import annotations

from typing import Any

from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF
from rayspec.bench.run import run_bench
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.bench.selfcheck.outcome import Outcome, Table, judged, measured
from rayspec.bench.workloads import WorkloadOptions
from rayspec.config import DType, EngineConfig, SpeculationOptions

# Some middle sublayers of the bundled model's 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)
_STRATEGIES = ("knapspec", "auto", "lookup")
_CONTEXT = 384


def check_drafted_text(options: SelfcheckOptions) -> Outcome:
    """Compare texts in float32, where rounding cannot change the most likely token of these texts."""
    result = run_bench(
        _bench_options(
            options,
            strategies=("static", "auto"),
            dtype="float32",
            num_prompts=1 if options.is_quick else 3,
            max_tokens=24 if options.is_quick else 48,
            num_threads=1,  # with matrices this small a second thread is slower
        ),
        _say_nothing,
    )
    rows = result["workloads"][0]["results"]
    others = [row for row in rows if row["strategy"] != BASELINE]
    return judged(
        is_good=all(row["identical"] == row["total"] for row in others),
        found="; ".join(f"{_full_name(row)}: {row['identical']} of {row['total']} texts are plain's" for row in others),
        numbers=[{key: row[key] for key in ("strategy", "identical", "total", "acceptance_rate")} for row in rows],
        tables=[_text_table(rows)],
        counted=f"Greedy texts of the bundled model in float32, against plain decoding token by token. static skips "
        f"the sublayers {', '.join(map(str, _SKIPPED))}.",
    )


def check_strategy_speed(options: SelfcheckOptions) -> Outcome:
    strategies = _STRATEGIES[:1] if options.is_quick else _STRATEGIES
    result = run_bench(
        _bench_options(
            options,
            strategies=strategies,
            dtype=options.dtype,
            num_prompts=1,
            max_tokens=16 if options.is_quick else 48,
            num_threads=options.num_threads,
            widen=1 if options.is_quick else 4,
        ),
        _say_nothing,
    )
    rows = result["workloads"][0]["results"]
    by_name = {row["strategy"]: row for row in rows}
    best = max(rows, key=lambda row: row["speedup_vs_ar"])
    return measured(
        f"ar is {by_name[BASELINE]['speedup_vs_hf']:.2f} times as fast as transformers generate; the fastest is "
        f"{_full_name(best)}, {best['speedup_vs_ar']:.2f} times ar",
        numbers=rows,
        tables=[_speed_table(rows)],
        counted=f"The bundled model{'' if options.is_quick else ', 4 times as wide'}, summaries, one repeat: `rayspec "
        "bench` measures the same with more certainty. transformers' linear layers have torch's own layout.",
    )


def _bench_options(
    options: SelfcheckOptions,
    *,
    strategies: tuple[str, ...],
    dtype: DType,
    num_prompts: int,
    max_tokens: int,
    num_threads: int | None,
    widen: int = 1,
) -> BenchOptions:
    skip = _SKIPPED if "static" in strategies else ()
    engine = EngineConfig(
        model="demo",
        dtype=dtype,
        device=options.device,
        num_threads=num_threads,
        speculation=SpeculationOptions(strategy="static", skip=skip) if skip else SpeculationOptions(),
    )
    return BenchOptions(
        engine=engine,
        workloads=WorkloadOptions(inputs=("demo",), contexts=(_CONTEXT,), num_prompts=num_prompts),
        strategies=strategies,
        max_tokens=max_tokens,
        batch=1,
        repeats=1,
        widen=widen,
        hf=True,
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


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        headings=["strategy", "tokens/s", "vs ar", "vs transformers", "acceptance", "same texts"],
        rows=[
            [
                _full_name(row),
                f"{row['tokens_per_s']:.1f}",
                f"{row['speedup_vs_ar']:.2f}x",
                f"{row['speedup_vs_hf']:.2f}x",
                _percent(row["acceptance_rate"]),
                f"{row['identical']} of {row['total']}",
            ]
            for row in rows
        ],
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
