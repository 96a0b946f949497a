"""Part files, in which rows are committed, and an index of their rows.

    part-000007-1f2e3d4c.parquet      rows, committed together by one session
    .index.parquet                    the ids in most parts, so that a resume need not read them; a cache

The parts are authoritative. The index names each part with its size in bytes; a part that is not in the index is read.
Small parts are joined: the larger part is written completely before the small parts are deleted. If the driver is
killed in between, rows are stored twice, and only one copy counts.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.batch.results import (
    DamagedRowsError,
    FileFormat,
    read_rows,
    read_table,
    write_rows,
    write_tables,
)
from rayspec.batch.row_index import DESCRIBED_BY, INDEX_SCHEMA, Mask, RowIndex, described, described_rows
from rayspec.batch.rows import Row
from rayspec.command.locations import FILE_ERRORS, Location, error_detail
from rayspec.types import RayspecError

PART_NAME: Final = r"part-(?P<number>\d{6,})-[0-9a-f]{8}\.(?:parquet|jsonl)"
INDEX_NAME: Final = ".index.parquet"
_INDEX_KEY = b"rayspec.parts"
_READ_THREADS = 8  # many, because remote stores answer slowly
_NUM_SMALL = 64  # small parts are joined when there are so many
_ROWS_OF_LARGE, _BYTES_OF_LARGE = 2**14, 2**24
_MIN_UNINDEXED_ROWS = 10_000

logger = logging.getLogger(__name__)


class DamagedOutputError(RayspecError):
    """A file of an output folder is damaged: its content is not what was written."""

    kind = "damaged_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file of rows."""

    name: str
    num_bytes: int
    num_rows: int

    @property
    def is_small(self) -> bool:
        return self.num_rows < _ROWS_OF_LARGE and self.num_bytes < _BYTES_OF_LARGE


