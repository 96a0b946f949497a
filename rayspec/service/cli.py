"""The `rayspec` command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import rayspec
from rayspec import demo
from rayspec.config import EngineConfig, ParallelOptions, SamplingParams, TuningOptions
from rayspec.service.batch import complete
from rayspec.service.bench.options import (
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
from rayspec.service.bench.report import bench_tables, save_report
from rayspec.service.bench.result import save_bench
from rayspec.service.bench.workloads import WorkloadOptions
from rayspec.service.documents import Columns, Document, read_documents
from rayspec.service.k8s.command import app as k8s_app
from rayspec.service.latency_table import latency_table, stage_table
from rayspec.service.loading import load_llm
from rayspec.service.options import Asked, with_settings
from rayspec.service.papers.run import run_paper
from rayspec.service.progress import showing_progress
from rayspec.service.prompts import SUMMARY_SAMPLING, PromptBuilder, fitting_prompt_tokens, summary_prompt
from rayspec.service.report import RunReport
from rayspec.service.results import check_output, open_writer, save_config
from rayspec.service.settings import Settings
from rayspec.service.tally import EXIT_FAILED
from rayspec.service.terminal import clean_exit, error_console, exit_on_sigterm, output_console
from rayspec.types import ConfigError

app = typer.Typer(
    name="rayspec",
    help="Lossless, training-free speed-up of Hugging Face causal LMs: the model drafts for itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(k8s_app, name="k8s")

_EPILOG = """Exit codes: 0 every row succeeded, 1 none did or the engine failed, 2 usage, 3 some rows failed,
130 interrupted and 143 terminated, with the rows so far in the output."""

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help="files (.txt, .md, .jsonl, .ndjson, .parquet), folders or patterns"),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write: .jsonl or .parquet")]
IdColumn = Annotated[
    str | None,
    typer.Option(help="column of the row's id; without it: 'id' where there is one, else the file and row number"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="stop after so many rows")]
Truncate = Annotated[bool, typer.Option(help="cut what is longer than the context at its end, instead of failing it")]
Overwrite = Annotated[bool, typer.Option(help="replace an output that exists")]
Report = Annotated[Path | None, typer.Option(help="folder for a report and a picture of the plans")]


@app.command(epilog=_EPILOG)
@with_settings(sampling=SUMMARY_SAMPLING)
def summarize(
    *,
    asked: Asked,
    inputs: Inputs,
    output: Output,
    text_column: Annotated[str, typer.Option(help="column of the document's text")] = "text",
    id_column: IdColumn = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="what to ask; {text} stands for the document")
    ] = None,
    truncate: Truncate = False,
    limit: Limit = None,
    overwrite: Overwrite = False,
    report: Report = None,
) -> None:
    """Summarize documents: a row each, in a .jsonl or .parquet file. A .txt file is one document."""
    with clean_exit():
        settings = asked.settings()
        job = _Job(settings, inputs, output, overwrite=overwrite, report=report, text_column="summary")
        job.run(
            Columns(text=text_column, id=id_column),
            template=prompt or summary_prompt(settings.engine.model),
            chat=True,
            truncate=truncate,
            limit=limit,
        )


@app.command(epilog=_EPILOG)
@with_settings(sampling=SamplingParams())
def generate(
    *,
    asked: Asked,
    inputs: Inputs,
    output: Output,
    prompt_column: Annotated[str, typer.Option(help="column of the prompt")] = "prompt",
    messages_column: Annotated[str, typer.Option(help="column of chat messages, used where present")] = "messages",
    id_column: IdColumn = None,
    chat: Annotated[bool, typer.Option(help="put prompts through the chat template as a user's message")] = False,
    truncate: Truncate = False,
    limit: Limit = None,
    overwrite: Overwrite = False,
    report: Report = None,
) -> None:
    """Complete prompts and answer chats: a row each, in a .jsonl or .parquet file. A .txt file is one prompt."""
    with clean_exit():
        job = _Job(asked.settings(), inputs, output, overwrite=overwrite, report=report, text_column="text")
        columns = Columns(text=prompt_column, id=id_column, messages=messages_column)
        job.run(columns, template="{text}", chat=chat, truncate=truncate, limit=limit)


@app.command()
@with_settings()
def profile(
    *,
    asked: Asked,
    cluster: Annotated[
        bool, typer.Option(help="measure the shards and the links of a pipeline: --stages, --tensor")
    ] = False,
) -> None:
    """Measure what a forward costs here, sublayer by sublayer; print and save it. Plans are chosen by these numbers.

    Nothing else should run meanwhile.
    """
    with clean_exit():
        settings = asked.settings()
        config = settings.engine.replace(remeasure=True)
        if cluster and config.parallel is None:
            config = config.replace(parallel=ParallelOptions())
        with load_llm(config) as llm:
            if llm.engine.latency is None:
                raise ConfigError(
                    f"model {settings.engine.model!r} runs with strategy {llm.config.speculation.strategy!r}, which "
                    "needs no profile: use --strategy knapspec, with a model whose layers split into sublayers"
                )
            console = output_console()
            console.print(latency_table(llm.engine.latency, max_context=llm.engine.max_model_len))
            if config.parallel is not None:
                console.print(stage_table(llm.engine.latency))


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

    'all' are the strategies that need nothing further; with --warm-start or --plans also those that go by saved plans
    (self-sd and knn-ssd, which alone get those of --warm-start), with --skip static.
    """
    if paper:
        output_console().print(run_paper(json), markup=False, highlight=False, soft_wrap=True)
        return
    from rayspec.service.bench.run import run_bench  # noqa: PLC0415 - brings torch, which others wait for

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
        result = run_bench(options, _say, keep=lambda found: _keep_bench(found, output, json))
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
    """Compare cuts of a model into stages, with so many cohorts under way, with the model in one process.

    Exit code 1 if any output has other tokens than plain decoding in one process.
    """
    # They bring torch, which others wait for.
    from rayspec.service.bench.pipeline import num_prompts_for, parse_cases, run_pipeline_bench  # noqa: PLC0415
    from rayspec.service.bench.pipeline_result import pipeline_markdown  # noqa: PLC0415

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
        result = run_pipeline_bench(options, parsed, _say)
        output_console().print(pipeline_markdown(result), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_bench(result, json)
    if any(row["identical"] < row["total"] for row in result["results"]):
        raise typer.Exit(EXIT_FAILED)


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
    """Compare documents through Ray Data, as in a job, with the same documents through an engine in this process.

    Exit code 1 if any text differs.
    """
    from rayspec.service.bench.data import data_markdown, run_data_bench  # noqa: PLC0415 - brings torch and ray

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
        result = run_data_bench(options, _say)
        output_console().print(data_markdown(result), markup=False, highlight=False, soft_wrap=True)
        if json is not None:
            save_bench(result, json)
    if any(row["identical"] < row["total"] for row in result["results"]):
        raise typer.Exit(EXIT_FAILED)


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
    """Measure an endpoint under a mixed load: time to the first text, between pieces, and whole answers.

    Exit code 1 if anything was not answered, or any text differs from `--check`.
    """
    # They bring torch, which others wait for.
    from rayspec.service.bench.serve import (  # noqa: PLC0415
        ServeBenchOptions,
        run_serve_bench,
        serve_bench_table,
        succeeded,
    )
    from rayspec.service.bench.serve_mix import Mix  # noqa: PLC0415

    with clean_exit(), ExitStack() as stack:
        mix = Mix(model=model, num_requests=num_requests, max_tokens=max_tokens, cut_share=cut_share, seed=seed)
        options = ServeBenchOptions(url=url, api_key=api_key, mix=mix, concurrency=concurrency)
        exact = EngineConfig(model=check, dtype="float32") if check is not None else None
        offline = stack.enter_context(load_llm(exact)) if exact is not None else None
        result = run_serve_bench(options, offline, _say)
        output_console().print(serve_bench_table(result), highlight=False)
        if json is not None:
            save_bench(result, json)
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
    threads: Threads = None,
) -> None:
    """Run the experiments of the KnapSpec paper, and draw them: predicted against measured speed, what is skipped at
    which context, where drafts end, how often plans are searched."""
    # It brings torch, which others wait for.
    from rayspec.service.figures.run import FigureOptions, run_figures  # noqa: PLC0415

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
        output_console().print(run_figures(options, _say), highlight=False, soft_wrap=True)


