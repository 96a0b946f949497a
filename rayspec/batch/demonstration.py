"""`rayspec demo`: the same job with plain decoding and with `auto`, and a comparison of the two."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from rayspec import demo
from rayspec.batch.comparison import Pair, SideBySide
from rayspec.batch.document_task import SUMMARY_SAMPLING, DocumentTask, summary_prompt
from rayspec.batch.documents import Columns
from rayspec.batch.in_process import LocalBackend
from rayspec.batch.input_files import find_files
from rayspec.batch.job import Job, JobOptions
from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.report import RunReport
from rayspec.batch.rows import Row
from rayspec.batch.scan import Source
from rayspec.command.locations import Location
from rayspec.command.settings import Settings
from rayspec.command.terminal import EXIT_FAILED, EXIT_OK, clean_exit, output_console, say
from rayspec.config import EngineConfig, SpeculationOptions, Strategy
from rayspec.demo import BUNDLED, SampleDocument
from rayspec.types import CheckpointError, ConfigError

_REAL = "smollm2"
_BUNDLED = "demo"
_MAX_MODEL_LEN = 2048  # so that the longest document needs more than one prompt
_MAX_TOKENS = 96
_PROMPT = "Extract the key facts of the following document as a list.\n\n{text}"
_FOLDERS: Final[dict[Strategy, str]] = {"ar": "plain", "auto": "auto"}

app = typer.Typer()


@app.command("demo")
def run_demo(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for documents, rows and report")] = Path(
        "demo-out"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="folder, name on the hub, smollm2 or demo; none: smollm2 if it can be fetched, else demo"),
    ] = None,
    with_ray: Annotated[
        bool | None, typer.Option("--ray/--no-ray", help="run the jobs on Ray; none: if Ray is installed")
    ] = None,
) -> None:
    """Try it: a job on twelve documents, with plain decoding and with `auto`, and a report that compares them.

    It takes one to two minutes on two cores. Exit code 1 if a text differs from plain decoding, or a document failed.
    """
    with clean_exit():
        say("[1/4] the model")
        name = model or _available_model()
        say(f"[2/4] the documents: in {output / 'documents'}")
        documents = example_files(output / "documents", pages=name not in BUNDLED)
        comparison = compare(name, documents, output, backend=_backend(with_ray))
        report = output / "report.html"
        report.write_text(comparison.html(), encoding="utf-8")
        console = output_console()
        for shown in comparison.shown():
            console.print(shown, highlight=False)
        for_own = "MODEL" if name in BUNDLED else name
        for line in (
            f"Report: {report}. Rows: {output / 'auto' / 'summaries.parquet'}.",
            f"Your own documents: rayspec summarize FILES... -o summaries.parquet --model {for_own}",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_OK if comparison.num_same == len(comparison.pairs) else EXIT_FAILED)


def compare(model: str, documents: dict[str, SampleDocument], output: Path, *, backend: LocalBackend) -> SideBySide:
    """Summarize documents with plain decoding, then with `auto`, one document at a time, in float32. Models other than
    the bundled ones are asked for key facts.

    documents: by their names in `output / "documents"`. Raises the errors of `Job.run`.
    """
    rows: dict[Strategy, dict[str, Row]] = {}
    reports: dict[Strategy, RunReport] = {}
    with backend.session():  # one Ray for both jobs
        for number, (strategy, folder) in enumerate(_FOLDERS.items(), start=3):
            say(f"[{number}/4] {len(documents)} documents with {'plain decoding' if strategy == 'ar' else strategy}")
            settings = _settings(model, strategy)
            found = rows.setdefault(strategy, {})

            def keep(read: Callable[[], Iterable[Row]], _: Location, found: dict[str, Row] = found) -> None:
                found.update({row.id: row for row in read()})

            job = Job(
                backend=backend,
                task=DocumentTask(
                    settings=settings,
                    template=summary_prompt(model) if model in BUNDLED else _PROMPT,
                    long=LongDocumentOptions(long="map-reduce"),
                    instruct=model not in BUNDLED,
                ),
                output=str(output / folder),
                name="summaries",
                text_column="summary",
                options=JobOptions(overwrite=True),
                export=keep,
            )
            files = find_files([str(output / "documents")])
            reports[strategy] = job.run(Source(inputs=files, columns=Columns()))
    pairs = [
        Pair(name=name, document=document.text, plain=rows["ar"][name], fast=rows["auto"][name])
        for name, document in documents.items()
    ]
    return SideBySide(model=model, pairs=pairs, plain=reports["ar"].stats, fast=reports["auto"].stats)


def example_files(folder: Path, *, pages: bool) -> dict[str, SampleDocument]:
    """Write the example documents into a folder of their own, and return them by file name. Raises ConfigError for a
    folder that has other files."""
    documents = {f"{document.id}.txt": document for document in demo.example_documents(pages=pages)}
    if folder.exists() and (others := {path.name for path in folder.iterdir()} - _example_names()):
        raise ConfigError(f"folder {str(folder)!r} has other files, such as {min(others)!r}: use another --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, document in documents.items():
        (folder / name).write_text(document.text, encoding="utf-8")
    return documents


def _example_names() -> set[str]:
    return {f"{document.id}.txt" for pages in (True, False) for document in demo.example_documents(pages=pages)}


def _available_model() -> str:
    """Return the real model if it is in the cache or can be fetched, else the bundled model."""
    if find_spec("gguf") is None:
        reason = "package 'gguf' is not installed: pip install 'rayspec[gguf]'"
    else:
        try:
            demo.fetch(_REAL, say)
        except CheckpointError as error:
            reason = str(error)
        else:
            return _REAL
    say(f"the bundled model is used, which only knows audit reports: {reason}")
    return _BUNDLED


def _settings(model: str, strategy: Strategy) -> Settings:
    return Settings(
        engine=EngineConfig(
            model=model,
            dtype="float32",
            max_num_seqs=1,
            max_model_len=_MAX_MODEL_LEN,
            speculation=SpeculationOptions(strategy=strategy),
        ),
        sampling=SUMMARY_SAMPLING if model in BUNDLED else SUMMARY_SAMPLING.replace(max_tokens=_MAX_TOKENS),
    )


def _backend(with_ray: bool | None) -> LocalBackend:
    """Return where the jobs run. A cluster at RAY_ADDRESS is used only if it is asked for: it may lack the model."""
    if with_ray is None:
        with_ray = find_spec("ray") is not None and "RAY_ADDRESS" not in os.environ
    if not with_ray:
        return LocalBackend()
    from rayspec.batch.ray_backend import RayBackend  # noqa: PLC0415 - brings Ray

    return RayBackend()