class Parts:
    """The parts in a folder, in the order of their numbers, which is the order of `index`.

    may_join: no other driver can be reading the parts, so that small ones may be replaced. Raises DamagedOutputError
    for a part that is not as it was written.
    """

    def __init__(self, folder: Location, *, text_column: str, file_format: FileFormat, may_join: bool) -> None:
        self._folder, self._text_column, self._format = folder, text_column, file_format
        self._may_join = may_join
        self._parts: list[Part] = []
        self._indexed: frozenset[Part] = frozenset()
        self.index = RowIndex(self._read())
        self._tidy(0)

    # --- what is there ---

    def _read(self) -> pa.Table:
        """Return INDEX_SCHEMA rows of all parts, from the index file where possible. Also sets the list of parts."""
        sizes = {name: size for name, size in self._folder.file_sizes().items() if re.fullmatch(PART_NAME, name)}
        names = sorted(sizes, key=lambda name: (_number(name), name))
        known = dict(self._read_index())
        indexed = {part.name: (part, rows) for part, rows in known.items() if part.num_bytes == sizes.get(part.name)}
        missing = [name for name in names if name not in indexed]
        with ThreadPoolExecutor(_READ_THREADS) as threads:
            for name, rows in zip(missing, threads.map(self._describe, missing), strict=True):
                indexed[name] = Part(name=name, num_bytes=sizes[name], num_rows=len(rows)), rows
        self._parts = [indexed[name][0] for name in names]
        self._indexed = frozenset(known) & frozenset(self._parts)
        return pa.concat_tables([INDEX_SCHEMA.empty_table(), *(indexed[name][1] for name in names)]).combine_chunks()

    def _describe(self, name: str) -> pa.Table:
        return described(self._table(name, DESCRIBED_BY))

    def _table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        with self._opened(name) as file:
            return read_table(file, text_column=self._text_column, file_format=self._format, columns=columns)

    def _opened(self, name: str) -> _NamingPart:
        return _NamingPart(self._folder.join(name))

    # --- the index ---

    def _read_index(self) -> list[tuple[Part, pa.Table]]:
        """Return the parts in the index file, with their rows. The list is empty if there is no usable index."""
        try:
            with self._folder.join(INDEX_NAME).open() as file:
                table = pq.read_table(file, page_checksum_verification=True)
            parts = [Part(**fields) for fields in json.loads(table.schema.metadata[_INDEX_KEY])]
            return list(_split(table.replace_schema_metadata(None).cast(INDEX_SCHEMA), parts))
        except FileNotFoundError:
            return []
        except (*FILE_ERRORS, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s cannot be used and is made again: %s", self._folder.join(INDEX_NAME), error)
            return []

    def _write_index(self) -> None:
        content = json.dumps([asdict(part) for part in self._parts])
        table = self.index.stored.replace_schema_metadata({_INDEX_KEY: content.encode()})
        with self._folder.join(INDEX_NAME).writing() as file:
            pq.write_table(table, file, write_page_checksum=True)
        self._indexed = frozenset(self._parts)

    @property
    def _is_index_due(self) -> bool:
        """Whether more than a quarter of the rows or parts is not in the index, and a resume would have to read
        them."""
        unindexed = [part for part in self._parts if part not in self._indexed]
        num_rows = sum(part.num_rows for part in unindexed)
        is_large = num_rows > max(_MIN_UNINDEXED_ROWS, self.index.num_stored // 4)
        return is_large or len(unindexed) > max(_NUM_SMALL, len(self._parts) // 4)

    # --- more rows ---

    def append(self, rows: Sequence[Row], run_id: str) -> None:
        """Write the rows as one part, whole or not at all. Raises OSError."""
        number = _number(self._parts[-1].name) + 1 if self._parts else 1
        name = f"part-{number:06d}-{run_id}.{self._format}"
        with self._folder.join(name).writing() as file:
            write_rows(file, rows, text_column=self._text_column, file_format=self._format)
            part = Part(name=name, num_bytes=file.tell(), num_rows=len(rows))
        # In this order, because a signal may interrupt anywhere; the next call then repeats all steps.
        self.index.append(described_rows(rows), start=sum(part.num_rows for part in self._parts))
        self._parts.append(part)

    def tidy(self) -> None:
        """Join the last parts and update the index, if either is due. Files that cannot be read or written stay as they
        are."""
        num_small = sum(1 for _ in itertools.takewhile(lambda part: part.is_small, reversed(self._parts)))
        if num_small >= _NUM_SMALL:
            self._tidy(len(self._parts) - num_small)

    def _tidy(self, start: int) -> None:
        try:
            if self._may_join:
                self._join(start)
            if self._is_index_due:
                self._write_index()
        except (OSError, DamagedOutputError) as error:
            logger.warning("the parts in %s stay as they are: %s", self._folder, error_detail(error))

    def _join(self, start: int) -> None:
        """Join neighbours among the parts from number `start` on, if many of these are small."""
        parts = self._parts[start:]
        if sum(part.is_small for part in parts) >= _NUM_SMALL:
            for group in _neighbours(parts):
                if len(group) > 1:
                    self._replace(group)

    def _replace(self, group: Sequence[Part]) -> None:
        name = f"part-{_number(group[-1].name):06d}-{uuid.uuid4().hex[:8]}.{self._format}"
        with self._folder.join(name).writing() as file:
            self._copy(file, [(part, None) for part in group])
            joined = Part(name=name, num_bytes=file.tell(), num_rows=sum(part.num_rows for part in group))
        start = self._parts.index(group[0])
        self._parts[start : start + len(group)] = [joined]
        for replaced in group:
            self._folder.join(replaced.name).delete()

    # --- reading ---

    def rows(self, *, with_text: bool = True) -> Iterator[Row]:
        """Yield the rows that count (see RowIndex). Raises DamagedOutputError."""
        column = self._text_column
        for part, mask in self._counting():
            with self._opened(part.name) as file:
                rows = read_rows(file, text_column=column, file_format=self._format, with_text=with_text)
                yield from itertools.compress(rows, mask)

    def write_counting(self, file: IO[bytes]) -> None:
        """Write the rows that count, as the whole content of an open file. Raises DamagedOutputError, OSError."""
        self._copy(file, self._counting())

    def _counting(self) -> Iterator[tuple[Part, Mask]]:
        start, counting, parts = 0, self.index.counting, list(self._parts)
        for part in parts:
            yield part, counting[start : start + part.num_rows]
            start += part.num_rows

    def _copy(self, file: IO[bytes], parts: Iterable[tuple[Part, Mask | None]]) -> None:
        if self._format == "jsonl":
            for part, mask in parts:
                file.writelines(self._lines(part, mask))
        else:
            tables = (self._filtered(part, mask) for part, mask in parts)
            write_tables(file, tables, text_column=self._text_column)

    def _lines(self, part: Part, mask: Mask | None) -> list[bytes]:
        with self._opened(part.name) as file:
            return list(file if mask is None else itertools.compress(file, mask))

    def _filtered(self, part: Part, mask: Mask | None) -> pa.Table:
        table = self._table(part.name)
        return table if mask is None or mask.all() else table.filter(mask)


class _NamingPart:
    """Opens a part for reading. Errors of the part become a DamagedOutputError that names the part."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def __enter__(self) -> IO[bytes]:
        try:
            self._file = self._location.open()
        except OSError as error:
            raise self._damaged(error) from error
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, DamagedRowsError | OSError):
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DamagedOutputError:
        detail = error_detail(error)
        return DamagedOutputError(f"{self._location}: {detail}; put it back, or delete it to have its rows done again")


def delete_parts(folder: Location) -> None:
    """Delete the index and then the parts, so that the index never names a deleted part."""
    folder.join(INDEX_NAME).delete()
    for name in folder.file_sizes():
        if re.fullmatch(PART_NAME, name):
            folder.join(name).delete()


def _neighbours(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield groups of small neighbouring parts. A group ends when it is as large as a large part."""
    group: list[Part] = []
    num_rows = num_bytes = 0
    for part in parts:
        is_full = num_rows >= _ROWS_OF_LARGE or num_bytes >= _BYTES_OF_LARGE
        if group and (is_full or not part.is_small):
            yield group
            group, num_rows, num_bytes = [], 0, 0
        if part.is_small:
            group.append(part)
            num_rows, num_bytes = num_rows + part.num_rows, num_bytes + part.num_bytes
    if group:
        yield group


def _split(rows: pa.Table, parts: Sequence[Part]) -> Iterator[tuple[Part, pa.Table]]:
    starts = itertools.accumulate((part.num_rows for part in parts), initial=0)
    for part, start in zip(parts, starts, strict=False):
        yield part, rows.slice(start, part.num_rows)
    if sum(part.num_rows for part in parts) != len(rows):
        raise ValueError("its parts have another number of rows")


def _number(name: str) -> int:
    match = re.fullmatch(PART_NAME, name)
    assert match is not None
    return int(match["number"])
