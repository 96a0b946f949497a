"""Reads the input: text, JSON lines and Parquet files, row by row. A bad row or file becomes an error row.

Text is in UTF-8, with or without a byte-order mark.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import math
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.batch.input_files import (
    KNOWN_TYPES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    InputFiles,
    Piece,
    file_type,
    find_files,
)
from rayspec.batch.rows import Row
from rayspec.command.locations import FILE_ERRORS, Location, UnreadableFileError, error_detail
from rayspec.prompts import read_conversation
from rayspec.types import InputFileError, InvalidMessagesError

NO_ID_COLUMN = "none"
_DEFAULT_ID_COLUMN = "id"
_MAX_EXACT_FLOAT = 2.0**53
_BYTES_PER_PIECE, _NUM_FILES_TO_SPLIT = 2**26, 64
_MIN_ROWS_PER_READ, _MAX_ROWS_PER_READ, _BYTES_PER_READ = 16, 1024, 2**20
_READ_ERRORS = (*FILE_ERRORS, EOFError, zlib.error)  # the last two are of damaged gzip data


class EmptyFileError(InputFileError):
    kind = "empty_file"


class NotUtf8Error(InputFileError):
    kind = "not_utf8"


class MalformedRowError(InputFileError):
    kind = "malformed_row"


class DuplicateIdError(InputFileError):
    kind = "duplicate_id"


class DuplicateColumnError(InputFileError):
    """Two columns of a file, or two keys of an object, have the same name. Either could be meant."""

    kind = "duplicate_column"


class MissingColumnError(InputFileError):
    kind = "missing_column"


class InvalidValueError(InputFileError):
    """The text or id is null, empty or of the wrong type."""

    kind = "invalid_value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of the columns that hold the id, the text and the messages of a JSON-lines or Parquet row.

    id None: the column "id" where a row has a value there, else the file's name (`InputFile.name`) and the row number.
    id "none": always these two.
    messages: a column of chat messages, used instead of the text where a row has it; None: text only.
    """

    text: str = "text"
    id: str | None = None
    messages: str | None = None

    @property
    def id_name(self) -> str | None:
        """The column of ids; None where ids are made from places."""
        return None if self.id == NO_ID_COLUMN else self.id or _DEFAULT_ID_COLUMN

    @property
    def names(self) -> list[str]:
        return [name for name in (self.id_name, self.text, self.messages) if name is not None]

    def row_id(self, row: Mapping[str, Any], source: str) -> str:
        """Return the id of a row. source: the row's place, which is its id where it has none. Raises InputFileError."""
        name = self.id_name
        if name is None:
            return source
        value = row.get(name)
        is_null = value is None or (isinstance(value, float) and math.isnan(value))  # pandas' null
        if self.id is None and is_null:
            return source
        if name not in row:
            raise MissingColumnError(f"{source}: no column {name!r} for the id; {_present(row)}")
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT_FLOAT:
            return str(int(value))  # pandas makes whole numbers floats where a null is among them
        raise InvalidValueError(
            f"{source}: the id is {reprlib.repr(value)}; it must be text or a whole number. Choose the column with "
            f"--id-column; with --id-column {NO_ID_COLUMN} the row's place is its id"
        )

    def content(self, row: Mapping[str, Any], source: str) -> tuple[str | None, Sequence[Mapping[str, Any]] | None]:
        """Return the text of a row, or its messages as `read_conversation` returns them. Raises InputFileError."""
        conversation = row.get(self.messages) if self.messages is not None else None
        if conversation is not None:
            try:
                return None, read_conversation(conversation)
            except InvalidMessagesError as error:
                raise InvalidValueError(f"{source}: column {self.messages!r} holds no conversation: {error}") from None
        if self.text not in row:
            raise MissingColumnError(f"{source}: no column {self.text!r} for the text; {_present(row)}")
        value = row[self.text]
        if not isinstance(value, str):
            name = "null" if value is None else type(value).__name__
            raise InvalidValueError(f"{source}: column {self.text!r} is {name}; it must be text")
        if not value.strip():
            raise InvalidValueError(f"{source}: column {self.text!r} is empty; there is nothing to work on")
        return value, None


def _present(row: Mapping[str, Any]) -> str:
    return f"the row has {', '.join(map(repr, row)) or 'none that were asked for'}"


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
    for piece in find_files(inputs).files:
        yield from (row for _, row in read_piece(piece, columns))