@app.command()
def placement(
    *,
    model: Annotated[str, typer.Option(help="folder, config.json, hub id, or 'demo'; no weights are needed")],
    gpus: Annotated[
        str, typer.Option(help="in order, as 8xH100-80G or 4xH200-141G,4xA100-80G or 2xNEW-96G@4000 (GB/s)")
    ],
    stages: Annotated[int | None, typer.Option(help="pipeline stages; without it, the fewest that fit")] = None,
    tensor: Annotated[int, typer.Option(help="GPUs that share each stage")] = 1,
    context: Annotated[int, typer.Option(help="tokens of a sequence, for the KV cache")] = 16384,
    concurrency: Annotated[int, typer.Option(help="sequences at once, for the KV cache")] = 32,
    quantization: Annotated[str | None, typer.Option(help="of the layers' linears: fp8, int8, int4")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    layers: Annotated[str | None, typer.Option(help="layers of each stage, as 20,30,30")] = None,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Say which layers go on which GPUs, what fits, and how fast a decode step could be. Needs no GPU.

    Exit code 1 if it does not fit.
    """
    # They bring torch, which others wait for.
    from rayspec.model.sizes import load_config  # noqa: PLC0415
    from rayspec.service.placement_report import (  # noqa: PLC0415
        PlacementOptions,
        place,
        placement_table,
        save_placement,
    )

    with clean_exit():
        options = PlacementOptions(
            gpus=gpus,
            stages=stages,
            tensor=tensor,
            context=context,
            concurrency=concurrency,
            quantization=quantization,
            dtype=dtype,
            layers=layers,
        )
        found = place(load_config(str(demo.model_path()) if model == "demo" else model), options)
        output_console().print(placement_table(found), highlight=False)
        if json is not None:
            save_placement(found, json)
    raise typer.Exit(0 if found.fits else EXIT_FAILED)


@app.command()
@with_settings(own=(TuningOptions, "Tuning"))
def tune(
    *,
    asked: Asked,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[DOMAIN=]INPUT",
            help="calibration prompts: a file of documents or questions, demo:DOMAIN, demo:all; repeatable",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="file of saved plans to write: .json")],
    context: Annotated[int, typer.Option(min=2, help="prompt tokens; documents are cut to it")] = 1024,
    num_prompts: Annotated[int, typer.Option(min=1, help="of each domain, at most")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="sequences decoded at once")] = 1,
    widen: Annotated[int, typer.Option(min=1, help="make the model so many times as wide, as in bench")] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Find the draft plan that is fastest on calibration prompts, or one for each of their domains, and save them.

    What is saved is for this model only: --strategy self-sd or knn-ssd drafts by it, knapspec and auto begin with it,
    each with --warm-start. One input without a domain gives a plan for any text.
    """
    from rayspec.service.tune import TuneOptions, plans_table, run_tune  # noqa: PLC0415 - brings torch

    with clean_exit():
        options = TuneOptions(
            engine=asked.settings().engine,
            tuning=asked.own_options(TuningOptions),
            inputs=tuple(input_ or ()),
            output=output,
            context=context,
            num_prompts=num_prompts,
            batch=batch,
            widen=widen,
            overwrite=overwrite,
        )
        saved = run_tune(options, _say)
        output_console().print(plans_table(saved), highlight=False)
        _say(f"saved in {output}")


@app.command()
def plan(
    *,
    model: Annotated[str, typer.Option(help="folder, config.json, hub id, or 'demo'; no weights are needed")],
    gpus: Annotated[
        str, typer.Option(help="in order, as 8xH100-80G or 4xH200-141G,4xA100-80G or 2xNEW-96G@4000 (GB/s)")
    ],
    context: Annotated[int, typer.Option(help="tokens of a sequence in the end")] = 16384,
    output_tokens: Annotated[int, typer.Option(help="of these, the answer's")] = 256,
    concurrency: Annotated[int, typer.Option(help="sequences at once, over all replicas")] = 32,
    goal: Annotated[str, typer.Option(help="throughput, latency (of a request alone), cost")] = "throughput",
    quantization: Annotated[str | None, typer.Option(help="of the layers' linears: fp8, int8, int4")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    profile: Annotated[
        Path | None, typer.Option(help="measured on one such GPU, as `rayspec profile` has saved it")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="of draft tokens; without it, the range that others have published")
    ] = None,
    skip: Annotated[float, typer.Option(help="share of the layers that drafts leave out")] = 0.5,
    price: Annotated[float | None, typer.Option(help="dollars per GPU hour")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="prompt tokens run between two decode rounds")] = 1024,
    hop_us: Annotated[float, typer.Option(help="microseconds from a stage to the next one")] = 200.0,
    all_reduce_us: Annotated[float, typer.Option(help="microseconds between tensor-parallel ranks, a sublayer")] = 10.0,
    gpus_per_node: Annotated[int, typer.Option(help="the most tensor-parallel ranks")] = 8,
    json: Annotated[Path | None, typer.Option(help="file to write the numbers to")] = None,
) -> None:
    """Recommend stages x tensor x replicas: simulate what fits, with drafts and without. Needs no GPU.

    Exit code 1 if nothing fits.
    """
    # They bring torch, which others wait for.
    from rayspec.model.sizes import load_config  # noqa: PLC0415
    from rayspec.service.plan.options import PlanOptions  # noqa: PLC0415
    from rayspec.service.plan.report import make_plan, plan_table, save_plan  # noqa: PLC0415

    with clean_exit():
        options = PlanOptions(
            gpus=gpus,
            context=context,
            output_tokens=output_tokens,
            concurrency=concurrency,
            goal=goal,
            quantization=quantization,
            dtype=dtype,
            profile=profile,
            acceptance=acceptance,
            skip=skip,
            price=price,
            max_num_batched_tokens=max_num_batched_tokens,
            hop_us=hop_us,
            all_reduce_us=all_reduce_us,
            gpus_per_node=gpus_per_node,
        )
        report = make_plan(load_config(str(demo.model_path()) if model == "demo" else model), options)
        output_console().print(plan_table(report), highlight=False, markup=False)
        if json is not None:
            save_plan(report, json)
    raise typer.Exit(0 if report.fits else EXIT_FAILED)


@app.command()
@with_settings()
def serve(
    *,
    asked: Asked,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[APP.yaml]", help="a file with llm_configs, in place of --model and engine options"),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen at; the default is reached from this machine only")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="what requests call the model")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="opens the endpoint; repeatable; also in RAYSPEC_API_KEYS, with commas")
    ] = None,
) -> None:
    """Answer OpenAI requests over HTTP, with Ray Serve, until SIGTERM or Ctrl-C. Prints the URL when it is ready."""
    # They bring ray, which others wait for.
    from rayspec.service.serve.asked import asked_options  # noqa: PLC0415
    from rayspec.service.serve.run import Address, run_endpoint  # noqa: PLC0415

    with clean_exit():
        options = asked_options(file, asked, model_id=served_model_name, api_keys=api_key or (), environment=os.environ)
        run_endpoint(options, Address(host=host, port=port), lambda url: print(url, flush=True))  # noqa: T201


