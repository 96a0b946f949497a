"""Reads the input: texts in UTF-8, documents, and rows of files. A bad row or file becomes an error row."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayspec.batch.rows import INVALID_VALUE, MISSING_COLUMN, Columns, Row
from rayspec.batch.sandbox import Sandbox
from rayspec.batch.tables import Table
from rayspec.command.locations import FILE_ERRORS, Location, UnreadableFileError, error_detail, limited_lines
from rayspec.types import ConfigError, InputFileError

TEXT_SUFFIXES = (".txt", ".md")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow",)
EXTRACTED_SUFFIXES = (".pdf", ".docx", ".html", ".htm")
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_COMPRESSIBLE = (*TEXT_SUFFIXES, ".jsonl", ".ndjson", ".json", *CSV_SUFFIXES)
_WITH_OWN_COMPRESSION = PARQUET_SUFFIXES + ARROW_SUFFIXES + EXTRACTED_SUFFIXES
KNOWN_TYPES = (
    f"{', '.join((*_COMPRESSIBLE, *_WITH_OWN_COMPRESSION))}, the first {len(_COMPRESSIBLE)} also with "
    f"{', '.join(_COMPRESSIONS)}"
)
_BYTES_PER_PIECE, _NUM_FILES_TO_SPLIT = 2**26, 64
_MIN_ROWS_PER_READ, _MAX_ROWS_PER_READ, _BYTES_PER_READ = 16, 1024, 2**20
_ARROW_FILE_MAGIC = b"ARROW1"
_NUM_CHECKED = 16  # rows
# Strangers may make the files, and a small one may unpack to any size. Tokenizing takes about 250 bytes a character.
_MAX_TEXT_BYTES, _MAX_WHOLE_BYTES = 2**24, 2**30  # of a text, line, row or value; of a PDF, Word or HTML file
_extractor = Sandbox(most_s=120, most_bytes=2**32)


def file_type(file_name: str) -> tuple[str, str | None] | None:
    """Return the suffix, in lower case and without that of a compression, and pyarrow's name of the compression; None
    for a type that cannot be read."""
    path = PurePosixPath(file_name.lower())
    if compression := _COMPRESSIONS.get(path.suffix):
        suffix = PurePosixPath(path.stem).suffix
        return (suffix, compression) if suffix in _COMPRESSIBLE else None
    return (path.suffix, None) if path.suffix in (*_COMPRESSIBLE, *_WITH_OWN_COMPRESSION) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of the input that one task reads: a file, some row groups of a Parquet file, or rows in memory.

    path: absolute, or a URI. name: of the file in rows and errors, its path below the folder that all inputs share, so
    that it is the same on another mount point. groups: the first row group and their number; None: the whole file.
    num_before: rows before these groups. rows: instead of a file. table: the table that has the data file `path`.
    """

    path: str = ""
    name: str = ""
    groups: tuple[int, int] | None = None
    num_before: int = 0
    rows: tuple[Row, ...] = ()
    table: Table | None = None

    def source(self, number: int) -> str:
        """Identify the source of the row with this number, from 1 on; 0 is the file itself."""
        if self.rows:
            return self.rows[number - 1].source or ""
        return f"{self.name}:{number}" if number else self.name


_LOST = "the rows after it are not read"


def _too_large(source: str, most: int = _MAX_TEXT_BYTES, more: str = "") -> InputFileError:
    return InputFileError(f"{source}: it has more than {most >> 20} MiB; split it{more}", "too_large")


class _Document(NamedTuple):
    """The content of a PDF, Word or HTML file."""

    suffix: str
    content: bytes


def check_template(pieces: Sequence[Piece], columns: Columns) -> None:
    """Check that the rows at the beginning have the columns of the template. Raises ConfigError."""
    first = itertools.islice(read_piece(pieces[0], replace(columns, reads_all=True)), _NUM_CHECKED)
    rows = [row for _, row in first]
    if rows and all(row.error_kind == MISSING_COLUMN for row in rows):
        raise ConfigError(str(rows[0].error))


