#!/usr/bin/env python3
"""A Ray job that summarizes documents: Ray Data reads them, one engine completes them, Parquet and a report come out.

    python jobs/summarize.py --model demo --output demo-out
    ray job submit --working-dir . -- python jobs/summarize.py --model MODEL --output OUT documents/*.parquet

Without inputs it takes the bundled sample reports and some long texts of Python's own documentation. Uses the cluster
of RAY_ADDRESS where that is set, and starts Ray on this machine otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rayspec.service.options import Asked, with_settings
from rayspec.service.prompts import SUMMARY_SAMPLING
from rayspec.service.report import DOCUMENT_HEADINGS, RunReport
from rayspec.service.samples import read_references, write_samples
from rayspec.service.summary_job import SummaryJob
from rayspec.service.terminal import clean_exit, output_console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@with_settings(sampling=SUMMARY_SAMPLING)
def summarize(
    *,
    asked: Asked,
    inputs: Annotated[
        list[str] | None, typer.Argument(help="files, folders or patterns; none: the bundled ones")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder for summaries.parquet, report.md, the picture")
    ],
    text_column: Annotated[str, typer.Option(help="column of the document's text")] = "text",
    id_column: Annotated[str | None, typer.Option(help="column of the row's id")] = None,
    prompt: Annotated[str | None, typer.Option(help="what to ask; {text} stands for the document")] = None,
    truncate: Annotated[bool, typer.Option(help="cut documents to the context, instead of failing them")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="stop after so many documents")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace what is in the output folder")] = False,
) -> None:
    """Summarize documents on Ray. Exit codes are those of `rayspec summarize`."""
    with clean_exit():
        job = SummaryJob(asked.settings(), output, overwrite=overwrite, prompt=prompt, truncate=truncate)
        samples = [] if inputs else [write_samples(output)]
        report = job.run(
            inputs or samples,
            text_column=text_column,
            id_column=id_column,
            limit=limit,
            references=read_references(samples[0]) if samples else {},
        )
        _show(report, output)
    raise typer.Exit(report.tally.exit_code)


def _show(report: RunReport, output: Path) -> None:
    table = Table(title=str(report.tally), title_justify="left")
    for heading in DOCUMENT_HEADINGS:
        text = heading in {"id", "error"}
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for cells in report.document_cells():
        table.add_row(*cells)
    console = output_console()
    console.print(table)
    if report.num_reference_lines:
        console.print(f"{report.num_exact_lines} of {report.num_reference_lines} reference lines are exact")
    console.print(f"summaries, report and picture are in {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
