"""The commands that measure: `rayspec bench` and `rayspec selfcheck`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rayspec.bench.options import (
    AllStrategies,
    Batch,
    BenchInputs,
    Contexts,
    Device,
    Hf,
    Json,
    MaxTokens,
    NumPrompts,
    NumThreads,
    OutFolder,
    OutputFolder,
    Plans,
    Quick,
    Repeats,
    Seed,
    Stream,
    Threads,
    TimedType,
    Widen,
    bench_options,
    workload_options,
)
from rayspec.bench.report import bench_tables, save_report
from rayspec.bench.result import save_bench
from rayspec.command.exit_codes import EXIT_FAILED
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import clean_exit, output_console, say
from rayspec.config import DType

if TYPE_CHECKING:
    from rayspec.bench.selfcheck.run import Check

app = typer.Typer()


@app.command()
@with_settings()
def bench(
    *,
    asked: Asked,
    inputs: BenchInputs = None,
    context: Contexts = "1024",
    strategies: AllStrategies = "ar,knapspec",
    max_tokens: MaxTokens = 128,
    num_prompts: NumPrompts = 4,
    batch: Batch = 1,
    repeats: Repeats = 3,
    stream: Stream = None,
    seed: Seed = 0,
    widen: Widen = 1,
    threads: Threads = None,
    plans: Plans = None,
    hf: Hf = True,
    output: OutputFolder = None,
    json: Json = None,
) -> None:
    """Compare strategies, and transformers generate, on the same prompts in the same run.

    'all' names the strategies that need no further option. With --warm-start or --plans it includes the strategies that
    use saved plans, self-sd and knn-ssd; --warm-start affects only these two. With --skip it includes static.
    """
    from rayspec.bench.run import run_bench  # noqa: PLC0415 - brings torch, which others wait for

    with clean_exit():
        workloads = workload_options(inputs, context, num_prompts=num_prompts, mix_ratios=stream, seed=seed)
        options = bench_options(
            asked,
            workloads,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
            threads=threads,
            plans=plans,
            hf=hf,
        )
        result = run_bench(options, say, keep=lambda found: _keep_bench(found, output, json))
        output_console().print(bench_tables(result))


@app.command()
def selfcheck(
    *,
    device: Device = "auto",
    dtype: TimedType = "bfloat16",
    num_threads: NumThreads = None,
    quick: Quick = False,
    out: OutFolder = None,
) -> None:
    """Check an installation on this device: all implementations compute the same, drafted text equals plain text, and
    launches can be captured.

    Exit code 1 if any check failed.
    """
    run_checks(device, dtype, num_threads or 1, quick, out)  # a second thread makes models this small slower


def run_checks(
    device: str,
    dtype: DType,
    num_threads: int | None,
    quick: bool,
    out: Path | None,
    *,
    checks: Mapping[str, Check] | None = None,
) -> None:
    """Run the checks, by default those of `selfcheck`; print their report, and save it in `out`. Raises typer.Exit with
    the code of failure if any failed."""
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.selfcheck.options import SelfcheckOptions  # noqa: PLC0415
    from rayspec.bench.selfcheck.run import CHECKS, run_selfcheck  # noqa: PLC0415

    with clean_exit():
        options = SelfcheckOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick)
        report = run_selfcheck(options, say, checks=CHECKS if checks is None else checks)
        if out is not None:
            report.save(out)
        output_console().print(report.as_markdown(), markup=False, highlight=False, soft_wrap=True)
    if report.has_failed:
        raise typer.Exit(EXIT_FAILED)


def _keep_bench(result: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    if folder is not None:
        save_report(result, folder)
    if file is not None:
        save_bench(result, file)