def read_piece(piece: Piece, columns: Columns, wanted: AbstractSet[int] | None = None) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a piece, each with its number in the file, from 1 on. If the file cannot be read or ends early,
    an error row with number 0 replaces the rows that are missing.

    wanted: read only the rows with these numbers; 0 is the number of the single row of a text file. Then an error of
    the file yields an error row only if wanted rows are missing. Raises ConfigError for a URI of an unknown kind.
    """
    if piece.rows:
        yield from ((n, row) for n, row in enumerate(piece.rows, start=1) if wanted is None or n in wanted)
        return
    num_rows, failure = 0, None  # type: int, InputFileError | None
    try:
        for number, fields in _read(Location.parse(piece.path), piece, columns, wanted):
            num_rows += 1
            yield number, _row_of(fields, piece.source(number), columns)
    except InputFileError as error:
        failure = error
    except _READ_ERRORS as error:
        where = f"after {piece.num_before + num_rows} rows " if num_rows and wanted is None else ""
        failure = UnreadableFileError(f"{piece.name}: could not be read {where}({error_detail(error)})")
    num_missing = len(wanted) - num_rows if wanted is not None else 0
    if failure is None and num_missing:
        failure = UnreadableFileError(f"{piece.name}: {num_missing} rows are gone; do not change the input")
    elif failure is None and num_rows == 0:
        failure = EmptyFileError(f"{piece.name}: the file is empty; give it rows or leave it out")
    if failure is not None and (wanted is None or num_missing):
        yield 0, Row(id=piece.name, source=piece.name).refused(failure)


def as_duplicate(row: Row, first: str | None) -> Row:
    """Return `row` as an error row, because the row at `first` has the same id."""
    return row.refused(DuplicateIdError(f"{row.source}: id {row.id!r} is that of {first} too; ids must be unique"))


_Fields = Mapping[Any, Any] | InputFileError
_Numbered = Iterator[tuple[int, _Fields]]


def _row_of(fields: _Fields, source: str, columns: Columns) -> Row:
    row_id = source
    try:
        if isinstance(fields, InputFileError):
            raise fields
        row_id = columns.row_id(fields, source)
        text, messages = columns.content(fields, source)
    except InputFileError as error:
        return Row(id=row_id, source=source).refused(error)
    return input_row(row_id, source=source, text=text, messages=messages)


def _read(location: Location, piece: Piece, columns: Columns, wanted: AbstractSet[int] | None) -> _Numbered:
    """Yield the fields of rows, each with its number. A text file is one row with number 0."""
    if location.is_folder:
        location.entries()  # raises the error of a folder that cannot be listed
        raise UnreadableFileError(f"{piece.name}: the folder holds no file of a known type; known are {KNOWN_TYPES}")
    kind = file_type(location.file_name)
    if kind is None:
        raise UnreadableFileError(f"{piece.name}: its type is not known; known are {KNOWN_TYPES}")
    suffix, is_zipped = kind
    if suffix in PARQUET_SUFFIXES:
        yield from _read_parquet(location, piece, columns, wanted)
        return
    with location.open() as opened, gzip.GzipFile(fileobj=opened) if is_zipped else opened as file:
        if suffix in TEXT_SUFFIXES:
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


def pieces_of(inputs: Iterable[str] | InputFiles) -> list[Piece]:
    """Split files, folders and patterns into pieces for read tasks. Of few files, Parquet files are split at row groups
    into pieces of about 64 MB. A file that cannot be read is one piece; reading the piece reports the error."""
    files = find_files(inputs).files
    if len(files) >= _NUM_FILES_TO_SPLIT:
        return list(files)
    return [piece for file in files for piece in _pieces_of_file(file)]


def _pieces_of_file(file: Piece) -> Iterator[Piece]:
    first = num_rows = num_before = num_bytes = 0
    groups = _row_groups(file)
    for number, group in enumerate(groups, start=1):
        num_rows, num_bytes = num_rows + group.num_rows, num_bytes + group.total_byte_size
        if num_bytes >= _BYTES_PER_PIECE or (number == len(groups) and first > 0):
            yield replace(file, groups=(first, number - first), num_before=num_before)
            first, num_before, num_bytes = number, num_rows, 0
    if first == 0:
        yield file


def _row_groups(file: Piece) -> list[pq.RowGroupMetaData]:
    """Return what a Parquet file says of its row groups; an empty list for other files and those that are damaged."""
    with suppress(*FILE_ERRORS, UnreadableFileError):
        location = Location.parse(file.path)
        if location.suffix in PARQUET_SUFFIXES:
            with location.open() as content, pq.ParquetFile(content) as parquet:
                return [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
    return []
