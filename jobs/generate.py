#!/usr/bin/env python3
"""A Ray job that completes prompts and answers chats. Each is a row.

    ray job submit --working-dir . -- python jobs/generate.py --model MODEL --output OUT prompts/*.jsonl

A row has a prompt or chat `messages`. The job uses the cluster of RAY_ADDRESS if that is set, and otherwise starts Ray
on this machine. After an interruption, the same command continues.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rayspec.batch.columns import Columns
from rayspec.batch.data import check_order
from rayspec.batch.document_task import DocumentTask
from rayspec.batch.input_files import found_inputs
from rayspec.batch.job import Job, Source
from rayspec.batch.job_options import (
    EPILOG,
    AcceptFailedRows,
    ChangedRows,
    DrainSeconds,
    Format,
    IdColumn,
    Inputs,
    Limit,
    Long,
    MaxEngineRestarts,
    Output,
    Overwrite,
    RowOrder,
    Sample,
    long_options,
    show_report,
)
from rayspec.batch.survey import check_changed
from rayspec.command.options import Asked, with_settings
from rayspec.command.terminal import clean_exit
from rayspec.config import SamplingParams
from rayspec.types import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
@with_settings(sampling=SamplingParams())
def generate(
    *,
    asked: Asked,
    inputs: Inputs = None,
    output: Output,
    prompt_column: Annotated[str, typer.Option(help="column of the prompt")] = "prompt",
    messages_column: Annotated[str, typer.Option(help="column of chat messages, used where present")] = "messages",
    id_column: IdColumn = None,
    chat: Annotated[bool, typer.Option(help="put prompts through the chat template as a user's message")] = False,
    long: Long = "fail",
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
    """Complete prompts and answer chats on Ray, from files into a folder."""
    with clean_exit():
        if not inputs:
            raise ConfigError("no inputs: name files, folders or patterns")
        task = DocumentTask(
            settings=asked.settings(), template="{text}", chat=chat, long=long_options(long, None, 0, None)
        )
        job = Job(
            task=task,
            output=output,
            name="texts",
            title="Texts",
            text_column="text",
            file_format=file_format,  # type: ignore[arg-type]
            overwrite=overwrite,
            changed=check_changed(changed),
            max_engine_restarts=max_engine_restarts,
            drain_s=drain_s,
            order=check_order(order),
        )
        columns = Columns(text=prompt_column, id=id_column, messages=messages_column)
        report = job.run(
            Source(inputs=found_inputs(inputs, output=output), columns=columns, limit=limit, sample=sample)
        )
        show_report(report, output)
    raise typer.Exit(report.tally.exit_code_of(accepts_failed=accept_failed_rows))


if __name__ == "__main__":
    app()
