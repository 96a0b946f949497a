"""The commands that measure and check: `rayspec bench` and `rayspec selfcheck`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import EXIT_FAILED, clean_exit, output_console, say
from rayspec.config import DType

app = typer.Typer()

# Also of the scripts in benchmarks/.
MaxTokens = Annotated[int, typer.Option(min=2, help="output tokens of a prompt")]
NumPrompts = Annotated[int, typer.Option(min=1, help="of each workload, at most")]
Batch = Annotated[int, typer.Option(min=1, help="sequences decoded at once")]
Repeats = Annotated[int, typer.Option(min=1, help="rounds in which everything is measured once")]
Widen = Annotated[int, typer.Option(min=1, help="make the model so many times as wide, with the same text")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
ComparedType = Annotated[DType, typer.Option(help="compared in addition to float32", show_choices=False)]
NumThreads = Annotated[int, typer.Option(min=1, help="torch CPU threads; models this small run best with 1")]
Quick = Annotated[bool, typer.Option("--quick", help="fewer models and sizes")]
Json = Annotated[Path | None, typer.Option(help="file to write the numbers to")]


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
    seed: Annotated[int, typer.Option("--workload-seed", help="of the bundled prompts")] = 0,
    widen: Widen = 1,
    plans: Annotated[
        list[str] | None,
        typer.Option(metavar="STRATEGY=FILE", help="saved plans for one strategy, as self-sd=plans.json; repeatable"),
    ] = None,
    hf: Annotated[bool, typer.Option(help="compare with transformers generate")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder for results.json and results.md, renewed as it goes")
    ] = None,
    json: Json = None,
) -> None:
    """Compare strategies, and transformers generate, on the same prompts in the same run.

    'all' names the strategies that need no further option, those that --plans has a file for, and static with --skip.
    """
    with clean_exit():
        from rayspec.bench.options import bench_options, numbers  # noqa: PLC0415 - brings pyarrow
        from rayspec.bench.result import bench_markdown, save_json  # noqa: PLC0415
        from rayspec.bench.run import run_bench  # noqa: PLC0415 - brings torch
        from rayspec.bench.workloads import WorkloadOptions  # noqa: PLC0415

        def keep(result: dict[str, Any]) -> None:
            if output is not None:
                save_json(result, output / "results.json")
                (output / "results.md").write_text(bench_markdown(result), encoding="utf-8")
            if json is not None:
                save_json(result, json)

        workloads = WorkloadOptions(
            inputs=tuple(inputs or ("demo",)),
            contexts=numbers("context", context, int),
            num_prompts=num_prompts,
            seed=seed,
        )
        options = bench_options(
            asked,
            workloads,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
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
    num_threads: NumThreads = 1,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Check an installation on this device: texts with drafts are those of plain decoding and of transformers.

    Exit code 1 if any check failed.
    """
    with clean_exit():
        # Imported here, so that other commands do not wait for torch.
        from rayspec.bench.result import markdown_table  # noqa: PLC0415
        from rayspec.bench.selfcheck import CHECKS, SelfcheckOptions, run_selfcheck, save_outcomes  # noqa: PLC0415

        options = SelfcheckOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick)
        outcomes = run_selfcheck(options, say, checks=CHECKS)
        if json is not None:
            save_outcomes(outcomes, options, json)
        rows = [[name, one.status, f"{seconds:.1f}", one.found] for name, (one, seconds) in outcomes.items()]
        table = markdown_table(("check", "status", "seconds", "found"), rows)
        output_console().print(table, markup=False, highlight=False, soft_wrap=True)
    if any(outcome.status == "failed" for outcome, _ in outcomes.values()):
        raise typer.Exit(EXIT_FAILED)
