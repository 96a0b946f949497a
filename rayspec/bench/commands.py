"""The commands that measure: `rayspec bench` and `rayspec bench-*`, `rayspec selfcheck` and `rayspec figures`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from rayspec.bench.options import (
    AllStrategies,
    Batch,
    BenchInputs,
    Context,
    Contexts,
    Hf,
    Input,
    Json,
    MaxTokens,
    NumPrompts,
    OutputFolder,
    Plans,
    Repeats,
    Seed,
    Strategies,
    Stream,
    Threads,
    Widen,
    bench_options,
    numbers,
    workload_options,
)
from rayspec.bench.papers.run import run_paper
from rayspec.bench.report import bench_tables, save_report
from rayspec.bench.result import save_bench
from rayspec.bench.workloads import WorkloadOptions
from rayspec.command.exit_codes import EXIT_FAILED
from rayspec.command.loading import load_llm
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import clean_exit, output_console, say
from rayspec.config import DType, EngineConfig

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
    paper: Annotated[
        bool,
        typer.Option("--paper", help="run nothing: published speed-ups beside our predictions; only --json counts"),
    ] = False,
) -> None:
    """Compare strategies, and transformers generate, on the same prompts in the same run.

    'all' names the strategies that need no further option. With --warm-start or --plans it includes the strategies that
    use saved plans, self-sd and knn-ssd; --warm-start affects only these two. With --skip it includes static.
    """
    if paper:
        output_console().print(run_paper(json), markup=False, highlight=False, soft_wrap=True)
        return
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
@with_settings()
def bench_pipeline(
    *,
    asked: Asked,
    cases: Annotated[str, typer.Option(help="stages x cohorts, with commas")] = "1x1,2x1,2x4",
    input_: Input = "demo",
    context: Context = 256,
    strategies: Strategies = "ar,knapspec",
    max_tokens: MaxTokens = 128,
    batch: Annotated[int, typer.Option(min=1, help="sequences of a cohort")] = 1,
    repeats: Repeats = 3,
    widen: Widen = 1,
    json: Json = None,
) -> None:
    """Compare a model cut into stages, with one or more cohorts under way, with the model in one process.

    Exit code 1 if any output differs from the tokens of plain decoding in one process.
    """
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.pipeline import num_prompts_for, parse_cases, run_pipeline_bench  # noqa: PLC0415
    from rayspec.bench.pipeline_result import pipeline_markdown  # noqa: PLC0415

    with clean_exit():
        parsed = parse_cases(cases)
        workloads = WorkloadOptions(inputs=(input_,), contexts=(context,), num_prompts=num_prompts_for(parsed, batch))
        options = bench_options(
            asked,
            workloads,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
        )
        result = run_pipeline_bench(options, parsed, say)
        _tell(result, pipeline_markdown(result), json)


@app.command()
@with_settings()
def bench_data(
    *,
    asked: Asked,
    input_: Input = "demo",
    rows: Annotated[int, typer.Option(min=1, help="documents")] = 64,
    context: Context = 512,
    strategies: Annotated[str, typer.Option(help="of the engines; one")] = "ar",
    max_tokens: MaxTokens = 64,
    batch: Batch = 8,
    repeats: Repeats = 3,
    widen: Widen = 1,
    json: Json = None,
) -> None:
    """Compare a Ray Data job with an engine in this process, on the same documents.

    Exit code 1 if any text differs.
    """
    from rayspec.bench.data import data_markdown, run_data_bench  # noqa: PLC0415 - brings torch and ray

    with clean_exit():
        workloads = WorkloadOptions(inputs=(input_,), contexts=(context,), num_prompts=rows)
        options = bench_options(
            asked,
            workloads,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
        )
        result = run_data_bench(options, say)
        _tell(result, data_markdown(result), json)


@app.command()
def bench_feed(
    *,
    rows: Annotated[int, typer.Option(min=1)] = 20_000,
    engines: Annotated[int, typer.Option(min=1, help="each an actor of its own")] = 4,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="rows that an engine takes at once")] = 64,
    row_s: Annotated[float, typer.Option(min=0.0, help="seconds that an engine takes for a row")] = 0.0,
    words: Annotated[int, typer.Option(min=2, help="of a document")] = 200,
    output_words: Annotated[int, typer.Option(min=1, help="of a result")] = 100,
    json: Json = None,
) -> None:
    """Measure the overhead of a job: send rows through its whole path, to engines that only wait. Report how many rows
    one driver feeds per second, and which process is the busiest."""
    from rayspec.bench.feed import FeedOptions, feed_markdown, run_feed_bench  # noqa: PLC0415 - brings ray

    with clean_exit():
        options = FeedOptions(
            num_rows=rows,
            num_engines=engines,
            max_num_seqs=max_num_seqs,
            row_s=row_s,
            words=words,
            output_words=output_words,
        )
        result = run_feed_bench(options, say)
        output_console().print(feed_markdown(result), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_bench(result, json)


@app.command()
def bench_serve(
    *,
    url: Annotated[str, typer.Option(help="of the endpoint, without /v1")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="its name at the endpoint")] = "demo",
    api_key: Annotated[str | None, typer.Option(envvar="RAYSPEC_API_KEY", help="of the endpoint")] = None,
    num_requests: Annotated[int, typer.Option(min=1)] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="requests under way at once")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="of a request, at most; they differ")] = 64,
    cut_share: Annotated[float, typer.Option(min=0, max=1, help="of requests that the client leaves")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the mixture: chats and completions, streamed and not, ...")] = 0,
    check: Annotated[
        str | None, typer.Option(help="load this model here too, in float32, and hold every text against it")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Measure an endpoint under a mixed load: time to the first text, between events, and of whole answers.

    Exit code 1 if a request got no answer, or a text differs from that of the `--check` model.
    """
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.serve import (  # noqa: PLC0415
        ServeBenchOptions,
        run_serve_bench,
        serve_bench_table,
        succeeded,
    )
    from rayspec.bench.serve_mix import Mix  # noqa: PLC0415

    with clean_exit(), ExitStack() as stack:
        mix = Mix(model=model, num_requests=num_requests, max_tokens=max_tokens, cut_share=cut_share, seed=seed)
        options = ServeBenchOptions(url=url, api_key=api_key, mix=mix, concurrency=concurrency)
        exact = EngineConfig(model=check, dtype="float32") if check is not None else None
        offline = stack.enter_context(load_llm(exact)) if exact is not None else None
        result = run_serve_bench(options, offline, say)
        output_console().print(serve_bench_table(result), highlight=False)
        if json is not None:
            save_bench(result, json)
    if not succeeded(result):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def selfcheck(
    *,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[
        DType, typer.Option(help="of what is timed; logits are compared in float32, too", show_choices=False)
    ] = "bfloat16",
    num_threads: Annotated[int | None, typer.Option(min=1, help="torch CPU threads")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer models, sizes and repeats")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for selfcheck.md and selfcheck.json")] = None,
) -> None:
    """Check an installation on this device: all implementations compute the same, drafted text equals plain text, and
    launches can be captured. Measure how fast weights are read, and how long steps and strategies take.

    Exit code 1 if any check failed. Run nothing else at the same time.
    """
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.selfcheck.options import SelfcheckOptions  # noqa: PLC0415
    from rayspec.bench.selfcheck.run import run_selfcheck  # noqa: PLC0415

    with clean_exit():
        options = SelfcheckOptions(device=device, dtype=dtype, num_threads=num_threads, is_quick=quick)
        report = run_selfcheck(options, say)
        if out is not None:
            report.save(out)
        output_console().print(report.as_markdown(), markup=False, highlight=False, soft_wrap=True)
    if report.has_failed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
