"""Reading the input: text, JSON lines and Parquet files, row by row. A bad row or file becomes an error row.

Text is in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayspec.batch.input_files import (
    KNOWN_TYPES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    InputFiles,
    file_type,
    find_files,
)
from rayspec.batch.rows import Row
from rayspec.command.locations import Location, UnreadableFileError, error_detail
from rayspec.types import InputFileError

_ROWS_PER_READ = 16  # long documents: a batch of rows must stay small
_DEFAULT_ID_COLUMN = "id"

# The mark of little-endian UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_UTF_8 = "UTF-8"
_BEGINNING = 4  # bytes that tell the encoding

ByteFile = io.BufferedReader | gzip.GzipFile


class EmptyFileError(InputFileError):
    kind = "empty_file"


class NotUtf8Error(InputFileError):
    kind = "not_utf8"


class MalformedRowError(InputFileError):
    kind = "malformed_row"


class MissingColumnError(InputFileError):
    kind = "missing_column"


class InvalidValueError(InputFileError):
    """The text or id is null, empty or of the wrong type."""

    kind = "invalid_value"


class DuplicateIdError(InputFileError):
    kind = "duplicate_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a JSON-lines or Parquet row hold what.

    id None: "id" where the file has this column, else the file's name (`InputFile.name`) and the row's number.
    messages: a column of chat messages that is used instead of the text where it is present; None: text only.
    """

    text: str = "text"
    id: str | None = None
    messages: str | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.id or _DEFAULT_ID_COLUMN, self.text, self.messages) if name is not None]


class UndecodableError(ValueError):
    """Bytes that are no text in the encoding that they should have."""


def input_row(row_id: str, *, source: str, text: str | None = None, messages: Sequence[Any] | None = None) -> Row:
    """A row with a text or chat messages, whichever is given."""
    encoded = json.dumps(messages) if messages is not None else None
    content = text if text is not None else encoded or ""
    digest = hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return Row(id=row_id, source=source, document=text, messages=encoded, input_hash=digest)


def read_documents(inputs: Iterable[str], columns: Columns) -> Iterator[Row]:
    """The rows of files, folders and glob patterns, read as they are asked for.

    Never raises for what a file holds. Raises ConfigError as `find_files` does.
    """
    check = DuplicateCheck()
    for file in expand(inputs).files:
        for row in read_file(file.path, columns, name=file.name):
            yield check(row)


def expand(inputs: Iterable[str]) -> InputFiles:
    """What `find_files` finds; `inputs` itself where it has been found before. Raises ConfigError."""
    return inputs if isinstance(inputs, InputFiles) else find_files(inputs)


def read_file(path: str, columns: Columns, *, name: str | None = None) -> Iterator[Row]:
    """The rows of one file. A file that cannot be read, or ends early, yields an error row in place of the rest.

    path: a path or URI. name: what rows and errors call the file; its path where None. Raises ConfigError for a URI of
    an unknown kind.
    """
    name = name or path
    try:
        location = Location.parse(path)
        reader = _reader(location, name)
    except UnreadableFileError as error:
        yield _failed(name, error)
        return
    num_rows = 0
    try:
        for source, row in reader(location, name, columns):
            num_rows += 1
            yield _row_of(row, source, columns)
    except (OSError, pa.ArrowException) as error:
        where = f"after {num_rows} rows " if num_rows else ""
        yield _failed(name, UnreadableFileError(f"{name}: could not be read {where}({error_detail(error)})"))
        return
    if num_rows == 0:
        yield _failed(name, EmptyFileError(f"{name}: the file is empty; give it rows or leave it out"))


