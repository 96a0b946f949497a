"""The commands that measure and check: `rayspec bench` and `rayspec selfcheck`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rayspec.bench.options import BenchOptions, bench_options
from rayspec.command.options import Asked, Json, LongCommand, with_settings
from rayspec.command.terminal import EXIT_FAILED, check_output, output_console, save_json, say
from rayspec.config import DType

app = typer.Typer()

# Also of the scripts in benchmarks/.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
ComparedType = Annotated[DType, typer.Option(help="compared in addition to float32", show_choices=False)]
Quick = Annotated[bool, typer.Option("--quick", help="fewer models and sizes")]


@app.command(cls=LongCommand)
@with_settings(own=(BenchOptions, "Benchmark"))
def bench(
    *,
    asked: Asked,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="folder for results.json and results.md, renewed as it goes")
    ] = None,
    json: Json = None,
) -> None:
    """Compare strategies, and transformers generate, on the same prompts in the same run.

    'all' names the strategies that need no further option, those that --plans has a file for, and static with --skip.
    """
    from rayspec.bench.result import bench_markdown  # noqa: PLC0415
    from rayspec.bench.run import run_bench  # noqa: PLC0415 - brings torch

    def keep(result: dict[str, Any]) -> None:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            save_json(result, output / "results.json")
            (output / "results.md").write_text(bench_markdown(result), encoding="utf-8")
        save_json(result, json)

    options = bench_options(asked, **asked.given)
    check_output(output and output / "results.json", "output")
    result = run_bench(options, say, keep=keep)
    output_console().print(bench_markdown(result), highlight=False, soft_wrap=True)


@app.command()
def selfcheck(
    *,
    device: Device = "auto",
    dtype: ComparedType = "bfloat16",
    num_threads: Annotated[
        int, typer.Option(min=1, max=4096, help="torch CPU threads; such small models run best with 1")
    ] = 1,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Check an installation on this device: texts with drafts are those of plain decoding and of transformers.

    Exit code 1 if any check failed.
    """
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.result import markdown_table  # noqa: PLC0415
    from rayspec.bench.run import run_selfcheck  # noqa: PLC0415

    found = run_selfcheck(device=device, dtype=dtype, num_threads=num_threads, quick=quick, say=say)
    save_json(found, json)
    rows = [[one["name"], one["status"], f"{one['seconds']:.1f}", one["found"]] for one in found["checks"]]
    table = markdown_table(("check", "status", "seconds", "found"), rows)
    output_console().print(table, highlight=False, soft_wrap=True)
    if not found["ok"]:
        raise typer.Exit(EXIT_FAILED)
