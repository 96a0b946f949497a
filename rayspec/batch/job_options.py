"""Command-line options of the jobs over datasets, in addition to the engine's options."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from rayspec.batch.long_documents import LongDocumentOptions
from rayspec.batch.report import DOCUMENT_HEADINGS, RunReport
from rayspec.command.terminal import output_console

EPILOG = """Exit codes: 0 every row succeeded, 1 none did or the engine failed, 2 usage, 3 some rows failed,
130 interrupted and 143 terminated. With --accept-failed-rows it is 0
also where rows failed for good. The rows so far are in the output; the same command goes on with the others."""

Inputs = Annotated[
    list[str] | None,
    typer.Argument(metavar="INPUT...", help="files, folders or patterns; also s3://, gs://, abfs://, hdfs://"),
]
Output = Annotated[str, typer.Option("--output", "-o", help="folder for rows, manifest and report; path or URI")]
IdColumn = Annotated[
    str | None,
    typer.Option(help="column of the row's id; without it: 'id', else file and row number; none: always the latter"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="only the first so many rows")]
Sample = Annotated[float | None, typer.Option(min=0, max=1, help="only this share of the rows, always the same ones")]
Overwrite = Annotated[bool, typer.Option(help="begin again, in place of what an earlier run has left there")]
Format = Annotated[str, typer.Option("--format", help="of the output: parquet or jsonl")]
ChangedRows = Annotated[
    str, typer.Option("--changed", help="rows with other text than when they were done: keep, redo or fail")
]
RowOrder = Annotated[
    str,
    typer.Option(
        "--order", help="of the rows: input, longest (first), or prefix (rows that begin alike are neighbours)"
    ),
]
AcceptFailedRows = Annotated[
    bool,
    typer.Option(help="exit code 0 when every row has its result, also an error: the same command would do nothing"),
]
MaxEngineRestarts = Annotated[
    int, typer.Option(min=0, help="engines started again in a row, without a row completed in between")
]
DrainSeconds = Annotated[float, typer.Option(min=0, help="for rows under way, after SIGTERM")]
Long = Annotated[str, typer.Option(help="documents beyond the context: fail, truncate, map-reduce or refine")]
ChunkTokens = Annotated[int | None, typer.Option(min=1, help="tokens of a part of a long document; none: what fits")]
OverlapTokens = Annotated[int, typer.Option(min=0, help="tokens that a part shares with the one before")]
LevelTokens = Annotated[
    list[int] | None, typer.Option(help="output tokens about parts, about groups of these, ...; repeatable")
]


def long_options(
    mode: str, chunk_tokens: int | None, overlap_tokens: int, level_tokens: list[int] | None
) -> LongDocumentOptions:
    """Make the options for long documents. Raises ConfigError."""
    return LongDocumentOptions(
        mode=mode,
        chunk_tokens=chunk_tokens,
        overlap_tokens=overlap_tokens,
        level_output_tokens=tuple(level_tokens or ()),
    )


def show_report(report: RunReport, output: str) -> None:
    """Print the first rows, the totals of all rows, and the output folder."""
    table = Table(title=str(report.tally), title_justify="left")
    for heading in DOCUMENT_HEADINGS:
        text = heading in {"id", "error"}
        table.add_column(heading, justify="left" if text else "right", no_wrap=text)
    for cells in report.listed:
        table.add_row(*cells)
    console = output_console()
    console.print(table)
    if report.num_reference_lines:
        console.print(f"{report.num_exact_lines} of {report.num_reference_lines} reference lines are exact")
    console.print(f"rows, report and picture are in {output}", soft_wrap=True)