class DuplicateCheck:
    """Turns every row whose id another row has already into an error. A row read twice is the same row."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def __call__(self, row: Row) -> Row:
        first = self._sources.setdefault(row.id, str(row.source))
        return row if row.error_kind is not None or first == row.source else as_duplicate(row, first)


def as_duplicate(row: Row, first: str | None) -> Row:
    """The error row of a row whose id is that of the row at `first`."""
    return row.refused(DuplicateIdError(f"{row.source}: id {row.id!r} is that of {first} too; ids must be unique"))


_Fields = Mapping[str, Any] | InputFileError
_Reader = Callable[[Location, str, Columns], Iterator[tuple[str, _Fields]]]


def _reader(location: Location, name: str) -> _Reader:
    """Raises UnreadableFileError for what is no file of a known type."""
    if location.is_folder:
        location.check_listing()
        raise UnreadableFileError(f"{name}: the folder holds no file of a known type; known are {KNOWN_TYPES}")
    kind = file_type(location.file_name)
    if kind is None:
        raise UnreadableFileError(f"{name}: its type is not known; known are {KNOWN_TYPES}")
    if kind.suffix in PARQUET_SUFFIXES:
        return _read_parquet
    return partial(_read_text if kind.suffix in TEXT_SUFFIXES else _read_jsonl, is_zipped=kind.is_zipped)


def _read_text(location: Location, name: str, columns: Columns, *, is_zipped: bool) -> Iterator[tuple[str, _Fields]]:
    """One document: the whole file."""
    with opened(location, is_zipped=is_zipped) as file:
        content = file.read()
    if content:
        text = _decode(content, name)
        row = {columns.text: text, columns.id or _DEFAULT_ID_COLUMN: name}
        yield name, text if isinstance(text, InputFileError) else row


def _read_jsonl(location: Location, name: str, _columns: Columns, *, is_zipped: bool) -> Iterator[tuple[str, _Fields]]:
    number = 0
    try:
        with opened(location, is_zipped=is_zipped) as file:
            for number, line in enumerate(lines(file), start=1):
                source = f"{name}:{number}"
                if line.strip():
                    yield source, _parse_line(line, source)
    except UndecodableError as error:
        source = f"{name}:{number + 1}"
        yield source, NotUtf8Error(f"{source}: {error}; convert the file")


def _parse_line(line: bytes, source: str) -> _Fields:
    text = _decode(line, source)
    if isinstance(text, InputFileError):
        return text
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return MalformedRowError(f"{source}: not valid JSON: {error}")
    if b"\\u" in line and not _is_unicode(row):
        return MalformedRowError(f"{source}: holds half of a surrogate pair, which is no character")
    if not isinstance(row, dict):
        return MalformedRowError(f"{source}: a row must be a JSON object, not {type(row).__name__}")
    return row


def _is_unicode(row: object) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(location: Location, name: str, columns: Columns) -> Iterator[tuple[str, _Fields]]:
    number = 0
    with location.open() as content, pq.ParquetFile(content) as file:
        wanted = [column for column in columns.names if column in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=_ROWS_PER_READ, columns=wanted):
            for index in range(batch.num_rows):
                number += 1
                source = f"{name}:{number}"
                yield source, _parquet_row(batch, index, source)


def _parquet_row(batch: pa.RecordBatch, index: int, source: str) -> _Fields:
    try:
        return {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return NotUtf8Error(f"{source}: not UTF-8 at byte {error.start}: {error.reason}; write the file again")


def _decode(content: bytes, source: str) -> str | InputFileError:
    try:
        return decode(content)
    except UndecodableError as error:
        return NotUtf8Error(f"{source}: {error}; convert the file to UTF-8")


def _failed(source: str, error: InputFileError, row_id: str | None = None) -> Row:
    return Row(id=row_id or source, source=source).refused(error)


def _row_of(fields: _Fields, source: str, columns: Columns) -> Row:
    if isinstance(fields, InputFileError):
        return _failed(source, fields)
    row_id = None
    try:
        row_id = _row_id(fields, source, columns)
        messages = _messages(fields, source, columns)
        text = _text(fields, source, columns) if messages is None else None
    except InputFileError as error:
        return _failed(source, error, row_id)
    return input_row(row_id, source=source, text=text, messages=messages)


def _row_id(row: Mapping[str, Any], source: str, columns: Columns) -> str:
    value = row.get(columns.id or _DEFAULT_ID_COLUMN)
    if columns.id is None and value is None:
        return source
    if columns.id is not None and columns.id not in row:
        raise MissingColumnError(f"{source}: no column {columns.id!r} for the id; {_present(row)}")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise InvalidValueError(f"{source}: the id is {value!r}; it must be text or a whole number")
    return str(value)


def _text(row: Mapping[str, Any], source: str, columns: Columns) -> str:
    if columns.text not in row:
        raise MissingColumnError(f"{source}: no column {columns.text!r} for the text; {_present(row)}")
    value = row[columns.text]
    if not isinstance(value, str):
        name = "null" if value is None else type(value).__name__
        raise InvalidValueError(f"{source}: column {columns.text!r} is {name}; it must be text")
    if not value.strip():
        raise InvalidValueError(f"{source}: column {columns.text!r} is empty; there is nothing to work on")
    return value


def _messages(row: Mapping[str, Any], source: str, columns: Columns) -> list[dict[str, str]] | None:
    value = row.get(columns.messages) if columns.messages is not None else None
    if value is None:
        return None
    good = isinstance(value, list) and value and all(_is_message(message) for message in value)
    if not good:
        raise InvalidValueError(
            f'{source}: column {columns.messages!r} must be a list of {{"role": ..., "content": ...}}'
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _present(row: Mapping[str, Any]) -> str:
    return f"the row has {', '.join(map(repr, row)) or 'none that were asked for'}"


def decode(content: bytes) -> str:
    """Without its byte-order mark. Raises UndecodableError."""
    encoding = _encoding(content)
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode(encoding)
    except UnicodeDecodeError as error:
        raise UndecodableError(f"not {encoding} at byte {error.start}: {error.reason}") from error


def lines(file: ByteFile) -> Iterator[bytes]:
    """The lines of a file as UTF-8. Raises UndecodableError where UTF-16 or UTF-32 is damaged.

    Lines of a file in UTF-8 come as they are: each may be damaged by itself.
    """
    encoding = _encoding(file.peek(_BEGINNING)[:_BEGINNING], may_lack_mark=True)
    if encoding == _UTF_8:
        yield from file
        return
    try:
        for line in io.TextIOWrapper(file, encoding=encoding, errors="surrogatepass", newline="\n"):
            yield line.encode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise UndecodableError(f"not {encoding}: {error.reason}") from error


@contextmanager
def opened(location: Location, *, is_zipped: bool) -> Iterator[ByteFile]:
    """The file's content, unzipped. Raises OSError, also where the block reads damaged gzip data."""
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


def _encoding(beginning: bytes, *, may_lack_mark: bool = False) -> str:
    for mark, encoding in _MARKS:
        if beginning.startswith(mark):
            return encoding
    if b"\0" in beginning[:_BEGINNING] and not may_lack_mark:
        raise UndecodableError("not UTF-8, but like UTF-16 or UTF-32 without a byte-order mark")
    return _UTF_8
