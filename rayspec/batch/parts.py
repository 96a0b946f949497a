"""The rows of an output folder: part files, and which of their rows count.

    part-000007-1f2e3d4c.parquet      rows, committed together by one session

A part is complete or absent, and never changes. A resume reads the ids, hashes and errors of all parts, and no text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Final, Literal

import numpy as np
import numpy.typing as npt
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

Mask = npt.NDArray[np.bool_]

# What is kept in memory of a stored row. source: set where a row was not read or has the id of another row; else null.
_INDEX_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "source": pa.string(),
        "input_hash": pa.string(),
        "error_kind": pa.string(),
        "is_final": pa.bool_(),
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
    integers = {"num_prompt_tokens", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens"}
    reals = {"acceptance_rate", "latency_s", "decode_s"}
    return pa.schema(
        (
            text_column if name == "text" else name,
            pa.int64() if name in integers else pa.float64() if name in reals else pa.string(),
        )
        for name in OUTPUT_COLUMNS
    )


class Parts:
    """The parts in a folder, in the order of their numbers, and which of their rows count.

    Of the rows with one id, the last final row counts, or the last row where none is final. An error row for a row that
    could not be read, or has the id of another row, counts in addition, one for each place in the input. Every session
    finds these errors anew, so those of earlier sessions do not count.

    A stored row takes the memory of its id and hash. Raises DamagedOutputError for a part that is not as written.
    """

    def __init__(self, folder: Location, *, text_column: str) -> None:
        self._folder, self._schema = folder, output_schema(text_column)
        names = [name for name in folder.file_sizes() if re.fullmatch(PART_NAME, name)]
        names.sort(key=lambda name: (_number(name), name))
        with ThreadPoolExecutor(_READ_THREADS) as threads:
            tables = list(threads.map(lambda name: _described(self._read(name, _DESCRIBING)), names))
        self._parts = [(name, len(table)) for name, table in zip(names, tables, strict=True)]
        self._index = pa.concat_tables([_INDEX_SCHEMA.empty_table(), *tables]).combine_chunks()
        self._is_ignored = _mask(pc.is_valid(self._index["source"]))
        self._is_reopened: Mask = np.zeros(len(self._index), dtype=bool)
        self._counting: Mask | None = None

    @property
    def num_stored(self) -> int:
        return len(self._index)

    @property
    def ignores_some(self) -> bool:
        """Whether earlier sessions stored rows that could not be read."""
        return bool(self._is_ignored.any())

    def append(self, rows: Sequence[Row], run_id: str) -> None:
        """Write the rows as one part, whole or not at all. Raises OSError."""
        number = _number(self._parts[-1][0]) + 1 if self._parts else 1
        name = f"part-{number:06d}-{run_id}.parquet"
        columns = list(zip(OUTPUT_COLUMNS, self._schema.names, strict=True))
        table = pa.Table.from_pylist(
            [{column: getattr(row, field) for field, column in columns} for row in rows], schema=self._schema
        )
        with self._folder.join(name).writing() as file:
            pq.write_table(table, file, row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)
        # In this order, because a signal may interrupt anywhere; the next call then repeats all steps.
        before = self._index.slice(0, sum(size for _, size in self._parts))
        index = pa.concat_tables([before, _described(table)])
        self._index = index.combine_chunks() if index["id"].num_chunks > _MAX_CHUNKS else index
        self._counting = None
        self._parts.append((name, len(rows)))

    def redo(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again. Until their new results are appended, the earlier results count. Call this before
        the first `append`."""
        is_named = _mask(pc.is_in(self._index["id"], value_set=row_ids.cast(pa.large_string())))
        self._is_ignored = self._now(self._is_ignored) | is_named & ~self._is_counting
        self._is_reopened = self._now(self._is_reopened) | is_named
        self._counting = None

    # --- which rows count ---

    def __len__(self) -> int:
        """The number of rows that count."""
        return int(self._is_counting.sum())

    @property
    def is_complete(self) -> bool:
        """Whether no row that counts is to be done again."""
        return bool(self._is_final[self._is_counting].all())

    @property
    def done(self) -> pa.Table:
        """Table of `id` and `input_hash` of the rows that an engine has done. An unknown hash is null."""
        is_done = self._is_counting & self._is_final & ~_mask(pc.is_valid(self._index["source"]))
        return self._index.select(["id", "input_hash"]).filter(is_done)

    @property
    def kinds(self) -> Counter[str | None]:
        """Numbers of the final rows by kind of error; None is the kind of those that succeeded."""
        kinds = self._index["error_kind"].filter(self._is_counting & self._is_final)
        return Counter({found["values"]: found["counts"] for found in pc.value_counts(kinds).to_pylist()})

    @property
    def _is_counting(self) -> Mask:
        if self._counting is None:
            codes = codes_of(_keys(self._index))
            place, is_final, is_ignored = np.arange(len(codes)), self._is_final, self._now(self._is_ignored)
            last = np.full(int(codes.max(initial=-1)) + 1, -1)
            for group in (~is_final & ~is_ignored, is_final & ~is_ignored):
                last[codes[group]] = place[group]  # of equal codes the last assignment holds
            self._counting = np.zeros(len(codes), dtype=bool)
            self._counting[last[last >= 0]] = True
        return self._counting

    @property
    def _is_final(self) -> Mask:
        return _mask(self._index["is_final"]) & ~self._now(self._is_reopened)

    def _now(self, mask: Mask) -> Mask:
        """Extend a mask of the first rows to all rows; the later rows are False."""
        return np.concatenate([mask, np.zeros(len(self._index) - len(mask), dtype=bool)])

    # --- reading ---

    def rows(self, *, with_text: bool = True) -> Iterator[Row]:
        """Yield the rows that count. with_text: False leaves out the long columns, text and tree."""
        fields = dict(zip(self._schema.names, OUTPUT_COLUMNS, strict=True))
        columns = [name for name, field in fields.items() if with_text or field not in {"text", "tree"}]
        for table in self._tables(columns):
            yield from (Row(**{fields[name]: value for name, value in row.items()}) for row in table.to_pylist())

    def write(self, file: IO[bytes], file_format: FileFormat) -> None:
        """Write the rows that count, as the whole content of an open file. Raises OSError."""
        if file_format == "jsonl":
            for table in self._tables(self._schema.names):
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in table.to_pylist())
            return
        with pq.ParquetWriter(file, self._schema, write_page_checksum=True) as writer:
            waiting: list[pa.Table] = []
            for table in self._tables(self._schema.names):
                waiting.append(table)
                if sum(each.nbytes for each in waiting) >= _BYTES_PER_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))

    def _tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        start, counting = 0, self._is_counting
        for name, size in list(self._parts):
            mask = counting[start : start + size]
            start += size
            if mask.any():
                yield self._read(name, columns).filter(mask)

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
    """Return the names of the files of parts, also of an earlier version."""
    return [
        name for name in folder.file_sizes() if re.fullmatch(r"part-\d{6,}-[0-9a-f]{8}\.\w+|\.index\.parquet", name)
    ]