@app.command()
def doctor(
    *,
    model: Annotated[str | None, typer.Option(help="folder, hub id, or 'demo': are its files whole?")] = None,
    address: Annotated[
        str | None, typer.Option(help="of a Ray cluster: auto, host:port or ray://host:10001; else RAY_ADDRESS")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="this machine only: for a container's start")] = False,
    json: Annotated[Path | None, typer.Option(help="file to write the findings to")] = None,
) -> None:
    """Check this machine, and every node of a cluster: versions, GPUs, network, disks, model files; say what to do.

    Exit code 1 if there is a problem.
    """
    from rayspec.service.doctor.examine import examine  # noqa: PLC0415 - others need not wait for it
    from rayspec.service.doctor.findings import findings_table, has_problems, save_findings  # noqa: PLC0415

    with clean_exit():
        findings = examine(model=model, address=address, quick=quick)
        output_console().print(findings_table(findings))
        if json is not None:
            save_findings(findings, json)
    raise typer.Exit(EXIT_FAILED if has_problems(findings) else 0)


@app.command()
def version() -> None:
    """Print the versions of rayspec and of what it stands on."""
    print(f"rayspec {rayspec.__version__}")  # noqa: T201 - a command's output
    for name in ("torch", "transformers", "ray", "pyarrow"):
        print(f"{name} {metadata.version(name)}")  # noqa: T201 - a command's output