@with_settings()
def figures(
    *,
    asked: Asked,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for pictures, figures.md and figures.json")],
    bench: Annotated[
        Path | None, typer.Option(help="results.json of `rayspec bench`, for speed-ups by context and by mix")
    ] = None,
    only: Annotated[
        str, typer.Option(help="with commas, of speedup, tpt, skips, thresholds, intervals; all that are possible")
    ] = "",
    domains: Annotated[
        str, typer.Option(help="of the bundled prompts, with commas: summary, question, ledger, schedule")
    ] = "summary",
    context: Annotated[int, typer.Option(min=2, help="tokens of a prompt, but for skips")] = 384,
    contexts: Annotated[str, typer.Option(help="tokens of a prompt, for skips")] = "512,1024,2048,4096",
    max_tokens: Annotated[int, typer.Option(min=2, help="output tokens of a prompt")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="of each experiment, of the domains in turn")] = 2,
    num_plans: Annotated[int, typer.Option(min=1, help="sets of sublayers, for tpt")] = 16,
    draft_lengths: Annotated[str, typer.Option(help="at which each of these runs")] = "3,8",
    thresholds: Annotated[str, typer.Option(help="confidences below which drafts end")] = "0,0.3,0.5,0.7,0.8,0.9,0.97",
    intervals: Annotated[str, typer.Option(help="tokens between searches")] = "8,16,32,64,128",
    shares: Annotated[str, typer.Option(help="of the time, for searches")] = "0.005,0.01,0.02,0.05,0.2",
    seed: Seed = 0,
    widen: Widen = 1,
    threads: Threads = None,
) -> None:
    """Run the experiments of the KnapSpec paper, and plot them. They show predicted against measured speed, skipped
    sublayers by context, the threshold at which drafts end, and the interval between plan searches."""
    # Imported here, so that other commands do not wait for torch.
    from rayspec.bench.figures.run import FigureOptions, run_figures  # noqa: PLC0415

    with clean_exit():
        asked.flags["num_threads"] = threads if threads is not None else asked.flags["num_threads"]
        options = FigureOptions(
            engine=asked.settings().engine,
            output=output,
            bench=bench,
            only=tuple(name.strip() for name in only.split(",") if name.strip()),
            widen=widen,
            domains=tuple(name.strip() for name in domains.split(",") if name.strip()),
            context=context,
            contexts=numbers("contexts", contexts, int),
            max_tokens=max_tokens,
            num_prompts=num_prompts,
            num_plans=num_plans,
            draft_lengths=numbers("draft_lengths", draft_lengths, int),
            thresholds=numbers("thresholds", thresholds, float),
            intervals=numbers("intervals", intervals, int),
            shares=numbers("shares", shares, float),
            seed=seed,
        )
        output_console().print(run_figures(options, say), highlight=False, soft_wrap=True)


def _tell(result: dict[str, Any], text: str, file: Path | None) -> None:
    """Print `text` and write `result` to `file`. Raises typer.Exit with the code of failure if outputs differ."""
    output_console().print(text, markup=False, highlight=False, soft_wrap=True)
    if file is not None:
        save_bench(result, file)
    if any(row["identical"] < row["total"] for row in result["results"]):
        raise typer.Exit(EXIT_FAILED)


def _keep_bench(result: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    if folder is not None:
        save_report(result, folder)
    if file is not None:
        save_bench(result, file)