def input_row(row_id: str, *, source: str, text: str | None = None, messages: Sequence[Any] | None = None) -> Row:
    """Make a row from a text or from chat messages, whichever is given."""
    encoded = json.dumps(messages) if messages is not None else None
    content = text if text is not None else encoded or ""
    kind = b"messages " if text is None else b"text "
    digest = _digest(kind + content.encode(errors="surrogatepass"))
    return Row(id=row_id, source=source, document=text, messages=encoded, input_hash=digest)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_piece(
    piece: Piece, columns: Columns, wanted: AbstractSet[int] | None = None, *, with_text: bool = True
) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a piece, each with its number in the file, from 1 on; 0: the single row of a text file. An
    error row with number 0 replaces the rows that cannot be read.

    wanted: read only the rows with these numbers; an error row stands only for missing ones. with_text: False leaves
    out the texts of PDF, Word and HTML files, which take long. Raises ConfigError for a URI of an unknown kind.
    """
    if piece.rows:
        yield from ((n, row) for n, row in enumerate(piece.rows, start=1) if wanted is None or n in wanted)
        return
    num_rows, failure = 0, None  # type: int, InputFileError | None
    try:
        for number, fields in _read(piece, columns, wanted):
            num_rows += 1
            yield number, _row_of(fields, piece.source(number), columns, with_text=with_text)
    except InputFileError as error:
        failure = error
    except (*FILE_ERRORS, EOFError, zlib.error, csv.Error) as error:  # the two before the last are of damaged data
        where = f"after {piece.num_before + num_rows} rows " if num_rows and wanted is None else ""
        failure = UnreadableFileError(f"{piece.name}: could not be read {where}({error_detail(error)})")
    num_missing = len(wanted) - num_rows if wanted is not None else 0
    if failure is None and num_missing:
        failure = UnreadableFileError(f"{piece.name}: {num_missing} rows are gone; do not change the input")
    elif failure is None and num_rows == 0 and piece.table is None and not piece.num_before:
        failure = InputFileError(f"{piece.name}: the file is empty; give it rows or leave it out", "empty_file")
    if failure is not None and (wanted is None or num_missing):
        first = piece.num_before + 1 if piece.num_before else 0  # so that each piece is a row of its own
        yield 0, Row(id=piece.name, source=piece.source(first)).refused(failure)


_Fields = Mapping[Any, Any] | InputFileError
_Numbered = Iterator[tuple[int, _Fields]]


def _row_of(fields: _Fields, source: str, columns: Columns, *, with_text: bool) -> Row:
    row_id = source
    try:
        if isinstance(fields, InputFileError):
            raise fields
        row_id = columns.row_id(fields, source)
        document = fields.get(columns.of_whole_files)
        if not isinstance(document, _Document):
            text, messages = columns.content(fields, source)
            return input_row(row_id, source=source, text=text, messages=messages)
    except InputFileError as error:
        return Row(id=row_id, source=source).refused(error)
    # What decides the text; the program is a part of it.
    version = metadata.version("pypdf") if document.suffix == ".pdf" else ""
    digest = _digest(f"{document.suffix} {version} ".encode() + document.content)
    row = Row(id=row_id, source=source, input_hash=digest)
    if not with_text:
        return row
    text, problem = "", "there is none; scanned pages need text recognition first"
    try:
        text = _extractor.answer(*document)
    except ValueError as error:
        problem = str(error)
    if not text.strip():
        problem = f"{source}: its text cannot be read: {problem}"
        return row.failed(InputFileError(problem, "unreadable_document"))
    try:
        return replace(row, document=columns.content({columns.of_whole_files: text}, source)[0])
    except InputFileError as error:  # the row's result: the same bytes have it again
        return row.failed(error)


def _read(piece: Piece, columns: Columns, wanted: AbstractSet[int] | None) -> _Numbered:
    """Yield the fields of rows, each with its number. A text file is one row with number 0."""
    if piece.table is not None:
        names = _check_names(piece.table.columns, columns, piece)
        yield from _of_batches(map(_validated, piece.table.batches(piece.path, names)), piece, columns, 0, wanted)
        return
    location = Location.parse(piece.path)
    if location.is_folder:
        location.entries()  # raises the error of a folder that cannot be listed
        raise UnreadableFileError(f"{piece.name}: the folder holds no file of a known type; known are {KNOWN_TYPES}")
    kind = file_type(location.file_name)
    if kind is None:
        raise UnreadableFileError(f"{piece.name}: its type is not known; known are {KNOWN_TYPES}")
    suffix, compression = kind
    if suffix in PARQUET_SUFFIXES:
        yield from _read_parquet(location, piece, columns, wanted)
        return
    with location.open() as opened, _decompressed(opened, compression) as file:
        if suffix in (*TEXT_SUFFIXES, *EXTRACTED_SUFFIXES):
            is_text = suffix in TEXT_SUFFIXES
            if content := _whole(file, piece.name, _MAX_TEXT_BYTES if is_text else _MAX_WHOLE_BYTES):
                text = _decoded(content, piece.name) if is_text else _Document(suffix, content)
                yield 0, {columns.of_whole_files: text, columns.id_name: piece.name}
        elif suffix in _ROW_READERS:
            rows = _ROW_READERS[suffix](file, piece, columns)
            yield from (row for row in rows if wanted is None or row[0] in wanted)
        else:
            for number, line in enumerate(limited_lines(file, _MAX_TEXT_BYTES), start=1):
                if (wanted is None or number in wanted) and line.strip():
                    try:
                        if len(line) > _MAX_TEXT_BYTES:
                            raise _too_large(piece.source(number))
                        yield number, _parsed(_decoded(line, piece.source(number)), piece.source(number))
                    except InputFileError as error:
                        yield number, error


def _decompressed(file: io.BufferedReader, compression: str | None) -> Any:
    if compression == "gzip":  # pyarrow refuses zeros after the end, and drops rows before damage
        return gzip.GzipFile(fileobj=file)
    return file if compression is None else io.BufferedReader(pa.CompressedInputStream(file, compression))


def _whole(file: Any, source: str, most: int) -> bytes:
    """Return the content of a file. Raises InputFileError if it is longer."""
    content: bytes = file.read(most + 1)
    if len(content) > most:
        raise _too_large(source, most)
    return content


class _Unread:
    """The text of a file from `place` on. Only what is needed is in memory. Raises InputFileError for other encodings
    than UTF-8."""

    def __init__(self, file: Any, name: str) -> None:
        if b"\0" in file.peek(4)[:4]:
            raise _like_utf16(name)
        self.text, self.place = "", 0
        self._file, self._name, self._num_bytes = file, name, 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def more(self) -> bool:
        """Drop the text before `place`, and read as much as is left, up to twice the size of a row. Return whether the
        file had more."""
        num_left = len(self.text) - self.place
        content = self._file.read(max(_BYTES_PER_READ, min(num_left, 2 * _MAX_TEXT_BYTES - num_left)))
        self._num_bytes += len(content)
        try:
            added = self._decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            start = self._num_bytes - len(error.object) + error.start
            problem = f"{self._name}: not UTF-8 at byte {start}: {error.reason}; convert the file to UTF-8"
            raise InputFileError(problem, "not_utf8") from error
        if content:
            self.text, self.place = self.text[self.place :] + added, 0
        return bool(content)

    def next(self) -> str:
        """Go on to the next sign that separates no rows, and return the sign; "" at the end."""
        while True:
            self.place = _GAP.match(self.text, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self.text) or not self.more():
                return self.text[self.place : self.place + 1]


def _json_rows(file: Any, piece: Piece, columns: Columns) -> _Numbered:
    """Yield the objects of an array or a file. Raises InputFileError at a mistake, after which nothing can be read, and
    at a row of more than twice the allowed size, whose end is not looked for."""
    unread, number, is_array = _Unread(file, piece.name), 0, False
    while sign := unread.next():
        source, failure = piece.source(number + 1), None  # type: str, InputFileError | None
        if sign == "[" and not (number or is_array):
            unread.place, is_array = unread.place + 1, True
            continue
        if sign == "]" and is_array:
            unread.place += 1
            if unread.next():
                raise InputFileError(f"{source}: not valid JSON: more follows the array", "malformed_row")
            return
        try:
            fields, end = _parsed_at(unread.text, unread.place, source)
        except InputFileError as error:
            failure, end = error, len(unread.text)
        size = end - unread.place
        if len(unread.text) - end < _LOOK_AHEAD and size < 2 * _MAX_TEXT_BYTES and unread.more():
            continue
        if failure is not None:
            large = f", or it has more than {_MAX_TEXT_BYTES >> 20} MiB; {_LOST}" if size > _MAX_TEXT_BYTES else ""
            raise InputFileError(f"{failure}{large}", failure.kind)
        number, unread.place = number + 1, end
        yield number, _too_large(source) if size > _MAX_TEXT_BYTES else fields
    if is_array:
        raise InputFileError(
            f"{piece.name}: the array ends early, after {number} rows; it may have been cut off", "malformed_row"
        )


def _csv_rows(file: IO[bytes], piece: Piece, columns: Columns, usual: str = ",") -> _Numbered:
    """Yield the rows after the header. An empty cell is null. usual: the delimiter if the header has none."""
    wrapped = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")

    number = num_characters = 0  # of the row that is read

    def limited() -> Iterator[str]:
        nonlocal num_characters
        while line := wrapped.readline(_MAX_TEXT_BYTES):
            num_characters += len(line)
            if len(line) == _MAX_TEXT_BYTES or num_characters > 2 * _MAX_TEXT_BYTES:
                raise _too_large(f"{piece.source(number)}: a line, or a row of twice that", more=f"; {_LOST}")
            yield line

    csv.field_size_limit(max(csv.field_size_limit(), _MAX_TEXT_BYTES))
    lines = limited()
    first = next(lines, "")
    if "\0" in first[:4]:
        raise _like_utf16(piece.name)
    delimiter = max(usual, *",;\t", key=first.count)
    rows = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    names = next(rows, [])
    _check_names(names, columns, piece)
    for number in itertools.count(1):
        source, num_read, num_characters = piece.source(number), rows.line_num, 0
        try:
            while not (cells := next(rows)):  # empty lines are no rows
                num_characters = 0
            "".join(cells).encode()
        except StopIteration:
            return
        except csv.Error as error:
            read = f"lines {num_read + 1} to {rows.line_num}"  # many, where a quote does not end
            yield number, InputFileError(f"{source}: {read} are no row of CSV: {error}", "malformed_row")
        except UnicodeEncodeError:
            yield number, InputFileError(f"{source}: not UTF-8; convert the file to UTF-8", "not_utf8")
        else:
            if len(cells) != len(names):
                problem = f"{source}: it has more or fewer cells than the first line"
                yield number, InputFileError(problem, "malformed_row")
            else:
                yield number, {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _arrow_rows(file: IO[bytes], piece: Piece, columns: Columns) -> _Numbered:
    is_stream = file.read(len(_ARROW_FILE_MAGIC)) != _ARROW_FILE_MAGIC
    file.seek(0)
    opened = _opened(pa.ipc.open_stream if is_stream else pa.ipc.open_file, file)
    names = _check_names(opened.schema.names, columns, piece)
    batches = opened if is_stream else map(opened.get_batch, range(opened.num_record_batches))
    yield from _of_batches((_validated(batch.select(names)) for batch in batches), piece, columns)


_ROW_READERS: Mapping[str, Callable[[IO[bytes], Piece, Columns], _Numbered]] = {
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, usual="\t"),
    ".arrow": _arrow_rows,
}


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


def _of_batches(
    batches: Iterable[pa.RecordBatch],
    piece: Piece,
    columns: Columns,
    num_before: int = 0,
    wanted: AbstractSet[int] | None = None,
) -> _Numbered:
    """Yield the rows of batches. num_before: rows of the file before the first batch. Raises InputFileError for columns
    with a use whose values may be code; others of such types are left out."""
    number = num_before
    for batch in batches:
        refused = {column.name: column.type for column in batch.schema if _is_of_python(column.type)}
        if (name := next((name for name in columns.names if name in refused), None)) is not None:
            problem = f"column {name!r} has a type of a Python package, whose values may run code ({refused[name]})"
            raise InputFileError(f"{piece.name}: {problem}; write texts, numbers or lists", INVALID_VALUE)
        batch = batch.drop_columns([*refused])  # noqa: PLW2901
        numbers = range(number + 1, number + batch.num_rows + 1)
        number += batch.num_rows
        rows = zip(numbers, _arrow_fields(batch, numbers, piece), strict=True)
        yield from (row for row in rows if wanted is None or row[0] in wanted)


def _is_of_python(kind: pa.DataType) -> bool:
    """Return whether a package in Python has registered the type, or one in it: values of one of Ray's are pickles."""
    if isinstance(kind, pa.BaseExtensionType):
        return isinstance(kind, pa.ExtensionType) or _is_of_python(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _is_of_python(kind.value_type)
    return any(_is_of_python(kind.field(index).type) for index in range(kind.num_fields))


def _opened(opener: Callable[[Any], Any], content: Any) -> Any:
    """Open a Parquet or Arrow file. Raises what FILE_ERRORS has, also where a type that a package in Python has
    registered raises anything."""
    try:
        return opener(content)
    except FILE_ERRORS:
        raise
    except Exception as error:
        raise pa.ArrowInvalid(f"the type of a column is damaged: {type(error).__name__}: {error}") from error


def _check_names(names: Sequence[str], columns: Columns, piece: Piece) -> list[str]:
    """Return the columns that are asked for and there. Raises InputFileError if two have the same name, and for a file
    without a column that every row needs."""
    if names:  # else it is empty
        columns.check(names, piece.name)
    counts = Counter(names)
    asked = [name for name in (names if columns.reads_all else columns.names) if name in counts]
    twice = next((name for name in asked if counts[name] > 1), None)
    if twice is not None:
        raise InputFileError(f"{piece.name}: two columns are called {twice!r}; rename one", "duplicate_column")
    return asked


def _parsed(text: str, source: str) -> _Fields:
    """Return the fields of a line of JSON, or the error of a value that is no row. Raises InputFileError."""
    fields, end = _parsed_at(text, len(text) - len(text.lstrip()), source)
    if text[end:].strip():
        raise InputFileError(f"{source}: not valid JSON: more follows at character {end}", "malformed_row")
    return fields


def _parsed_at(text: str, place: int, source: str) -> tuple[_Fields, int]:
    """Return the object at a place, or why it is no row, and the place after it. Raises InputFileError for no JSON."""
    try:
        try:
            row, end = _JSON.raw_decode(text, place)
        except InputFileError as error:
            return InputFileError(f"{source}: {error}", error.kind), _ANY_JSON.raw_decode(text, place)[1]
        if "\\u" in text[place:end]:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        problem = f"{source}: holds half of a surrogate pair, which is no character"
        return InputFileError(problem, "malformed_row"), end
    except json.JSONDecodeError as error:
        read = text[place : error.pos]  # the text before it may have been dropped
        found = f"{error.msg}: line {read.count(chr(10)) + 1}, column {len(read) - read.rfind(chr(10))} of the row"
        raise InputFileError(f"{source}: not valid JSON: {found}", "malformed_row") from error
    except (ValueError, RecursionError) as error:  # a whole number of more than 4300 digits is a ValueError
        raise InputFileError(f"{source}: not valid JSON: {error}", "malformed_row") from error
    if not isinstance(row, dict):
        problem = f"{source}: a row must be a JSON object, not {type(row).__name__}"
        return InputFileError(problem, "malformed_row"), end
    return row, end


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise InputFileError(f"key {twice!r} stands twice in one object; leave one out", "duplicate_column")
    return fields


_JSON, _ANY_JSON = json.JSONDecoder(object_pairs_hook=_with_unique_keys), json.JSONDecoder()
_GAP = re.compile(r"[\s,]*")
_LOOK_AHEAD = 3  # signs that tell whether a number has ended: 1.5 may go on as 1.5E+3


def _like_utf16(source: str) -> InputFileError:
    return InputFileError(f"{source}: not UTF-8, but like UTF-16 or UTF-32; convert the file to UTF-8", "not_utf8")


def _decoded(content: bytes, source: str) -> str:
    """Return a text without its byte-order mark. Raises InputFileError."""
    if b"\0" in content[:4]:
        raise _like_utf16(source)
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"{source}: not UTF-8 at byte {error.start}: {error.reason}; convert the file to UTF-8", "not_utf8"
        ) from error