def _say(line: str) -> None:
    """Progress."""
    error_console().print(line, highlight=False, soft_wrap=True)


def _keep_bench(result: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    if folder is not None:
        save_report(result, folder)
    if file is not None:
        save_bench(result, file)


class _Job:
    """Documents of files to rows of a file, by one engine."""

    def __init__(
        self,
        settings: Settings,
        inputs: list[str],
        output: Path,
        *,
        overwrite: bool,
        report: Path | None,
        text_column: str,
    ) -> None:
        check_output(output, overwrite=overwrite)
        if any(Path(name).exists() and output.exists() and Path(name).samefile(output) for name in inputs):
            raise ConfigError(f"option 'output' is {str(output)!r}, which is an input too: choose another name")
        self._settings, self._inputs, self._output = settings, inputs, output
        self._report_folder, self._text_column = report, text_column

    def run(self, columns: Columns, *, template: str, chat: bool, truncate: bool, limit: int | None) -> None:
        """Ends the process with the code that the rows add up to."""
        sampling = self._settings.sampling
        with load_llm(self._settings.engine) as llm:
            exit_on_sigterm()
            room = fitting_prompt_tokens(llm.engine.max_model_len, sampling) if truncate else None
            prompts = PromptBuilder(llm=llm, params=sampling, template=template, chat=chat, max_prompt_tokens=room)
            documents = itertools.islice(read_documents(self._inputs, columns), limit)
            config = self._settings.resolved(llm.config)
            report = RunReport()
            try:
                self._write_rows(llm, documents, prompts, report)
            finally:
                save_config(self._output.with_suffix(".config.yaml"), config)
                if self._report_folder is not None:
                    self._report_folder.mkdir(parents=True, exist_ok=True)
                    report.write(self._report_folder, stats=llm.stats, config=config, title="rayspec run")
        raise typer.Exit(report.tally.exit_code)

    def _write_rows(
        self, llm: rayspec.LLM, documents: Iterable[Document], prompts: PromptBuilder, report: RunReport
    ) -> None:
        console = error_console()
        try:
            with (
                open_writer(self._output, text_column=self._text_column) as writer,
                showing_progress(report.tally, console) as show,
            ):
                for row in complete(llm, documents, prompts):
                    writer.write(row)
                    report.add(row)
                    show()
        finally:
            console.print(f"{report.tally}: {self._output}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
