"""Reading of request bodies, with limits on size and time: JSON, and forms with a file."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import Request

from rayspec.openai.places import Places
from rayspec.openai.protocol import ApiError, InvalidRequestError, StrictBody, bytes_in_memory, size_of
from rayspec.openai.tokenizing import LargeWork
from rayspec.serve.access import NO_UPGRADE, NOT_JSON, OVERRUN, Admission, Refused, too_large, too_slow
from rayspec.serve.options import ServeOptions

_LARGE_BODIES = 6  # of the largest size, in memory at once; bodies of at most SMALL bytes do not count
SMALL = 2**16
_JSON, _FORM = "application/json", "multipart/form-data"
_UPGRADE_TIMEOUT_S = 5.0  # Serve's proxy loses the body of a request for an upgrade, and never ends it
_MOST_HEADERS = 8192
_MOST_BESIDE_FILE = 2**16  # bytes of the fields, headers and delimiters
_MOST_BOUNDARY = 70  # characters, RFC 2046
_BYTES_IN_TIME = 16 * 2**20
Body = TypeVar("Body", bound=StrictBody)
_PARAMETER = re.compile(r';\s*([\w*.-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s";]*)\s*')


class BodyReader:
    """Reads JSON bodies, within limits on each body and on all that are in memory together."""

    def __init__(self, options: ServeOptions) -> None:
        self._max_bytes, self._timeout_s = options.max_request_bytes, options.body_timeout_s
        self._large = Admission(_LARGE_BODIES * options.max_request_bytes, refusal=OVERRUN, is_strict=True)
        self._turns, self._parsing = Places(1), LargeWork(1)

    async def read(self, request: Request, kind: type[Body], client: str, held: ExitStack) -> tuple[Body, bytes]:
        """Return the body of a request, parsed and as it came. Raises RequestError for a body that is no `kind`.

        Raises Refused for a body that is too large, too slow, compressed, or one of too many large ones; and for one
        without a JSON content type: web pages of any origin may send other types without a CORS preflight. client:
        whose turn it is. held: a large body counts until the end of this, as its values stay in memory until then.
        """
        connection = request.headers.get("connection", "").lower().split(",")
        upgrades = "upgrade" in request.headers or "upgrade" in [token.strip() for token in connection]
        timeout_s = min(self._timeout_s, _UPGRADE_TIMEOUT_S) if upgrades else self._timeout_s
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            raise Refused(NOT_JSON)
        _check_encoding(request)
        try:
            content = await asyncio.wait_for(self._content(request, client, held), timeout_s)
        except asyncio.TimeoutError:
            raise Refused(NO_UPGRADE if upgrades else too_slow(timeout_s)) from None
        if upgrades and not content:
            raise Refused(NO_UPGRADE)
        num_bytes = bytes_in_memory(content)
        if num_bytes > SMALL:
            held.enter_context(self._large.admit(num_bytes, client))
        return await self._parsing.run(partial(kind.read, content), size_of(content), client), content

    async def _content(self, request: Request, client: str, held: ExitStack) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise Refused(too_large(self._max_bytes))
        body, num_counted = bytearray(), 0
        async for piece in request.stream():
            body += piece
            if len(body) > SMALL:  # large bodies take turns; meanwhile uvicorn reads no more, as its buffer is full
                async with self._turns.take(client):
                    await asyncio.sleep(0)
            if len(body) > max(SMALL, num_counted):
                num_bytes = int(announced) if announced.isdecimal() else len(body)
                held.enter_context(self._large.admit(num_bytes, client))
                num_counted += num_bytes
            if len(body) > self._max_bytes:
                raise Refused(too_large(self._max_bytes))
        return bytes(body)


def _check_encoding(request: Request) -> None:
    name = request.headers.get("content-encoding", "").strip().lower()
    if name not in {"", "identity"}:
        message = f"Content-Encoding {name[:100]!r} is not supported here: send the body without compression."
        raise Refused(ApiError(415, "unsupported_encoding", message))


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form. filename: None where the field is not a file. pieces: chunks of its content; reading the next
    part skips chunks that are unread."""

    name: str
    filename: str | None
    pieces: AsyncIterator[bytes]


