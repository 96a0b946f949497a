"""The commands `summarize`, `generate` and `openai-batch`, on Ray or here; each continues the other's output."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NoReturn

import typer
from pydantic import Field
from rich.table import Table

from rayspec.batch.document_task import SUMMARY_SAMPLING, DocumentTask, summary_prompt
from rayspec.batch.documents import KNOWN_TYPES, check_template, input_row
from rayspec.batch.input_files import find_files
from rayspec.batch.job import Job, JobOptions, LocalBackend, Source
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.report import ROW_HEADINGS, RunReport
from rayspec.batch.rows import Columns, Row
from rayspec.batch.run_folder import MANIFEST, output_places
from rayspec.command.locations import Location
from rayspec.command.options import Asked, LongCommand, with_settings
from rayspec.command.terminal import inert, output_console, print_text, say
from rayspec.config import SamplingParams, Settings
from rayspec.demo import BUNDLED, example_documents
from rayspec.structured import StructuredOutputsParams
from rayspec.types import ConfigError

_EPILOG = """Exit codes: 0 every row succeeded, 1 none did or the engine failed, 2 usage, 3 some rows failed,
4 a budget (--max-total-tokens, --max-hours) is spent, 130 interrupted and 143 terminated. With --accept-failed-rows it
is 0 also where rows failed for good. The rows so far are in the output; the same command, without --overwrite, goes on
with the others."""
TEXT_SAMPLING = SamplingParams(max_tokens=256)
_ON_RAY = "job"
_OF_RAY = "/runtime_resources/working_dir_files/"  # where Ray unpacks the working directory of a job

Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT", help=f"files ({KNOWN_TYPES}), folders or patterns; also s3://, gs://, abfs://, hdfs://"
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        help="a .parquet or .jsonl file, or a folder for rows, manifest and report; path or URI. A file has a folder "
        "with .run after its name for the rest. Without it the texts are printed, with - the rows as JSON lines, and "
        "nothing is kept",
    ),
]
_STDOUT = "-"
_NAME_OF_FILE = re.compile(r"[\w./~-]+\.(txt|md|jinja|j2)", re.IGNORECASE | re.ASCII)  # no message has such a form


class DocumentOptions(JobOptions, LongDocumentOptions):
    """Options of a job over documents or prompts."""

    id_column: str | None = Field(
        None, description="column of the row's id; none: file and row number; unset: 'id', else the same"
    )
    limit: int | None = Field(None, ge=1, description="process only the first N rows")
    sample: float | None = Field(None, gt=0, le=1, description="share of the rows to process, always the same ones")
    json_schema: str | None = Field(None, description="file with a JSON schema that every output must have")
    prompt_template: str | None = Field(
        None, description="file with a Jinja template that makes the prompt of a row's columns, by their names"
    )
    system: str | None = Field(None, description="the system message of each chat, or a file with it")
    cache: str | None = Field(
        None,
        min_length=1,
        description="folder of results that jobs share: equal requests with a seed or temperature 0 run once",
    )

    def in_force(self, settings: Settings) -> Settings:
        """Return the settings with the schema, if any. Raises ConfigError for a file without a schema."""
        if self.json_schema is None:
            return settings
        text = self.file("json_schema")
        try:
            form = StructuredOutputsParams(json=text, disable_any_whitespace=True)
        except ConfigError as error:
            raise ConfigError(f"option 'json_schema' is {self.json_schema!r}: {error}") from None
        return replace(settings, sampling=settings.sampling.replace(structured_outputs=form))

    def file(self, option: str) -> str | None:
        """Return the content of the file that an option names; None if it names none. Raises ConfigError."""
        name = getattr(self, option)
        try:
            return None if name is None else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"option {option!r} is {name!r}: {problem}") from None

    def check_columns(self, **are_given: bool) -> None:
        """Raise ConfigError if a template and another option that says where the prompt is are given."""
        for name, is_given in are_given.items():
            if is_given and self.prompt_template is not None:
                raise ConfigError(f"options {name!r} and 'prompt_template' are both given: leave one out")

    @property
    def of_prompts(self) -> dict[str, Any]:
        """What a DocumentTask gets of the prompts. Raises ConfigError."""
        if self.prompt_template is not None and self.long != "fail":
            raise ConfigError(
                f"option 'long' is {self.long!r}, which works without 'prompt_template' only: leave one out"
            )
        is_file = self.system is not None and os.path.isfile(self.system)
        if self.system is not None and not is_file and _NAME_OF_FILE.fullmatch(self.system):
            raise ConfigError(f"option 'system' is {self.system!r}, and there is no such file: correct the name")
        return {
            "prompt_template": self.file("prompt_template"),
            "system": self.file("system") if is_file else self.system,
        }


def summarize(
    *,
    context: typer.Context,
    asked: Asked,
    inputs: Inputs = None,
    output: Output = None,
    text_column: Annotated[str, typer.Option(help="column of the document's text")] = "text",
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="the prompt; {text} stands for the document")
    ] = None,
) -> None:
    """Summarize documents, one row per document. A .txt file is one document.

    Without inputs, it summarizes bundled documents."""
    options = asked.own_options(DocumentOptions)
    settings = options.in_force(asked.settings())
    options.check_columns(prompt=prompt is not None, text_column=text_column != "text")
    if options.prompt_template is not None and not inputs:
        raise ConfigError("option 'prompt_template' is given without inputs: name files, folders or patterns")
    usual = "{text}" if options.prompt_template is not None else summary_prompt(settings.engine.model)
    task = DocumentTask(
        settings=settings,
        template=prompt or usual,
        long=options,
        instruct=settings.engine.model not in BUNDLED,
        **options.of_prompts,
    )
    samples = [] if inputs else example_documents(pages=settings.engine.model not in BUNDLED)
    rows = [input_row(sample.id, source=sample.id, text=sample.text) for sample in samples]
    columns = Columns(text=text_column, id=options.id_column, template=task.prompt_template)
    source = _source(inputs or (), output, options, columns, rows)
    _run_documents(context, task, source, output, options, name="summaries", text_column="summary")


def generate(
    *,
    context: typer.Context,
    asked: Asked,
    inputs: Inputs = None,
    output: Output = None,
    prompt_column: Annotated[str, typer.Option(help="column of the prompt")] = "prompt",
    messages_column: Annotated[str, typer.Option(help="column of chat messages, used where present")] = "messages",
    chat: Annotated[bool, typer.Option(help="put prompts through the chat template as a user's message")] = False,
) -> None:
    """Complete prompts and answer chats, one row per prompt. A .txt file is one prompt."""
    if not inputs:
        raise ConfigError("no inputs: name files, folders or patterns")
    options = asked.own_options(DocumentOptions)
    settings = options.in_force(asked.settings())
    options.check_columns(prompt_column=prompt_column != "prompt", messages_column=messages_column != "messages")
    of_task: dict[str, Any] = {"chat": chat or options.system is not None, "needs_chat": chat} | options.of_prompts
    task = DocumentTask(settings=settings, template="{text}", long=options, **of_task)
    columns = Columns(text=prompt_column, id=options.id_column, messages=messages_column, template=task.prompt_template)
    source = _source(inputs, output, options, columns)
    _run_documents(context, task, source, output, options, name="texts", text_column="text")


def openai_batch(
    *,
    context: typer.Context,
    asked: Asked,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="file of requests, path or URI")],
    output: Annotated[str, typer.Option("--output", "-o", help="folder for the answers; path or URI")],
    served_model_name: Annotated[str | None, typer.Option(help="model's name in lines [default: as --model]")] = None,
) -> None:
    """Answer the requests of an OpenAI batch file.

    It answers /v1/chat/completions, /v1/completions and /v1/responses, and writes output.jsonl and errors.jsonl, in
    OpenAI's format.
    """
    # Imported here, because it brings transformers.
    from rayspec.batch.batch_task import ERRORS_NAME, OUTPUT_NAME, BatchTask, read_requests, write_answers  # noqa: PLC0415

    settings, options = asked.settings(), asked.own_options(JobOptions)
    requests = read_requests(batch)
    task = BatchTask(settings=settings, served=served_model_name or settings.engine.model)
    job = Job(
        backend=_backend(context),
        task=task,
        output=output,
        options=options,
        name="lines",
        text_column="line",
        export=partial(write_answers, requests),
        export_names=(OUTPUT_NAME, ERRORS_NAME),
    )
    report = _run(job, Source(rows=requests))
    folder = output_places(output, options.format)[0]
    output_console().print(f"{report}\n{OUTPUT_NAME} and {ERRORS_NAME} are in {folder}", soft_wrap=True)
    raise typer.Exit(report.exit_code(accepts_failed=options.accept_failed_rows))


def _run_documents(
    context: typer.Context,
    task: DocumentTask,
    source: Source,
    output: str | None,
    options: DocumentOptions,
    *,
    name: str,
    text_column: str,
) -> NoReturn:
    """Run the job, print its totals and first rows, and exit. Without an output, print the texts; with - JSON lines."""
    is_printed = output in (None, _STDOUT)
    with TemporaryDirectory(prefix="rayspec-rows-") if is_printed else nullcontext() as kept:
        place = f"{kept}/rows.jsonl" if is_printed else str(output)
        job = Job(
            backend=_backend(context),
            task=task,
            output=place,
            options=options,
            name=name,
            text_column=text_column,
            cache=options.cache,
        )
        report = job.run(source) if is_printed else _run(job, source)
        code = report.exit_code(accepts_failed=options.accept_failed_rows)
        if is_printed:
            file = Path(place)
            # Not splitlines: texts may have other breaks.
            lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
            for line in lines:
                row = json.loads(line)
                title = f"{row['id']}\n" if len(lines) > 1 else ""
                print_text(line if output == _STDOUT else f"{title}{row[text_column] or row['error'] or ''}\n")
            say(str(report))
            raise typer.Exit(code)
    table = Table(title=str(report), title_justify="left")
    for each in ROW_HEADINGS:
        justify: Literal["right", "left"] = "right" if each[1] else "left"
        table.add_column(", ".join(filter(None, each)), justify=justify, no_wrap=not each[1])
    for cells in report.listed:
        table.add_row(*(inert(cell).replace("\n", "\\n") for cell in cells))
    console = output_console()
    console.print(table)
    for kind, message in report.examples.items():  # the first of each kind
        console.print(f"{kind}: {' '.join(message.split())}", highlight=False, soft_wrap=True)
    folder, merged, _ = output_places(place, None)
    where = f"rows are in {merged}, the report is" if merged is not None else "rows and report are"
    console.print(f"{where} in {folder}", soft_wrap=True)
    raise typer.Exit(code)


def _run(job: Job, source: Source) -> RunReport:
    """Run a job. Say at an interrupt what is kept, and where Ray would delete it."""
    if _OF_RAY in Location.parse(job.output).absolute().name:
        say(f"option 'output' is {job.output!r}, in Ray's copy of --working-dir, which Ray deletes: name another place")
    try:
        return job.run(source)
    except (KeyboardInterrupt, SystemExit):
        again = "the same command without --overwrite" if job.options.overwrite else "the same command again"
        say(f"interrupted: rows that were finished are kept in {job.output}; run {again} to resume")
        raise


def backend_of(*, on_ray: bool) -> LocalBackend:
    """Return where a job runs: on Ray, or in this process."""
    if not on_ray:
        return LocalBackend()
    from rayspec.batch.ray_backend import RayBackend  # noqa: PLC0415 - brings Ray

    return RayBackend()


def _backend(context: typer.Context) -> LocalBackend:
    return backend_of(on_ray=context.parent is not None and context.parent.info_name == _ON_RAY)


def _source(
    inputs: Sequence[str], output: str | None, options: DocumentOptions, columns: Columns, rows: Sequence[Row] = ()
) -> Source:
    """Find the inputs. An output of an earlier run is none. Raises ConfigError for an output that is another input."""
    leave_out, file = list[str](), None
    if output is not None and output != _STDOUT:
        folder, file, _ = output_places(output, options.format)
        leave_out = [folder.name]
        if file is not None and folder.join(MANIFEST).exists:
            leave_out.append(file.name)
    elif options.format is not None:
        raise ConfigError(f"option 'format' is {options.format!r}, of a file: name one as 'output'")
    found = find_files(inputs, outputs=leave_out)
    if found.warning is not None:
        say(found.warning)
    if file is not None and found.include(file):
        raise ConfigError(f"option 'output' is {file.name!r}, which is an input too: choose another name")
    source = Source(files=found.files, columns=columns, rows=rows, limit=options.limit, sample=options.sample)
    if columns.template is not None and source.pieces:
        check_template(source.pieces, columns)
    return source


app = typer.Typer()
_on_ray = typer.Typer(help="Jobs on Ray: the cluster at RAY_ADDRESS, or one on this machine.", no_args_is_help=True)
app.add_typer(_on_ray, name=_ON_RAY)
for _command, _sampling in ((summarize, SUMMARY_SAMPLING), (generate, TEXT_SAMPLING)):
    _flagged = with_settings(sampling=_sampling, own=(DocumentOptions, "Job"))(_command)
    for _group in (app, _on_ray):
        _group.command(_command.__name__, cls=LongCommand, epilog=_EPILOG)(_flagged)
_lines = with_settings(own=(JobOptions, "Job"))(openai_batch)
_on_ray.command("openai-batch", cls=LongCommand, epilog=_EPILOG)(_lines)
