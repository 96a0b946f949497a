"""The `rayspec` command."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rayspec
from rayspec.batch.columns import Columns
from rayspec.batch.document_task import SUMMARY_SAMPLING, PromptBuilder, fitting_prompt_tokens, summary_prompt
from rayspec.batch.documents import read_documents
from rayspec.batch.in_process import complete
from rayspec.batch.input_files import KNOWN_TYPES, found_inputs
from rayspec.batch.progress import showing_progress
from rayspec.batch.report import RunReport
from rayspec.batch.results import OutputError, check_output, open_writer, save_config
from rayspec.batch.rows import Row
from rayspec.bench.commands import app as bench_app
from rayspec.command.loading import load_llm
from rayspec.command.options import Asked, with_settings
from rayspec.command.settings import Settings
from rayspec.command.terminal import clean_exit, error_console, exit_on_sigterm, output_console, say
from rayspec.config import REPLACED, ParallelOptions, SamplingParams, TuningOptions
from rayspec.ops.commands import app as plan_app
from rayspec.ops.k8s.command import app as k8s_app
from rayspec.ops.latency_table import latency_table, stage_table
from rayspec.types import ConfigError, EngineStats

# Commands that have left the package, and what runs them in a checkout of the project.
_MOVED = {f"bench-{name}": f"python -m benchmarks {name}" for name in ("data", "feed", "pipeline", "serve")}
_MOVED["figures"] = "python -m benchmarks figures"


class _Commands(TyperGroup):
    """The commands. Commands and flags that are gone give an error that says what replaced them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _MOVED:
            ctx.fail(f"command '{args[0]}' is not in the package any more: run `{_MOVED[args[0]]}` in a checkout")
        replaced = {**REPLACED["SpeculationOptions"], **(REPLACED["TuningOptions"] if args[:1] == ["tune"] else {})}
        for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if (remedy := replaced.get(flag.removeprefix("--").replace("-", "_"))) is not None:
                ctx.fail(f"option {flag!r} {remedy}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="rayspec",
    cls=_Commands,
    help="Lossless, training-free speed-up of Hugging Face causal LMs: the model drafts for itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app)
app.add_typer(plan_app)
app.add_typer(k8s_app, name="k8s")

_EPILOG = """Exit codes: 0 every row succeeded, 1 none did or the engine failed, 2 usage, 3 some rows failed,
130 interrupted and 143 terminated, with the rows so far in the output."""

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help=f"files ({KNOWN_TYPES}), folders or patterns"),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write: .jsonl or .parquet")]
IdColumn = Annotated[
    str | None,
    typer.Option(
        help="column of the row's id; without it: 'id' where there is one, else the file and row number; none: always "
        "the latter"
    ),
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
            if llm.client.latency is None:
                raise ConfigError(
                    f"model {settings.engine.model!r} runs with strategy {llm.config.speculation.strategy!r}, which "
                    "needs no profile: use --strategy knapspec, with a model whose layers split into sublayers"
                )
            console = output_console()
            console.print(latency_table(llm.client.latency, max_context=llm.client.max_model_len))
            if config.parallel is not None:
                console.print(stage_table(llm.client.latency))


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

    The saved plans are for this model only. With --warm-start, --strategy self-sd or knn-ssd drafts by them, and
    knapspec and auto begin with them. One input without a domain gives a plan for any text.
    """
    from rayspec.bench.tune import TuneOptions, plans_table, run_tune  # noqa: PLC0415 - brings torch

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
        saved = run_tune(options, say)
        output_console().print(plans_table(saved), highlight=False)
        say(f"saved in {output}")


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
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="whose web pages may use the endpoint; repeatable; *: all"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="by which clients may call the endpoint on loopback; repeatable; *: any"),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where /v1/files and /v1/batches keep files; none: neither")
    ] = None,
) -> None:
    """Answer OpenAI requests over HTTP, with Ray Serve, until SIGTERM or Ctrl-C. Prints the URL when it is ready."""
    # Imported here, because they import ray, which takes seconds.
    from rayspec.serve.options import asked_options  # noqa: PLC0415
    from rayspec.serve.run import Address, run_endpoint  # noqa: PLC0415

    with clean_exit():
        options = asked_options(
            file,
            asked,
            model_id=served_model_name,
            api_keys=api_key or (),
            cors=cors or (),
            allowed_hosts=allowed_host or (),
            batches=batches,
            environment=os.environ,
        )
        run_endpoint(options, Address(host=host, port=port), lambda url: print(url, flush=True))  # noqa: T201


@app.command()
def version() -> None:
    """Print the versions of rayspec and of its main dependencies."""
    print(f"rayspec {rayspec.__version__}")  # noqa: T201 - a command's output
    for name in ("torch", "transformers", "ray", "pyarrow"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "is not installed"
        print(f"{name} {found}")  # noqa: T201 - a command's output


class _Job:
    """Completes documents of files with one engine and writes rows to a file."""

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
        files = found_inputs(inputs)
        if output.exists() and any(Path(name).exists() and Path(name).samefile(output) for name in files):
            raise ConfigError(f"option 'output' is {str(output)!r}, which is an input too: choose another name")
        self._settings, self._inputs, self._output = settings, files, output
        self._report_folder, self._text_column = report, text_column

    def run(self, columns: Columns, *, template: str, chat: bool, truncate: bool, limit: int | None) -> None:
        """Complete all rows, and end the process with the exit code of the rows."""
        sampling = self._settings.sampling
        with load_llm(self._settings.engine) as llm:
            exit_on_sigterm()
            room = fitting_prompt_tokens(llm.client.max_model_len, sampling) if truncate else None
            prompts = PromptBuilder(llm=llm, params=sampling, template=template, chat=chat, max_prompt_tokens=room)
            rows = itertools.islice(read_documents(self._inputs, columns), limit)
            config, report, is_written = self._settings.resolved(llm.config), RunReport(), True
            try:
                save_config(self._output.with_suffix(".config.yaml"), config)
                self._write_rows(llm, rows, prompts, report)
            except OutputError:
                is_written = False  # the error says where the rows are
                raise
            finally:
                if is_written:
                    self._conclude(report, llm.stats, config)
        raise typer.Exit(report.tally.exit_code)

    def _write_rows(self, llm: rayspec.LLM, rows: Iterable[Row], prompts: PromptBuilder, report: RunReport) -> None:
        with (
            open_writer(self._output, text_column=self._text_column) as writer,
            showing_progress(report.tally, error_console()) as show,
        ):
            for row in complete(llm, rows, prompts):
                writer.write(row)
                report.add(row)
                show()

    def _conclude(self, report: RunReport, stats: EngineStats, config: dict[str, Any]) -> None:
        """Say what is in the output, and write the report if it is asked for."""
        line = f"{report.tally}: {self._output}"
        error_console().print(line, markup=False, highlight=False, soft_wrap=True)
        if self._report_folder is not None:
            self._report_folder.mkdir(parents=True, exist_ok=True)
            report.write(self._report_folder, stats=stats, config=config, title="rayspec run")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
