"""Reading the input: text, JSON lines and Parquet files, row by row. A bad row or file becomes an error row.

Text is in UTF-8, with or without a byte-order mark.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.batch.columns import Columns, InvalidValueError
from rayspec.batch.input_files import (
    KNOWN_TYPES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    InputFile,
    InputFiles,
    file_type,
    find_files,
)
from rayspec.batch.rows import Row
from rayspec.command.locations import FILE_ERRORS, Location, UnreadableFileError, error_detail
from rayspec.types import InputFileError

_BYTES_PER_PIECE, _NUM_FILES_TO_SPLIT = 2**26, 64
_MIN_ROWS_PER_READ, _MAX_ROWS_PER_READ, _BYTES_PER_READ = 16, 1024, 2**20


ByteFile = io.BufferedReader | gzip.GzipFile


class EmptyFileError(InputFileError):
    kind = "empty_file"


class NotUtf8Error(InputFileError):
    kind = "not_utf8"


class MalformedRowError(InputFileError):
    kind = "malformed_row"


class DuplicateColumnError(InputFileError):
    """Two columns of a file, or two keys of an object, have the same name. Either could be meant."""

    kind = "duplicate_column"


class DuplicateIdError(InputFileError):
    kind = "duplicate_id"


def input_row(row_id: str, *, source: str, text: str | None = None, messages: Sequence[Any] | None = None) -> Row:
    """Make a row from a text or from chat messages, whichever is given."""
    encoded = json.dumps(messages) if messages is not None else None
    content = text if text is not None else encoded or ""
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return Row(id=row_id, source=source, document=text, messages=encoded, input_hash=digest)


def read_documents(inputs: Iterable[str] | InputFiles, columns: Columns) -> Iterator[Row]:
    """Yield the rows of files, folders and glob patterns. Files are read on demand.

    An error in the content of a file yields an error row. Raises ConfigError as `find_files` does.
    """
    check = DuplicateCheck()
    for file in find_files(inputs):
        for _, row in read_piece(Piece(path=file.path, name=file.name), columns):
            yield check(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of the input that one task reads: a file, or some row groups of a Parquet file.

    path: a path or URI. name: the name of the file in rows and errors. groups: the first row group and the number of
    row groups; None is the whole file. num_before: rows of the file before the first row group.
    """

    path: str
    name: str
    groups: tuple[int, int] | None = None
    num_before: int = 0

    def source(self, number: int) -> str:
        """Identify the source of the row with this number; 0 is the file itself."""
        return f"{self.name}:{number}" if number else self.name


def read_piece(piece: Piece, columns: Columns, wanted: AbstractSet[int] | None = None) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a piece, each with its number in the file, from 1 on. If the file cannot be read or ends early,
    an error row with number 0 replaces the rows that are missing.

    wanted: read only the rows with these numbers; 0 is the number of the single row of a text file. Then an error of
    the file yields an error row only if wanted rows are missing. Raises ConfigError for a URI of an unknown kind.
    """
    num_rows, failure = 0, None  # type: int, InputFileError | None
    try:
        for number, fields in _read(Location.parse(piece.path), piece, columns, wanted):
            num_rows += 1
            yield number, _row_of(fields, piece.source(number), columns)
    except InputFileError as error:
        failure = error
    except FILE_ERRORS as error:
        where = f"after {piece.num_before + num_rows} rows " if num_rows and wanted is None else ""
        failure = UnreadableFileError(f"{piece.name}: could not be read {where}({error_detail(error)})")
    num_missing = len(wanted) - num_rows if wanted is not None else 0
    if failure is None and num_missing:
        failure = UnreadableFileError(f"{piece.name}: {num_missing} rows are gone; do not change the input")
    elif failure is None and num_rows == 0:
        failure = EmptyFileError(f"{piece.name}: the file is empty; give it rows or leave it out")
    if failure is not None and (wanted is None or num_missing):
        yield 0, Row(id=piece.name, source=piece.name).refused(failure)


class DuplicateCheck:
    """Turns a row into an error row if another row already has its id. Reading a row twice is no error."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def __call__(self, row: Row) -> Row:
        first = self._sources.setdefault(row.id, str(row.source))
        return row if row.error_kind is not None or first == row.source else as_duplicate(row, first)


