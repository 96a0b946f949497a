"""Reads and writes output rows, one for each input row, as JSON lines or Parquet. A file is complete or absent."""

from __future__ import annotations

import io
import itertools
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from rayspec.batch.rows import OUTPUT_COLUMNS, Row
from rayspec.command.locations import Location, error_detail
from rayspec.types import ConfigError, RayspecError

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


_FORMATS: dict[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}


class RowWriter:
    """Writes rows to a file as JSON lines. A row is in the file, or no part of it is, whatever ends the write."""

    def __init__(self, file: io.FileIO, text_column: str) -> None:
        self._file, self._text_column = file, text_column
        self.num_rows = 0
        self.failure: OSError | None = None

    def write(self, row: Row) -> None:
        """Write a row. Raises OSError."""
        start, left = self._file.tell(), memoryview(_json_line(row, self._text_column))
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException as error:
            self._file.truncate(start)
            self._file.seek(start)
            self.failure = error if isinstance(error, OSError) else None
            raise
        self.num_rows += 1


@contextmanager
def open_writer(path: Path, *, text_column: str) -> Iterator[RowWriter]:
    """Write rows to a hidden file of JSON lines next to `path`, and make it the file `path` however the `with` block
    ends. So an interrupted run keeps its rows, and so does a run that fills the disk.

    path: accepted by check_output. text_column: name of the column of the generated text. Raises OutputError, which
    says where the rows so far are: in `path`, or as JSON lines beside it if there is no room for a Parquet file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb", buffering=0)
    except OSError as error:
        raise output_error(path, error, "no row is written") from error
    with file:
        writer = RowWriter(file, text_column)
        try:
            yield writer
        finally:
            place, failure = _concluded(partial, path, text_column)
            failure = writer.failure or failure
            if failure is not None:
                raise output_error(path, failure, f"{writer.num_rows} rows are in {str(place)!r}") from failure


def output_error(path: Path, error: Exception, state: str) -> OutputError:
    """Return the error of an output that cannot be written. state: what is written."""
    return OutputError(
        f"the output {str(path)!r} cannot be written ({error_detail(error)}): make room or choose another place; "
        f"{state}"
    )


def _concluded(partial: Path, path: Path, text_column: str) -> tuple[Path, Exception | None]:
    """Make the file `path` of the JSON lines in `partial`. Return the file that has the rows, and the error because of
    which it is not `path`."""
    try:
        if _FORMATS[path.suffix.lower()] == "parquet":
            with Location.parse(str(path)).writing() as target, partial.open("rb") as file:
                rows = read_rows(file, text_column=text_column, file_format="jsonl")
                write_rows(target, rows, text_column=text_column, file_format="parquet")
            partial.unlink()
        else:
            os.replace(partial, path)
    except (OSError, pa.ArrowException) as error:
        with suppress(OSError):  # where even this cannot be done, the rows stay where they are
            return partial.replace(path.with_name(f"{path.name}.jsonl")), error
        return partial, error
    return path, None


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check, before anything is loaded, that the output can and may be written. Raises ConfigError otherwise."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"option 'output' is {str(path)!r}: its name must end in {' or '.join(_FORMATS)}")
    if path.exists() and not overwrite:
        raise ConfigError(f"option 'output' is {str(path)!r}, which exists: choose another name or pass --overwrite")
    if path.is_dir():
        raise ConfigError(f"option 'output' is {str(path)!r}, a folder: name a file")
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        raise ConfigError(
            f"option 'output' is {str(path)!r}: {str(ancestor)!r} cannot be written to ({error.strerror}); choose "
            "another place"
        ) from error


def save_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved options as YAML that `--config` reads back. Missing folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
