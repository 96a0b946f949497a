"""Reading a form (`multipart/form-data`) with a file, piece by piece."""

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
    """A field of a form. filename: None where it is no file. pieces: of its content; what is not read of them before
    the next part is passed over."""

    name: str
    filename: str | None
    pieces: AsyncIterator[bytes]

    async def text(self) -> str:
        """Of a field that is no file. Raises InvalidRequestError where it is long or no UTF-8."""
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
    """The parts of the form in their order. timeout_s: for each piece of the body to come. Raises InvalidRequestError
    for what is no such form, ends early or comes too slowly."""
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
    """What has come of a body and was not taken. It begins with a line break of its own, for the first delimiter."""

    def __init__(self, stream: AsyncIterator[bytes], timeout_s: float) -> None:
        self._stream, self._timeout_s = stream, timeout_s
        self._here = bytearray(b"\r\n")

    async def pieces(self, end: bytes) -> AsyncIterator[bytes]:
        """What comes before `end`, which is taken as well."""
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
        """What comes before `end`, which is taken as well. most: bytes."""
        while (place := self._here.find(end)) < 0:
            if len(self._here) > most:
                raise _invalid(f"the headers of a part have more than {most} bytes")
            await self._more()
        found = self._cut(place)
        del self._here[: len(end)]
        return found

    async def take(self, text: bytes) -> bool:
        """Whether it comes next; then it is taken."""
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
