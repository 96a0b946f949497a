#!/usr/bin/env python3
"""A Ray job that answers an OpenAI batch file: each line is for /v1/chat/completions or /v1/completions.

    ray job submit --working-dir . -- python jobs/openai_batch.py --model MODEL --output OUT batch.jsonl

It writes output.jsonl and errors.jsonl, in OpenAI's format. After an interruption, the same command continues.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rayspec.batch.batch_task import ERRORS_NAME, OUTPUT_NAME, BatchFiles, BatchTask, read_requests
from rayspec.batch.data import check_order
from rayspec.batch.job import Job, Source
from rayspec.batch.job_options import (
    EPILOG,
    AcceptFailedRows,
    ChangedRows,
    DrainSeconds,
    MaxEngineRestarts,
    Output,
    Overwrite,
    RowOrder,
)
from rayspec.batch.survey import check_changed
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import clean_exit, output_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
@with_settings()
def openai_batch(
    *,
    asked: Asked,
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="file of requests, path or URI")],
    output: Output,
    served_model_name: Annotated[str | None, typer.Option(help="what lines call the model; none: as --model")] = None,
    overwrite: Overwrite = False,
    changed: ChangedRows = "keep",
    max_engine_restarts: MaxEngineRestarts = 3,
    drain_s: DrainSeconds = 2.0,
    order: RowOrder = "input",
    accept_failed_rows: AcceptFailedRows = False,
) -> None:
    """Answer the requests of an OpenAI batch file on Ray."""
    with clean_exit():
        settings = asked.settings()
        requests, refused = read_requests(batch)
        job = Job(
            task=BatchTask(settings=settings, served=served_model_name or settings.engine.model),
            output=output,
            name="lines",
            title="Batch",
            text_column="line",
            overwrite=overwrite,
            changed=check_changed(changed),
            max_engine_restarts=max_engine_restarts,
            drain_s=drain_s,
            order=check_order(order),
            export=BatchFiles(requests),
            export_names=(OUTPUT_NAME, ERRORS_NAME),
        )
        report = job.run(Source(rows=requests, refused=refused))
        output_console().print(f"{report.tally}\n{OUTPUT_NAME} and {ERRORS_NAME} are in {output}", soft_wrap=True)
    raise typer.Exit(report.tally.exit_code_of(accepts_failed=accept_failed_rows))


if __name__ == "__main__":
    app()
