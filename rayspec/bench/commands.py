"""The commands that measure and check: `rayspec bench` and `rayspec selfcheck`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import EXIT_FAILED, clean_exit, output_console, say
from rayspec.config import DType

if TYPE_CHECKING:
    from rayspec.bench.selfcheck.checks import Check

app = typer.Typer()

# Also of the scripts in benchmarks/.
MaxTokens = Annotated[int, typer.Option(min=2, help="output tokens of a prompt")]
NumPrompts = Annotated[int, typer.Option(min=1, help="of each workload, at most")]
Batch = Annotated[int, typer.Option(min=1, help="sequences decoded at once")]
Repeats = Annotated[int, typer.Option(min=1, help="rounds in which everything is measured once")]
Widen = Annotated[int, typer.Option(min=1, help="make the model so many times as wide, with the same text")]
Threads = Annotated[int | None, typer.Option(min=1, help="the same as --num-threads")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
ComparedType = Annotated[DType, typer.Option(help="compared in addition to float32", show_choices=False)]
NumThreads = Annotated[int | None, typer.Option(min=1, help="torch CPU threads")]
Quick = Annotated[bool, typer.Option("--quick", help="fewer models and sizes")]
OutFolder = Annotated[Path | None, typer.Option(help="folder for selfcheck.md and selfcheck.json")]


@app.command()
@with_settings()
def bench(
    *,
    asked: Asked,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="a file of documents, a Spec-Bench question file, or demo:DOMAIN of summary, question, ledger, "
            "schedule, all; repeatable  [default: demo]",
        ),
    ] = None,
    context: Annotated[
        str, typer.Option(help="prompt tokens, several with commas; documents are cut, questions left out")
    ] = "1024",
    strategies: Annotated[
        str, typer.Option(help="what to compare, with commas, or 'all'; 'ar' always runs")
    ] = "ar,knapspec",
    max_tokens: MaxTokens = 128,
    num_prompts: NumPrompts = 4,
    batch: Batch = 1,
    repeats: Repeats = 3,
    stream: Annotated[
        str | None,
        typer.Option(
            help="a workload for each of these ratios, with commas, instead of one for each input: prompts one by "
            "one, with that probability of another domain than the one before"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--workload-seed", help="of the bundled prompts and of streams")] = 0,
    widen: Widen = 1,
    threads: Threads = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STRATEGY=FILE", help="saved plans for one strategy, rather than --warm-start's; repeatable"
        ),
    ] = None,
    hf: Annotated[bool, typer.Option(help="compare with transformers generate")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder for results.json and results.md, renewed as it goes")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Compare strategies, and transformers generate, on the same prompts in the same run.

    'all' names the strategies that need no further option. With --warm-start or --plans it includes the strategies that
    use saved plans, self-sd and knn-ssd; --warm-start affects only these two. With --skip it includes static.
    """
    with clean_exit():
        from rayspec.bench.options import bench_options, workload_options  # noqa: PLC0415 - brings pyarrow
        from rayspec.bench.result import bench_markdown, save_json  # noqa: PLC0415
        from rayspec.bench.run import run_bench  # noqa: PLC0415 - brings torch

        def keep(result: dict[str, Any]) -> None:
            if output is not None:
                save_json(result, output / "results.json")
                (output / "results.md").write_text(bench_markdown(result), encoding="utf-8")
            if json is not None:
                save_json(result, json)

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
        result = run_bench(options, say, keep=keep)
        output_console().print(bench_markdown(result), markup=False, highlight=False, soft_wrap=True)


@app.command()
def selfcheck(
    *,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
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
    with clean_exit():
        # Imported here, so that other commands do not wait for torch.
        from rayspec.bench.selfcheck.checks import CHECKS, run_selfcheck  # noqa: PLC0415
        from rayspec.bench.selfcheck.report import SelfcheckOptions  # noqa: PLC0415

        options = SelfcheckOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick)
        report = run_selfcheck(options, say, checks=CHECKS if checks is None else checks)
        if out is not None:
            report.save(out)
        output_console().print(report.as_markdown(), markup=False, highlight=False, soft_wrap=True)
    if report.has_failed:
        raise typer.Exit(EXIT_FAILED)
