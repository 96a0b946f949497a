"""Reading of a form (`multipart/form-data`) with a file, in chunks."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from fastapi import Request

from rayspec.openai.errors import InvalidRequestError
from rayspec.serve.content_encoding import require_plain
from rayspec.serve.replies import too_large, too_slow

_TYPE = "multipart/form-data"
_DISPOSITION = "content-disposition"
_MOST_FIELD = 4096
_MOST_HEADERS = 8192
_MOST_BESIDE_FILE = 2**16  # bytes of the fields, headers and delimiters
_MOST_BOUNDARY = 70  # characters, RFC 2046
_BYTES_IN_TIME = 16 * 2**20
_PARAMETER = re.compile(r';\s*([\w*.-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s";]*)\s*')


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form. filename: None where the field is not a file. pieces: chunks of its content; reading the next
    part skips chunks that are unread."""

    name: str
    filename: str | None
    pieces: AsyncIterator[bytes]

    async def text(self) -> str:
        """Return the text of a field that is not a file. Raises InvalidRequestError if it is too long or not UTF-8."""
        content = bytearray()
        async for piece in self.pieces:
            content += piece
            if len(content) > _MOST_FIELD:
                raise _invalid(f"field {self.name!r} has more than {_MOST_FIELD} bytes", param=self.name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise _invalid(f"field {self.name!r} is not UTF-8", param=self.name) from None


async def read_form(request: Request, timeout_s: float, max_file_bytes: int) -> AsyncIterator[Part]:
    """Yield the parts of the form in their order. Raises InvalidRequestError for a body that is not such a form, is
    encoded, ends early, comes too slowly, or is larger than a form with a file of `max_file_bytes`.

    timeout_s: limit for the whole body, and as much again for every 16 MiB that have come.
    """
    require_plain(request.headers)
    kind, parameters = _header(request.headers.get("content-type", ""))
    boundary = parameters.get("boundary", "")
    if kind != _TYPE or not 0 < len(boundary) <= _MOST_BOUNDARY:
        message = f"send the file as a form, with the header 'Content-Type: {_TYPE}; boundary=...'"
        raise InvalidRequestError(message, code="unsupported_media_type", status=415)
    body = _Body(request.stream(), timeout_s, max_file_bytes + _MOST_BESIDE_FILE)
    delimiter = f"\r\n--{boundary}".encode("latin-1", "replace")
    await body.until(delimiter, _MOST_HEADERS)
    while not await body.take(b"--"):
        await body.until(b"\r\n", _MOST_HEADERS)
        headers = await body.until(b"\r\n\r\n", _MOST_HEADERS)
        part = _part(headers, body.pieces(delimiter))
        yield part
        async for _ in part.pieces:
            pass


def _part(headers: bytes, pieces: AsyncIterator[bytes]) -> Part:
    lines = (line.partition(":") for line in headers.decode("utf-8", "replace").split("\r\n"))
    kind, parameters = _header(next((text for name, _, text in lines if name.strip().lower() == _DISPOSITION), ""))
    name = parameters.get("name")
    if kind != "form-data" or not name:
        raise _invalid("the form has a part without a name")
    return Part(name, parameters.get("filename"), pieces)


def _header(value: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header and its parameters. Raises InvalidRequestError.

    `name*=utf-8''%xx` takes precedence over `name=`, and other encodings are refused, as in RFC 8187.
    """
    kind, separator, rest = value.partition(";")
    found: dict[str, str] = {}
    place, rest = 0, separator + rest.rstrip("; \t")
    while place < len(rest):
        match = _PARAMETER.match(rest, place)
        if match is None:
            raise _invalid(f"the header {value[:80]!r} cannot be read")
        name, text = match[1].lower(), match[2]
        found[name] = re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
        place = match.end()
    for name in [one for one in found if one.endswith("*")]:
        encoding, _, text = found.pop(name).partition("'")
        if encoding.lower() != "utf-8":
            raise _invalid(f"the header {value[:80]!r} has the encoding {encoding[:20]!r}: use utf-8")
        try:
            found[name.removesuffix("*")] = unquote_to_bytes(text.partition("'")[2]).decode()
        except UnicodeDecodeError:
            raise _invalid(f"the header {value[:80]!r} is not UTF-8") from None
    return kind.strip().lower(), found


class _Body:
    """Buffer of the bytes that are not consumed yet. A line break is added in front, as delimiters begin with one."""

    def __init__(self, stream: AsyncIterator[bytes], timeout_s: float, max_bytes: int) -> None:
        self._stream, self._timeout_s, self._max_bytes = stream, timeout_s, max_bytes
        self._start_s, self._num_bytes = time.monotonic(), 0
        self._here = bytearray(b"\r\n")

    async def pieces(self, end: bytes) -> AsyncIterator[bytes]:
        """Yield the bytes before `end`, in chunks, and consume `end`."""
        while (place := self._here.find(end)) < 0:
            sure = len(self._here) - len(end) + 1
            if sure > 0:
                yield self._cut(sure)
            await self._more()
        yield self._cut(place)
        del self._here[: len(end)]

    async def until(self, end: bytes, most: int) -> bytes:
        """Return the bytes before `end`, and consume `end`. most: bytes to receive before giving up."""
        while (place := self._here.find(end)) < 0:
            if len(self._here) > most:
                raise _invalid(f"the headers of a part, or what precedes the first part, have more than {most} bytes")
            await self._more()
        found = self._cut(place)
        del self._here[: len(end)]
        return found

    async def take(self, text: bytes) -> bool:
        """Return whether `text` comes next, and consume it in that case."""
        while len(self._here) < len(text):
            await self._more()
        if not self._here.startswith(text):
            return False
        del self._here[: len(text)]
        return True

    def _cut(self, num_bytes: int) -> bytes:
        found = bytes(self._here[:num_bytes])
        del self._here[:num_bytes]
        return found

    async def _more(self) -> None:
        limit_s = self._timeout_s * (1 + self._num_bytes / _BYTES_IN_TIME)
        try:
            piece = await asyncio.wait_for(anext(self._stream), self._start_s + limit_s - time.monotonic())
        except StopAsyncIteration:
            raise _invalid("the form ends too early") from None
        except asyncio.TimeoutError:
            error = too_slow(limit_s)
            raise InvalidRequestError(error.message, code=error.code, status=error.status) from None
        self._here += piece
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            error = too_large(self._max_bytes)
            raise InvalidRequestError(error.message, code=error.code, status=error.status)


def _invalid(message: str, *, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_form")
