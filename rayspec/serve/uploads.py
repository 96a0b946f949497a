"""Reading of a form (`multipart/form-data`) with a file, in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value

from fastapi import Request

from rayspec.openai.errors import InvalidRequestError
from rayspec.serve.replies import too_slow

_TYPE = "multipart/form-data"
_MOST_FIELD = 4096
_MOST_HEADERS = 8192


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


async def read_form(request: Request, timeout_s: float) -> AsyncIterator[Part]:
    """Yield the parts of the form in their order. timeout_s: limit for each chunk of the body. Raises
    InvalidRequestError for a body that is not such a form, ends early or comes too slowly."""
    kind = HeaderParser().parsestr(f"Content-Type: {request.headers.get('content-type', '')}\n\n")
    boundary = kind.get_boundary()
    if kind.get_content_type() != _TYPE or not boundary:
        message = f"send the file as a form, with the header 'Content-Type: {_TYPE}; boundary=...'"
        raise InvalidRequestError(message, code="unsupported_media_type", status=415)
    body = _Body(request.stream(), timeout_s)
    delimiter = f"\r\n--{boundary}".encode("latin-1", "replace")
    await body.skip(delimiter)
    while not await body.take(b"--"):
        await body.until(b"\r\n", _MOST_HEADERS)
        headers = await body.until(b"\r\n\r\n", _MOST_HEADERS)
        part = _part(headers, body.pieces(delimiter))
        yield part
        async for _ in part.pieces:
            pass


def _part(headers: bytes, pieces: AsyncIterator[bytes]) -> Part:
    parsed = HeaderParser().parsestr(headers.decode("utf-8", "replace") + "\n\n")
    name = parsed.get_param("name", header="content-disposition")
    if not name:
        raise _invalid("the form has a part without a name")
    return Part(collapse_rfc2231_value(name), parsed.get_filename(), pieces)


class _Body:
    """Buffer of the bytes that are not consumed yet. A line break is added in front, as delimiters begin with one."""

    def __init__(self, stream: AsyncIterator[bytes], timeout_s: float) -> None:
        self._stream, self._timeout_s = stream, timeout_s
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

    async def skip(self, end: bytes) -> None:
        async for _ in self.pieces(end):
            pass

    async def until(self, end: bytes, most: int) -> bytes:
        """Return the bytes before `end`, and consume `end`. most: bytes to receive before giving up."""
        while (place := self._here.find(end)) < 0:
            if len(self._here) > most:
                raise _invalid(f"the headers of a part have more than {most} bytes")
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
        try:
            self._here += await asyncio.wait_for(anext(self._stream), self._timeout_s)
        except StopAsyncIteration:
            raise _invalid("the form ends too early") from None
        except asyncio.TimeoutError:
            error = too_slow(self._timeout_s)
            raise InvalidRequestError(error.message, code=error.code, status=error.status) from None


def _invalid(message: str, *, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_form")
