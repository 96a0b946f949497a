"""Reads the texts of a file, from which drafts are copied from the start."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rayspec.types import ConfigError

_COLUMNS = ("text", "summary")  # of the outputs of jobs
_BYTES_AT_ONCE, _MAX_LINE_BYTES, _ROWS_AT_ONCE = 2**16, 2**24, 64


def read_texts(name: str) -> Iterator[str]:
    """Yield the texts of a file, read on demand: a text file in parts, or the column "text" or "summary" of a
    JSON-lines or Parquet file, nulls left out. Raises ConfigError at the first text that cannot be read, and for a file
    without any."""
    path = Path(name)
    readers = {".txt": _parts, ".md": _parts, ".jsonl": _of_lines, ".ndjson": _of_lines, ".parquet": _of_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _refusal(name, f"its type is not known; known are {', '.join(readers)}")
    is_empty = True
    try:
        for text in reader(path):
            yield text
            is_empty = False
    except OSError as error:
        raise _refusal(name, f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # the first is of JSON and UTF-8, too
        raise _refusal(name, str(error).partition("\n")[0]) from error
    if is_empty:
        raise _refusal(name, "it holds no text")


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"option 'corpus' is {name!r}: {reason}; name a file of texts in UTF-8, or leave the option out")


def _parts(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as file:
        while content := file.read(_BYTES_AT_ONCE):
            yield decoder.decode(content)
    decoder.decode(b"", final=True)


def _of_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES:
                raise ValueError(f"line {number} has more than {_MAX_LINE_BYTES} bytes")
            if line.strip():
                try:
                    row = msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.MsgspecError as error:
                    raise ValueError(f"line {number} is no JSON object ({error})") from error
                yield from _text_of(row, f"line {number}")


def _of_parquet(path: Path) -> Iterator[str]:
    import pyarrow as pa  # noqa: PLC0415 - other files, and an engine without a corpus, do not need it
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, buffer_size=_BYTES_AT_ONCE) as file:
            names = [name for name in _COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names):
                for row in batch.to_pylist():
                    yield from _text_of(row, "a row")
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _text_of(row: Mapping[str, Any], place: str) -> Iterator[str]:
    name = next((name for name in _COLUMNS if name in row), None)
    if name is None:
        raise ValueError(f"{place} has no column {' or '.join(map(repr, _COLUMNS))}")
    if (text := row[name]) is not None:
        if not isinstance(text, str):
            raise ValueError(f"column {name!r} of {place} is {type(text).__name__}, not text")
        if text:
            yield text