def _described(rows: pa.Table) -> pa.Table:
    """Return the columns of _INDEX_SCHEMA for output rows."""
    is_transient = pc.is_in(rows["error_kind"], value_set=pa.array(sorted(TRANSIENT_KINDS)))
    is_aborted = pc.fill_null(pc.equal(rows["finish_reason"], "abort"), fill_value=False)
    is_input_error = pc.and_(pc.is_valid(rows["error_kind"]), pc.is_null(rows["input_hash"]))
    columns: dict[str, Any] = {
        **{name: rows[name] for name in ("id", "input_hash", "error_kind")},
        "source": pc.if_else(is_input_error, pc.fill_null(rows["source"], ""), pa.scalar(None, pa.string())),
        "is_final": pc.invert(pc.or_(is_transient, is_aborted)),
    }
    return pa.table({name: columns[name] for name in _INDEX_SCHEMA.names}).cast(_INDEX_SCHEMA)


def _keys(index: pa.Table) -> pa.ChunkedArray:
    """Return a key for each row: its id, for an error of the input with its source. One row of each key counts."""
    if index["source"].null_count == len(index):
        return index["id"]
    source = index["source"].cast(pa.large_string())
    with_source = pc.binary_join_element_wise(index["id"], source, pa.scalar("\0", pa.large_string()))
    return pc.if_else(pc.is_valid(source), with_source, index["id"])


def codes_of(values: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return numbers from 0 on that are equal where the values are equal."""
    chunks = values.dictionary_encode().chunks
    return np.concatenate([np.empty(0, np.int64), *(chunk.indices.to_numpy(zero_copy_only=False) for chunk in chunks)])


def _mask(values: pa.ChunkedArray) -> Mask:
    return np.asarray(values.to_numpy(), dtype=bool)


def _number(name: str) -> int:
    match = re.fullmatch(PART_NAME, name)
    assert match is not None
    return int(match["number"])