def as_duplicate(row: Row, first: str | None) -> Row:
    """Return `row` as an error row, because the row at `first` has the same id."""
    return row.refused(DuplicateIdError(f"{row.source}: id {row.id!r} is that of {first} too; ids must be unique"))


_Fields = Mapping[Any, Any] | InputFileError
_Numbered = Iterator[tuple[int, _Fields]]


def _read(location: Location, piece: Piece, columns: Columns, wanted: AbstractSet[int] | None) -> _Numbered:
    """Yield the fields of rows, each with its number. A text file is one row with number 0."""
    if location.is_folder:
        location.entries()  # raises the error of a folder that cannot be listed
        raise UnreadableFileError(f"{piece.name}: the folder holds no file of a known type; known are {KNOWN_TYPES}")
    kind = file_type(location.file_name)
    if kind is None:
        raise UnreadableFileError(f"{piece.name}: its type is not known; known are {KNOWN_TYPES}")
    if kind.suffix in PARQUET_SUFFIXES:
        yield from _read_parquet(location, piece, columns, wanted)
        return
    with opened(location, is_zipped=kind.is_zipped) as file:
        if kind.suffix in TEXT_SUFFIXES:
            if content := file.read():
                yield 0, {columns.text: _decoded(content, piece.name), columns.id_name: piece.name}
            return
        for number, line in enumerate(file, start=1):
            if (wanted is None or number in wanted) and line.strip():
                try:
                    yield number, _parse_line(line, piece.source(number))
                except InputFileError as error:
                    yield number, error


