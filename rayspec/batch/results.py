"""Reads and writes output rows, one for each input row, as JSON lines or Parquet. A file is complete or absent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayspec.batch.rows import OUTPUT_COLUMNS, Row
from rayspec.types import RayspecError

FileFormat = Literal["parquet", "jsonl"]

_ROWS_PER_GROUP = 1024
_BYTES_PER_GROUP = 2**23


class DamagedRowsError(RayspecError):
    """A file of output rows is not as it was written."""

    kind = "damaged_rows"


class OutputError(RayspecError):
    """Rows cannot be written to the output."""

    kind = "output"


def parquet_schema(text_column: str) -> pa.Schema:
    integers = {"num_prompt_tokens", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens"}
    reals = {"acceptance_rate", "latency_s", "decode_s"}
    return pa.schema(
        (
            text_column if name == "text" else name,
            pa.int64() if name in integers else pa.float64() if name in reals else pa.string(),
        )
        for name in OUTPUT_COLUMNS
    )


def _columns_of(row: Row, text_column: str) -> dict[str, Any]:
    return {text_column if name == "text" else name: getattr(row, name) for name in OUTPUT_COLUMNS}


def _json_line(row: Row, text_column: str) -> bytes:
    return json.dumps(_columns_of(row, text_column), ensure_ascii=False).encode() + b"\n"


def write_rows(file: IO[bytes], rows: Iterable[Row], *, text_column: str, file_format: FileFormat) -> None:
    """Write `rows` as the whole content of an open file. A row group of a Parquet file has 1024 rows."""
    if file_format == "jsonl":
        file.writelines(_json_line(row, text_column) for row in rows)
        return
    schema, left = parquet_schema(text_column), iter(rows)
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        while some := [_columns_of(row, text_column) for row in itertools.islice(left, _ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(some, schema=schema))


def read_rows(file: IO[bytes], *, text_column: str, file_format: FileFormat, with_text: bool = True) -> Iterator[Row]:
    """Yield the rows of a file that write_rows wrote. Columns that the file does not have get their defaults.

    with_text: False leaves out the long columns, text and tree. Raises DamagedRowsError for a file with other content
    or an early end; OSError.
    """
    left_out = set() if with_text else {text_column, "tree"}
    try:
        for columns in _read_jsonl(file) if file_format == "jsonl" else _read_parquet(file, left_out):
            known = {name: value for name, value in columns.items() if name not in left_out}
            text = known.pop(text_column) if with_text else None
            yield Row(**known, text=text)
    except (pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRowsError(f"not rows as they were written ({error})") from error


def read_table(
    file: IO[bytes], *, text_column: str, file_format: FileFormat, columns: Collection[str] | None = None
) -> pa.Table:
    """Return the rows of a file that write_rows wrote, as a table. Columns that the file does not have get defaults.

    columns: only these columns, in this order. Raises DamagedRowsError as read_rows does, and for a file without rows;
    OSError.
    """
    schema = parquet_schema(text_column)
    wanted = list(schema.names if columns is None else columns)
    try:
        if file_format == "jsonl":
            table = pa.Table.from_pylist(list(_read_jsonl(file)), schema=schema)
        else:
            with pq.ParquetFile(file, page_checksum_verification=True) as content:
                present = [name for name in wanted if name in content.schema_arrow.names]
                table = content.read(columns=present)
                _check_count(content, len(table))
        _check_ids(table)
        return pa.table({name: _column(table, schema.field(name)) for name in wanted})
    except (pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedRowsError(f"not rows as they were written ({error})") from error


def _check_ids(table: pa.Table) -> None:
    if len(table) == 0 or table["id"].null_count:
        raise ValueError("there are no rows, or rows without an id")


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    default = pa.scalar(0 if pa.types.is_integer(field.type) else None, field.type)
    if field.name not in table.schema.names:
        return pa.chunked_array([pa.repeat(default, len(table))], field.type)
    values = table[field.name].cast(field.type)
    return pc.fill_null(values, default) if default.is_valid else values


def write_tables(file: IO[bytes], tables: Iterable[pa.Table], *, text_column: str) -> None:
    """Write tables of read_table as the whole content of an open Parquet file."""
    with pq.ParquetWriter(file, parquet_schema(text_column), write_page_checksum=True) as writer:
        waiting: list[pa.Table] = []
        num_bytes = 0
        for table in tables:
            waiting.append(table)
            num_bytes += table.nbytes
            if num_bytes >= _BYTES_PER_GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting, num_bytes = [], 0
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


def _read_jsonl(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in file:
        if not line.endswith(b"\n"):
            raise ValueError("the last line is cut off")
        columns = json.loads(line)
        if not isinstance(columns, dict):
            raise TypeError("a line is no JSON object")
        yield columns


def _read_parquet(file: IO[bytes], left_out: Collection[str]) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(file, page_checksum_verification=True) as content:
        names, num_rows = [name for name in content.schema_arrow.names if name not in left_out], 0
        for batch in content.iter_batches(batch_size=_ROWS_PER_GROUP, columns=names):
            num_rows += len(batch)
            yield from batch.to_pylist()
        _check_count(content, num_rows)


def _check_count(content: pq.ParquetFile, num_rows: int) -> None:
    """Check the number of rows that were read. Checksums of pages do not cover the headers of pages."""
    if num_rows != content.metadata.num_rows:
        raise ValueError(f"{num_rows} rows instead of {content.metadata.num_rows}")
