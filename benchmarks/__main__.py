"""`python -m benchmarks NAME`, from the root of a checkout; `--help` lists the names and their options."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.data import data_markdown, run_data_bench
from benchmarks.feed import FeedOptions, feed_markdown, run_feed_bench
from benchmarks.figures.run import FigureOptions, run_figures
from benchmarks.papers.run import run_paper
from benchmarks.pipeline import num_prompts_for, parse_cases, run_pipeline_bench
from benchmarks.pipeline_result import pipeline_markdown
from benchmarks.serve import (
    ServeBenchOptions,
    run_serve_bench,
    serve_bench_table,
    succeeded,
)
from benchmarks.serve_mix import Mix
from benchmarks.shared import (
    Batch,
    Context,
    Input,
    Json,
    MaxTokens,
    Repeats,
    Seed,
    Strategies,
    Widen,
    conclude,
    numbers,
)
from benchmarks.streams import run_streams
from rayspec.bench.options import bench_options
from rayspec.bench.result import bench_markdown
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import EXIT_FAILED, clean_exit, load_llm, output_console, save_json, say
from rayspec.config import EngineConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def papers(*, json: Json = None) -> None:
    """Print published speed-ups next to our predictions. Runs nothing."""
    with clean_exit():
        output_console().print(run_paper(json), markup=False, highlight=False, soft_wrap=True)


@app.command()
@with_settings()
def pipeline(
    *,
    asked: Asked,
    cases: Annotated[str, typer.Option(help="stages x microbatches, with commas")] = "1x1,2x1,2x4",
    input_: Input = "demo",
    context: Context = 256,
    strategies: Strategies = "ar,knapspec",
    max_tokens: MaxTokens = 128,
    batch: Annotated[int, typer.Option(min=1, help="sequences of a microbatch")] = 1,
    repeats: Repeats = 3,
    widen: Widen = 1,
    json: Json = None,
) -> None:
    """Compare a model cut into stages, with one or more microbatches under way, with the model in one process.

    Exit code 1 if any output differs from the tokens of plain decoding in one process.
    """

    with clean_exit():
        parsed = parse_cases(cases)
        options = bench_options(
            asked,
            input=(input_,),
            context=(context,),
            num_prompts=num_prompts_for(parsed, batch),
            hf=False,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
        )
        result = run_pipeline_bench(options, parsed, say)
        conclude(result, pipeline_markdown(result), json)


@app.command()
@with_settings()
def data(
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

    with clean_exit():
        options = bench_options(
            asked,
            input=(input_,),
            context=(context,),
            num_prompts=rows,
            hf=False,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=batch,
            repeats=repeats,
            widen=widen,
        )
        result = run_data_bench(options, say)
        conclude(result, data_markdown(result), json)


@app.command()
@with_settings()
def streams(
    *,
    asked: Asked,
    inputs: Annotated[list[str], typer.Option("--input", help="as of `rayspec bench`: two domains or more")],
    ratios: Annotated[str, typer.Option(help="chances that a prompt is of another domain, with commas")] = "0,0.5,1",
    context: Context = 512,
    strategies: Strategies = "ar,knapspec",
    max_tokens: MaxTokens = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="of each stream")] = 8,
    repeats: Repeats = 2,
    widen: Widen = 1,
    seed: Seed = 0,
    plans: Annotated[list[str] | None, typer.Option(metavar="STRATEGY=FILE", help="as of `rayspec bench`")] = None,
    json: Json = None,
) -> None:
    """Compare strategies on streams of prompts, one by one, whose domain changes now and then (KNN-SSD, section 4)."""

    with clean_exit():
        options = bench_options(
            asked,
            input=inputs,
            context=(context,),
            num_prompts=num_prompts,
            workload_seed=seed,
            hf=False,
            strategies=strategies,
            max_tokens=max_tokens,
            batch=1,
            repeats=repeats,
            widen=widen,
            plans=plans or {},
        )
        result = run_streams(options, numbers("ratios", ratios, float), say)
        output_console().print(bench_markdown(result), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_json(result, json)


@app.command()
def feed(
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
            save_json(result, json)


@app.command()
def serve(
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

    with clean_exit(), ExitStack() as stack:
        mix = Mix(model=model, num_requests=num_requests, max_tokens=max_tokens, cut_share=cut_share, seed=seed)
        options = ServeBenchOptions(url=url, api_key=api_key, mix=mix, concurrency=concurrency)
        exact = EngineConfig(model=check, dtype="float32") if check is not None else None
        offline = stack.enter_context(load_llm(exact)) if exact is not None else None
        result = run_serve_bench(options, offline, say)
        output_console().print(serve_bench_table(result), highlight=False)
        if json is not None:
            save_json(result, json)
    if not succeeded(result):
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
) -> None:
    """Run the experiments of the KnapSpec paper, and plot them. They show predicted against measured speed, skipped
    sublayers by context, the threshold at which drafts end, and the interval between plan searches."""

    with clean_exit():
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


if __name__ == "__main__":
    app()
