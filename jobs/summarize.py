#!/usr/bin/env python3
"""A Ray job that summarizes documents: Ray Data reads them, engines complete them; it writes Parquet and a report.

    python jobs/summarize.py --model demo --output demo-out
    ray job submit --working-dir . -- python jobs/summarize.py --model MODEL --output OUT documents/*.parquet

Without inputs it takes the bundled sample reports and some long texts of Python's own documentation. The job uses the
cluster of RAY_ADDRESS if that is set, and otherwise starts Ray on this machine. After an interruption, the same command
continues.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rayspec.batch.columns import Columns
from rayspec.batch.data import check_order
from rayspec.batch.document_task import SUMMARY_SAMPLING, DocumentTask, summary_prompt
from rayspec.batch.input_files import found_inputs
from rayspec.batch.job import Job, Source
from rayspec.batch.job_options import (
    EPILOG,
    AcceptFailedRows,
    ChangedRows,
    ChunkTokens,
    DrainSeconds,
    Format,
    IdColumn,
    Inputs,
    LevelTokens,
    Limit,
    Long,
    MaxEngineRestarts,
    Output,
    OverlapTokens,
    Overwrite,
    RowOrder,
    Sample,
    long_options,
    show_report,
)
from rayspec.batch.samples import as_rows, bundled_documents, references
from rayspec.batch.survey import check_changed
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import clean_exit
from rayspec.demo import BUNDLED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
@with_settings(sampling=SUMMARY_SAMPLING)
def summarize(
    *,
    asked: Asked,
    inputs: Inputs = None,
    output: Output,
    text_column: Annotated[str, typer.Option(help="column of the document's text")] = "text",
    id_column: IdColumn = None,
    prompt: Annotated[str | None, typer.Option(help="what to ask; {text} stands for the document")] = None,
    long: Long = "fail",
    chunk_tokens: ChunkTokens = None,
    overlap_tokens: OverlapTokens = 0,
    level_tokens: LevelTokens = None,
    limit: Limit = None,
    sample: Sample = None,
    overwrite: Overwrite = False,
    changed: ChangedRows = "keep",
    max_engine_restarts: MaxEngineRestarts = 3,
    file_format: Format = "parquet",
    drain_s: DrainSeconds = 2.0,
    order: RowOrder = "input",
    accept_failed_rows: AcceptFailedRows = False,
) -> None:
    """Summarize documents on Ray, from files into a folder."""
    with clean_exit():
        settings = asked.settings()
        task = DocumentTask(
            settings=settings,
            template=prompt or summary_prompt(settings.engine.model),
            long=long_options(long, chunk_tokens, overlap_tokens, level_tokens),
            instruct=settings.engine.model not in BUNDLED,
        )
        job = Job(
            task=task,
            output=output,
            name="summaries",
            title="Summaries",
            text_column="summary",
            file_format=file_format,  # type: ignore[arg-type]
            overwrite=overwrite,
            changed=check_changed(changed),
            max_engine_restarts=max_engine_restarts,
            drain_s=drain_s,
            order=check_order(order),
        )
        samples = [] if inputs else bundled_documents()
        source = Source(
            inputs=found_inputs(inputs or (), output=output),
            columns=Columns(text=text_column, id=id_column),
            rows=as_rows(samples),
            limit=limit,
            sample=sample,
            references=references(samples),
        )
        report = job.run(source)
        show_report(report, output)
    raise typer.Exit(report.tally.exit_code_of(accepts_failed=accept_failed_rows))


if __name__ == "__main__":
    app()