def _read_parquet(location: Location, piece: Piece, columns: Columns, wanted: AbstractSet[int] | None) -> _Numbered:
    """Row groups without a wanted row are not read."""
    number = piece.num_before
    with location.open() as content, _opened(pq.ParquetFile, content) as file:
        names = _check_names(file.schema_arrow.names, columns, piece)
        first, num_groups = piece.groups or (0, file.num_row_groups)
        if first + num_groups > file.num_row_groups:
            raise UnreadableFileError(f"{piece.name}: it has fewer row groups than before; do not change the input")
        for group in range(first, first + num_groups):
            about = file.metadata.row_group(group)
            if wanted is None or not wanted.isdisjoint(range(number + 1, number + about.num_rows + 1)):
                size = _num_at_once(about, names)
                batches = file.iter_batches(batch_size=size, row_groups=[group], columns=names)
                yield from _of_batches(batches, piece, columns, number, wanted)
            number += about.num_rows


def _arrow_fields(batch: pa.RecordBatch, numbers: Sequence[int], piece: Piece) -> Iterator[_Fields]:
    if batch.nbytes <= _MAX_TEXT_BYTES:
        with suppress(ValueError, OverflowError):
            yield from batch.to_pylist()
            return
    texts = [one for one in batch.columns if isinstance(one, pa.StringArray | pa.LargeStringArray)]
    lengths = [pc.fill_null(pc.binary_length(column), 0).to_pylist() for column in texts]
    for index, number in enumerate(numbers):
        source = piece.source(number)
        if any(of_column[index] > _MAX_TEXT_BYTES for of_column in lengths):
            yield _too_large(source)
            continue
        try:
            yield {name: batch.column(name)[index].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield InputFileError(
                f"{source}: not UTF-8 at byte {error.start}: {error.reason}; write the file again", "not_utf8"
            )
        except (ValueError, OverflowError) as error:
            yield InputFileError(
                f"{source}: a value cannot be read ({error}); text and ids must be text", INVALID_VALUE
            )


def _num_at_once(group: pq.RowGroupMetaData, names: Sequence[str]) -> int:
    """Return how many rows to read at once. All rows may share one text of the size of their column's dictionary."""
    shared = 1
    for column in map(group.column, range(group.num_columns)):
        if column.has_dictionary_page and column.path_in_schema.split(".")[0] in names:
            shared = max(shared, column.total_uncompressed_size)
    bytes_per_row: int = max(1, group.total_byte_size // max(1, group.num_rows))
    usual = max(_MIN_ROWS_PER_READ, min(_BYTES_PER_READ // bytes_per_row, _MAX_ROWS_PER_READ))
    return max(1, min(usual, _MAX_TEXT_BYTES // shared))


def pieces_of(files: Sequence[Piece]) -> list[Piece]:
    """Split files into pieces for read tasks. Of few files, Parquet files are split at row groups into pieces of about
    64 MB. A file that cannot be read is one piece; reading the piece reports the error."""
    if len(files) >= _NUM_FILES_TO_SPLIT:
        return list(files)
    pieces = list[Piece]()
    for file in files:
        groups = list[pq.RowGroupMetaData]()  # empty for other files than Parquet, and those that are damaged
        with suppress(*FILE_ERRORS, UnreadableFileError):
            location = Location.parse(file.path)
            if file.table is None and location.suffix in PARQUET_SUFFIXES:
                with location.open() as content, _opened(pq.ParquetFile, content) as parquet:
                    groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
        first = num_rows = num_before = num_bytes = 0
        for number, group in enumerate(groups, start=1):
            num_rows, num_bytes = num_rows + group.num_rows, num_bytes + group.total_byte_size
            if num_bytes >= _BYTES_PER_PIECE or (number == len(groups) and first > 0):
                pieces.append(replace(file, groups=(first, number - first), num_before=num_before))
                first, num_before, num_bytes = number, num_rows, 0
        pieces += [file] if first == 0 else []
    return pieces