async def read_form(request: Request, timeout_s: float, max_file_bytes: int) -> AsyncIterator[FormField]:
    """Yield the parts of the form in their order. Raises InvalidRequestError or Refused for a body that is no form,
    ends early, or is too large; and for one that takes longer than `timeout_s`, and as much again for each 16 MiB."""
    _check_encoding(request)
    kind, parameters = _header(request.headers.get("content-type", ""))
    boundary = parameters.get("boundary", "")
    if kind != _FORM or not 0 < len(boundary) <= _MOST_BOUNDARY:
        message = f"send the file as a form, with the header 'Content-Type: {_FORM}; boundary=...'"
        raise InvalidRequestError(message, code="unsupported_media_type", status=415)
    body = _FormBody(request.stream(), timeout_s, max_file_bytes + _MOST_BESIDE_FILE)
    delimiter = f"\r\n--{boundary}".encode("latin-1", "replace")
    await body.until(delimiter, _MOST_HEADERS)
    while not await body.take(b"--"):
        await body.until(b"\r\n", _MOST_HEADERS)
        headers = (await body.until(b"\r\n\r\n", _MOST_HEADERS)).decode("utf-8", "replace")
        lines = (line.partition(":") for line in headers.split("\r\n"))
        named = (text for name, _, text in lines if name.strip().lower() == "content-disposition")
        kind, parameters = _header(next(named, ""))
        if kind != "form-data" or not parameters.get("name"):
            raise _invalid_form("the form has a part without a name")
        part = FormField(parameters["name"], parameters.get("filename"), body.pieces(delimiter))
        yield part
        async for _ in part.pieces:
            pass


def _header(value: str) -> tuple[str, dict[str, str]]:
    """Return the value of a header and its parameters; not those in an encoding. Raises InvalidRequestError."""
    kind, separator, rest = value.partition(";")
    found: dict[str, str] = {}
    place, rest = 0, separator + rest.rstrip("; \t")
    while place < len(rest):
        match = _PARAMETER.match(rest, place)
        if match is None:
            raise _invalid_form(f"the header {value[:80]!r} cannot be read")
        name, text = match[1].lower(), match[2]
        found[name] = re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
        place = match.end()
    return kind.strip().lower(), found


class _FormBody:
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
        self._cut(len(end))

    async def until(self, end: bytes, most: int) -> bytes:
        """Return the bytes before `end`, and consume `end`. most: bytes to receive before giving up."""
        while (place := self._here.find(end)) < 0:
            if len(self._here) > most:
                raise _invalid_form(
                    f"the headers of a part, or what precedes the first part, have more than {most} bytes"
                )
            await self._more()
        return self._cut(place + len(end)).removesuffix(end)

    async def take(self, text: bytes) -> bool:
        """Return whether `text` comes next, and consume it in that case."""
        while len(self._here) < len(text):
            await self._more()
        return self._here.startswith(text) and self._cut(len(text)) == text

    def _cut(self, num_bytes: int) -> bytes:
        found = bytes(self._here[:num_bytes])
        del self._here[:num_bytes]
        return found

    async def _more(self) -> None:
        limit_s = self._timeout_s * (1 + self._num_bytes / _BYTES_IN_TIME)
        try:
            piece = await asyncio.wait_for(anext(self._stream), self._start_s + limit_s - time.monotonic())
        except StopAsyncIteration:
            raise _invalid_form("the form ends too early") from None
        except asyncio.TimeoutError:
            raise Refused(too_slow(limit_s)) from None
        self._here += piece
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise Refused(too_large(self._max_bytes))


def _invalid_form(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_form")
