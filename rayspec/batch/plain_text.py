"""The bytes of text files as text: unzipped, and in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from rayspec.command.locations import Location

ByteFile = io.BufferedReader | gzip.GzipFile

# The mark of little-endian UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_UTF_8 = "UTF-8"
_BEGINNING = 4  # bytes that tell the encoding


class UndecodableError(ValueError):
    """Bytes that are no text in the encoding that they should have."""


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
