"""The rows of an output folder: part files, and which of their rows count.

    part-000007-1f2e3d4c.parquet      rows, committed together by one session

A part is complete or absent, and never changes. A resume reads the ids, hashes and errors of all parts, and no text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from typing import IO, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayspec.batch.rows import OUTPUT_COLUMNS, TRANSIENT_KINDS, Row
from rayspec.command.locations import Location, error_detail
from rayspec.types import RayspecError

FileFormat = Literal["parquet", "jsonl"]
PART_NAME: Final = r"part-(?P<number>\d{6,})-[0-9a-f]{8}\.parquet"
_DESCRIBING = ("id", "source", "input_hash", "error_kind", "finish_reason")
_READ_THREADS = 8  # many, because remote stores answer slowly
_ROWS_PER_GROUP, _BYTES_PER_GROUP = 1024, 2**23
_MAX_CHUNKS = 1000
_MAX_DEPTH = 8  # of types in types
_LONG_FIELDS = frozenset({"text", "tree", "reasoning", "logprobs"})
_TYPES = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}

# What is kept in memory of a stored row. source: set where a row was not read or has the id of another row; else null.
# part, row: where the row is.
_INDEX_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "source": pa.large_string(),
        "input_hash": pa.string(),
        "error_kind": pa.string(),
        "is_final": pa.bool_(),
        "part": pa.int32(),
        "row": pa.int32(),
    }
)


class OutputError(RayspecError):
    """Rows cannot be written to the output."""

    kind = "output"


class DamagedOutputError(RayspecError):
    """A file of an output folder is damaged: its content is not what was written."""

    kind = "damaged_output"


def output_schema(text_column: str) -> pa.Schema:
    """Return the columns of the output. text_column: the name of the column of the generated text."""
    token = {"token": pa.string(), "logprob": pa.float64()}
    logprobs = pa.list_(pa.struct(token | {"top": pa.list_(pa.struct(token))}))
    kinds = {"int": pa.int64(), "float | None": pa.float64(), "list[dict[str, Any]] | None": logprobs}  # else text
    columns = (field for field in fields(Row) if field.name in OUTPUT_COLUMNS)
    return pa.schema(
        (text_column if one.name == "text" else one.name, kinds.get(str(one.type), pa.string())) for one in columns
    )


def _json_columns(schema: str, taken: Collection[str]) -> dict[str, tuple[str, pa.DataType | None]]:
    """Return a column for each property of a JSON schema: the property, and its type; None is JSON text. A name that is
    taken begins with "json_"."""
    root = json.loads(schema)
    with suppress(AttributeError, TypeError):  # of a schema that is none, which each row tells
        of = root.get("properties", {})
        return {f"json_{name}" if name in taken else name: (name, _arrow_type(of[name], root)) for name in of}
    return {}


def _arrow_type(schema: Any, root: Any, depth: int = 0) -> pa.DataType | None:
    """Return the type of the values of a JSON schema; None where they have no single type."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    if str(schema.get("$ref")).startswith("#/$defs/"):
        return _arrow_type(root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/")), root, depth + 1)
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1:
        return _arrow_type(choices[0], root, depth + 1)
    kinds = {schema.get("type")} if isinstance(schema.get("type"), str) else {*schema.get("type", ())} - {"null"}
    if not kinds and all(isinstance(one, str | None) for one in schema.get("enum", (0,))):
        return pa.string()
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind == "array" and (of_items := _arrow_type(schema.get("items"), root, depth + 1)) is not None:
        return pa.list_(of_items)
    return _TYPES.get(str(kind))


def _json_cells(texts: Sequence[str | None], names: Mapping[str, tuple[str, pa.DataType | None]]) -> Iterator[pa.Array]:
    """Yield the columns of texts in JSON. A value is null where the text has none of the column's type."""
    values: list[Any] = []
    for text in texts:
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            value = None
        values.append(value if isinstance(value, dict) else {})
    for name, kind in names.values():
        cells = [value.get(name) for value in values]
        if kind is None:
            cells = [cell if cell is None else json.dumps(cell, ensure_ascii=False) for cell in cells]
        yield pa.array([_fitting(cell, kind or pa.string()) for cell in cells], kind or pa.string())


def _fitting(cell: Any, kind: pa.DataType) -> Any:
    with suppress(pa.ArrowException, TypeError, OverflowError, ValueError):
        return pa.scalar(cell, kind).as_py()
    return None


class Parts:
    """The parts in a folder, in the order of their numbers, and which of their rows count.

    Of the rows with one id, the last final row counts, or the last row where none is final. An error row for a row that
    could not be read, or has the id of another row, counts in addition, one for each place in the input. Every session
    finds these errors anew, so those of earlier sessions do not count.

    A stored row takes the memory of its id and hash. Raises DamagedOutputError for a part that is not as written.
    json_schema: that of the texts, whose properties become columns where the rows are merged.
    """

    def __init__(self, folder: Location, *, text_column: str, json_schema: str | None = None) -> None:
        self._folder, self._schema, self._text_column = folder, output_schema(text_column), text_column
        self._json = _json_columns(json_schema, self._schema.names) if json_schema is not None else {}
        names = sorted(parts_in(folder), key=lambda name: (_number(name), name))
        with ThreadPoolExecutor(_READ_THREADS) as threads:
            tables = list(threads.map(lambda name: self._read(name, _DESCRIBING), names))
        stored = pa.concat_tables([_INDEX_SCHEMA.empty_table(), *map(_described, tables, itertools.count())])
        index = stored.filter(pc.is_null(stored["source"]))
        self.ignores_some = len(index) < len(stored)
        """Whether earlier sessions stored rows that could not be read."""
        self._state = tuple(names), _counting(index).combine_chunks()

    def append(self, rows: Sequence[Row], run_id: str) -> None:
        """Write the rows as one part, whole or not at all. Raises OSError."""
        names, index = self._state
        name = f"part-{_number(names[-1]) + 1 if names else 1:06d}-{run_id}.parquet"
        columns = list(zip(OUTPUT_COLUMNS, self._schema.names, strict=True))
        table = pa.Table.from_pylist(
            [{column: getattr(row, field) for field, column in columns} for row in rows], schema=self._schema
        )
        with self._folder.join(name).writing() as file:
            pq.write_table(table, file, row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)
        index = pa.concat_tables([index, _described(table, len(names))])
        # In one step: a signal that comes before it leaves a part that the next call replaces.
        self._state = (*names, name), index.combine_chunks() if index["id"].num_chunks > _MAX_CHUNKS else index

    def redo(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again. Until their new results are appended, the earlier results count."""
        names, index = self._state[0], _counting(self._state[1])
        is_named = pc.is_in(index["id"], value_set=row_ids.cast(pa.large_string()))
        is_final = pc.and_(index["is_final"], pc.invert(is_named))
        self._state = names, index.set_column(index.schema.get_field_index("is_final"), "is_final", is_final)

    # --- which rows count ---

    @property
    def num_stored(self) -> int:
        """The number of rows, those that do not count any more included."""
        return len(self._state[1])

    def __len__(self) -> int:
        """The number of rows that count."""
        return len(_counting(self._state[1]))

    @property
    def is_complete(self) -> bool:
        """Whether no row that counts is to be done again."""
        return bool(pc.all(_counting(self._state[1])["is_final"], min_count=0).as_py())

    @property
    def done(self) -> pa.Table:
        """Table of `id` and `input_hash` of the rows that an engine has done. An unknown hash is null."""
        index = _counting(self._state[1])
        return index.filter(pc.and_(index["is_final"], pc.is_null(index["source"]))).select(["id", "input_hash"])

    @property
    def kinds(self) -> Counter[str | None]:
        """Numbers of the final rows by kind of error; None is the kind of those that succeeded."""
        index = _counting(self._state[1])
        kinds = index["error_kind"].filter(index["is_final"])
        return Counter({found["values"]: found["counts"] for found in pc.value_counts(kinds).to_pylist()})

    # --- reading ---

    def rows(self, *, with_text: bool = True) -> Iterator[Row]:
        """Yield the rows that count. with_text: False leaves out the long columns."""
        fields = dict(zip(self._schema.names, OUTPUT_COLUMNS, strict=True))
        columns = [name for name, field in fields.items() if with_text or field not in _LONG_FIELDS]
        for table in self._tables(columns):
            yield from (Row(**{fields[name]: value for name, value in row.items()}) for row in table.to_pylist())

    def newest_texts(self, most: int) -> list[str]:
        """Return texts of rows that count, of at most so many characters together, the newest last."""
        found, num_characters = list[str](), 0
        [column] = (name for name, field in zip(self._schema.names, OUTPUT_COLUMNS, strict=True) if field == "text")
        for table in self._tables([column], newest_first=True):
            for text in reversed(table[column].to_pylist()):
                num_characters += len(text or "")
                if num_characters > most:
                    return found[::-1]
                found += [text] if text else []
        return found[::-1]

    def write(self, file: IO[bytes], file_format: FileFormat) -> None:
        """Write the rows that count, as the whole content of an open file. Raises OSError."""
        tables = map(self._with_json, self._tables(self._schema.names))
        if file_format == "jsonl":
            for table in tables:
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in table.to_pylist())
            return
        schema = self._with_json(self._schema.empty_table()).schema
        with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
            waiting: list[pa.Table] = []
            for table in tables:
                waiting.append(table)
                if sum(each.nbytes for each in waiting) >= _BYTES_PER_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))

    def _with_json(self, table: pa.Table) -> pa.Table:
        is_whole = pc.is_null(table["error_kind"])
        texts = pc.if_else(is_whole, table[self._text_column], pa.scalar(None, pa.string())).to_pylist()
        for name, cells in zip(self._json, _json_cells(texts, self._json), strict=True):
            table = table.append_column(name, cells)
        return table

    def _tables(self, columns: Sequence[str], *, newest_first: bool = False) -> Iterator[pa.Table]:
        names, index = self._state[0], _counting(self._state[1])
        bounds = np.searchsorted(index["part"].to_numpy(), np.arange(len(names) + 1))  # the index has the parts' order
        parts = list(zip(names, itertools.pairwise(bounds), strict=True))
        for name, (start, end) in reversed(parts) if newest_first else parts:
            if start < end:
                yield self._read(name, columns).take(index["row"][start:end])

    def _read(self, name: str, columns: Sequence[str]) -> pa.Table:
        place = self._folder.join(name)
        schema = pa.schema([self._schema.field(column) for column in columns])
        try:
            with place.open() as file, pq.ParquetFile(file, page_checksum_verification=True) as content:
                table = content.read(columns=list(columns)).select(list(columns)).cast(schema)
                num_rows = content.metadata.num_rows  # checksums of pages do not cover the headers of pages
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise _damaged(place, error_detail(error)) from error
        if len(table) != num_rows or num_rows == 0 or ("id" in columns and table["id"].null_count):
            raise _damaged(place, f"{len(table)} rows instead of {num_rows}, or rows without an id")
        return table


def _damaged(place: Location, detail: str) -> DamagedOutputError:
    return DamagedOutputError(
        f"{place}: not rows as they were written ({detail}); put it back, or delete it to have its rows done again"
    )


def parts_in(folder: Location) -> list[str]:
    """Return the names of the files of parts."""
    return [entry.file_name for entry in folder.entries() if re.fullmatch(PART_NAME, entry.file_name)]


def _described(rows: pa.Table, part: int) -> pa.Table:
    """Return the columns of _INDEX_SCHEMA for the rows of a part."""
    is_transient = pc.is_in(rows["error_kind"], value_set=pa.array(sorted(TRANSIENT_KINDS)))
    is_aborted = pc.fill_null(pc.equal(rows["finish_reason"], "abort"), fill_value=False)
    is_input_error = pc.and_(pc.is_valid(rows["error_kind"]), pc.is_null(rows["input_hash"]))
    columns: dict[str, Any] = {
        "id": rows["id"],
        "source": pc.if_else(is_input_error, pc.fill_null(rows["source"], ""), pa.scalar(None, pa.string())),
        "input_hash": rows["input_hash"],
        "error_kind": rows["error_kind"],
        "is_final": pc.invert(pc.or_(is_transient, is_aborted)),
        "part": np.full(len(rows), part),
        "row": np.arange(len(rows)),
    }
    return pa.table(columns).cast(_INDEX_SCHEMA)


def _counting(index: pa.Table) -> pa.Table:
    """Return those of the rows that count: one of each id, and one for each place of an error of the input."""
    with_source = pc.binary_join_element_wise(index["id"], index["source"], pa.scalar("\0", pa.large_string()))
    chunks = pc.coalesce(with_source, index["id"]).dictionary_encode().chunks  # equal codes for equal rows
    codes = np.concatenate([np.empty(0, np.int64), *(each.indices.to_numpy(zero_copy_only=False) for each in chunks)])
    rank = np.arange(len(codes)) + len(codes) * np.asarray(index["is_final"].to_numpy(), dtype=np.int64)
    best = np.full(int(codes.max(initial=-1)) + 1, -1)
    np.maximum.at(best, codes, rank)
    return index.filter(pa.array(best[codes] == rank))


def _number(name: str) -> int:
    match = re.fullmatch(PART_NAME, name)
    assert match is not None
    return int(match["number"])