def _parse_line(line: bytes, source: str) -> dict[str, Any]:
    """Return the fields of a line of JSON. Raises NotUtf8Error, DuplicateColumnError and MalformedRowError."""
    text = _decoded(line, source)
    try:
        row = _JSON.decode(text)
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except DuplicateColumnError as error:
        raise DuplicateColumnError(f"{source}: {error}") from error
    except UnicodeEncodeError as error:
        raise MalformedRowError(f"{source}: holds half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:  # a whole number of more than 4300 digits is a ValueError
        raise MalformedRowError(f"{source}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise MalformedRowError(f"{source}: a row must be a JSON object, not {type(row).__name__}")
    return row


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise DuplicateColumnError(f"key {twice!r} stands twice in one object; leave one out")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=_with_unique_keys)


def _read_parquet(location: Location, piece: Piece, columns: Columns, wanted: AbstractSet[int] | None) -> _Numbered:
    """Row groups without a wanted row are not read."""
    number = piece.num_before
    with location.open() as content, pq.ParquetFile(content) as file:
        names = [name for name in columns.names if name in file.schema_arrow.names]
        twice = next((name for name in names if file.schema_arrow.names.count(name) > 1), None)
        if twice is not None:
            raise DuplicateColumnError(f"{piece.name}: two columns are called {twice!r}; rename one")
        first, num_groups = piece.groups or (0, file.num_row_groups)
        for group in range(first, first + num_groups):
            about = file.metadata.row_group(group)
            if wanted is not None and wanted.isdisjoint(range(number + 1, number + about.num_rows + 1)):
                number += about.num_rows
                continue
            bytes_per_row = about.total_byte_size // max(1, about.num_rows)
            num_at_once = max(_MIN_ROWS_PER_READ, min(_BYTES_PER_READ // max(1, bytes_per_row), _MAX_ROWS_PER_READ))
            for batch in file.iter_batches(batch_size=num_at_once, row_groups=[group], columns=names):
                numbers = range(number + 1, number + batch.num_rows + 1)
                number += batch.num_rows
                rows = zip(numbers, _parquet_rows(batch, numbers, piece), strict=True)
                yield from (row for row in rows if wanted is None or row[0] in wanted)


def _parquet_rows(batch: pa.RecordBatch, numbers: Sequence[int], piece: Piece) -> Iterator[_Fields]:
    with suppress(ValueError, OverflowError):
        yield from batch.to_pylist()
        return
    for index, number in enumerate(numbers):
        source = piece.source(number)
        try:
            yield {name: batch.column(name)[index].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield NotUtf8Error(f"{source}: not UTF-8 at byte {error.start}: {error.reason}; write the file again")
        except (ValueError, OverflowError) as error:
            yield InvalidValueError(f"{source}: a value cannot be read ({error}); text and ids must be text")


def pieces(file: InputFile, num_bytes: int) -> Iterator[Piece]:
    """Split a file into pieces of about `num_bytes`: a Parquet file at its row groups. Other files are one piece.

    A file that cannot be read is one piece; reading the piece reports the error.
    """
    whole = Piece(path=file.path, name=file.name)
    try:
        sizes = _group_sizes(Location.parse(file.path))
    except (*FILE_ERRORS, UnreadableFileError):
        sizes = []
    first = num_rows = num_before = size = 0
    for group, (rows_of_group, bytes_of_group) in enumerate(sizes, start=1):
        num_rows, size = num_rows + rows_of_group, size + bytes_of_group
        if size >= num_bytes or (group == len(sizes) and first > 0):
            yield replace(whole, groups=(first, group - first), num_before=num_before)
            first, num_before, size = group, num_rows, 0
    if first == 0:
        yield whole


def pieces_of(inputs: Iterable[str] | InputFiles) -> list[Piece]:
    """Split files, folders and patterns into pieces for read tasks. Of few files, Parquet files are split too."""
    files = find_files(inputs).files
    if len(files) < _NUM_FILES_TO_SPLIT:
        return [piece for file in files for piece in pieces(file, _BYTES_PER_PIECE)]
    return [Piece(path=file.path, name=file.name) for file in files]


def row_counts(piece: Piece) -> Iterator[int]:
    """Yield numbers that add up to the number of rows of a piece, without parsing rows. Empty lines count; an
    unreadable file has 1."""
    try:
        location = Location.parse(piece.path)
        kind = file_type(location.file_name)
        if kind is None or kind.suffix in TEXT_SUFFIXES:
            yield 1
        elif kind.suffix in PARQUET_SUFFIXES:
            first, num_groups = piece.groups or (0, None)
            yield from (num_rows for num_rows, _ in _group_sizes(location)[first:][:num_groups])
        else:
            with opened(location, is_zipped=kind.is_zipped) as file:
                yield from (block.count(b"\n") for block in iter(lambda: file.read(_BYTES_PER_READ), b""))
    except (*FILE_ERRORS, UnreadableFileError):
        yield 1


def _group_sizes(location: Location) -> list[tuple[int, int]]:
    """Return the rows and uncompressed bytes of each row group of a Parquet file; an empty list for other files."""
    if location.suffix not in PARQUET_SUFFIXES:
        return []
    with location.open() as content, pq.ParquetFile(content) as file:
        groups = (file.metadata.row_group(index) for index in range(file.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


def _row_of(fields: _Fields, source: str, columns: Columns) -> Row:
    if isinstance(fields, InputFileError):
        return Row(id=source, source=source).refused(fields)
    row_id = None
    try:
        row_id = columns.row_id(fields, source)
        text, messages = columns.content(fields, source)
    except InputFileError as error:
        return Row(id=row_id or source, source=source).refused(error)
    return input_row(row_id, source=source, text=text, messages=messages)


def _decoded(content: bytes, source: str) -> str:
    """Return a text without its byte-order mark. Raises NotUtf8Error."""
    if b"\0" in content[:4]:
        raise NotUtf8Error(f"{source}: not UTF-8, but like UTF-16 or UTF-32; convert the file to UTF-8")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise NotUtf8Error(
            f"{source}: not UTF-8 at byte {error.start}: {error.reason}; convert the file to UTF-8"
        ) from error


@contextmanager
def opened(location: Location, *, is_zipped: bool) -> Iterator[ByteFile]:
    """Open a file and unzip its content. Raises OSError, also if the block reads damaged gzip data."""
    with location.open() as file:
        if not is_zipped:
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:
                yield unzipped
        except EOFError as error:
            raise OSError("its gzip data is cut short") from error
        except zlib.error as error:
            raise OSError(f"its gzip data is damaged: {error}") from error
