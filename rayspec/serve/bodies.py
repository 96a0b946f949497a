"""Reading of request bodies, with limits on size and time: JSON, also in gzip or deflate, and forms with a file."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from fastapi import Request

from rayspec.openai.errors import InvalidRequestError
from rayspec.serve.access import Admission
from rayspec.serve.replies import NO_UPGRADE, NOT_JSON, Refused, too_large, too_slow, unknown_encoding

LARGE = 2**20
_BYTES_OF_ITEM, _BYTES_OF_OBJECT = 40, 250  # in memory, once they are parsed
_JSON, _FORM = "application/json", "multipart/form-data"
_UPGRADE_TIMEOUT_S = 5.0  # Serve's proxy loses the body of a request for an upgrade, and never ends it
_GZIP, _ZLIB, _BARE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_INFLATED = ("gzip", "x-gzip", "deflate")
_MOST_AT_ONCE = 2**18
_DEFLATE_METHOD = 8  # in the low bits of the first byte of zlib's format; other clients send deflate data without it
_MOST_FIELD = 4096
_MOST_HEADERS = 8192
_MOST_BESIDE_FILE = 2**16  # bytes of the fields, headers and delimiters
_MOST_BOUNDARY = 70  # characters, RFC 2046
_BYTES_IN_TIME = 16 * 2**20
_PARAMETER = re.compile(r';\s*([\w*.-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s";]*)\s*')


async def read_body(request: Request, max_bytes: int, timeout_s: float, *, large: Admission, held: ExitStack) -> bytes:
    """Return the body. Raises Refused as soon as more than `max_bytes` are announced or received, and when the body is
    incomplete after `timeout_s`: a stalled client must not occupy a place for ever. A body without a JSON content type
    is refused: web pages of any origin may send other types without a CORS preflight. A body in gzip or deflate is
    inflated, and `max_bytes` limits both sizes; another encoding is refused. Raises InvalidRequestError for damaged
    data.

    large: counts the bytes of large bodies, when more than LARGE have come; may refuse the body. held: ends that.
    """
    connection = request.headers.get("connection", "").lower().split(",")
    upgrades = "upgrade" in request.headers or "upgrade" in [token.strip() for token in connection]
    timeout_s = min(timeout_s, _UPGRADE_TIMEOUT_S) if upgrades else timeout_s
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise Refused(NOT_JSON)
    try:
        body = await asyncio.wait_for(_read(request, max_bytes, large, held), timeout_s)
    except asyncio.TimeoutError:
        raise Refused(NO_UPGRADE if upgrades else too_slow(timeout_s)) from None
    if upgrades and not body:
        raise Refused(NO_UPGRADE)
    return body


def bytes_of_values(content: bytes) -> int:
    """Return about how much memory the items, arrays and objects of a JSON text take in addition to its bytes."""
    return _BYTES_OF_ITEM * content.count(b",") + _BYTES_OF_OBJECT * (content.count(b"{") + content.count(b"["))


async def _read(request: Request, max_bytes: int, large: Admission, held: ExitStack) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise Refused(too_large(max_bytes))
    encoding = _encoding(request.headers, _INFLATED)
    content, body, num_received, is_large = _Inflater(encoding), bytearray(), 0, False
    async for received in request.stream():
        num_received += len(received)
        for piece in content.pieces(received) if encoding else (received,):
            body += piece
            if len(body) > LARGE and not is_large:
                has_size = announced.isdecimal() and not encoding
                held.enter_context(large.admit(int(announced) if has_size else max_bytes))
                is_large = True
            if max(num_received, len(body)) > max_bytes:
                raise Refused(too_large(max_bytes))
            await asyncio.sleep(0)
    content.end()
    return bytes(body)


def _encoding(headers: Mapping[str, str], others: tuple[str, ...]) -> str:
    """Return the encoding of a body, empty for a plain body. others: encodings that the body may have. Raises
    Refused."""
    name = headers.get("content-encoding", "").strip().lower()
    if name in {"", "identity"}:
        return ""
    if name not in others:
        raise Refused(unknown_encoding(name, others))
    return name


class _Inflater:
    """Inflates a body as it comes. Both methods raise InvalidRequestError for data that is not in the encoding."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: zlib._Decompress | None = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes of the body, in pieces of bounded size."""
        while data:
            if self._stream is None:
                is_bare = data[0] & 15 != _DEFLATE_METHOD
                deflate = _BARE if is_bare else _ZLIB
                self._stream = zlib.decompressobj(deflate if self._encoding == "deflate" else _GZIP)
            elif self._stream.eof and self._encoding != "deflate":
                self._stream = zlib.decompressobj(_GZIP)  # gzip data may have several members
            elif self._stream.eof:
                raise self._invalid("data follows its end")
            try:
                yield self._stream.decompress(data, _MOST_AT_ONCE)
            except zlib.error as error:
                raise self._invalid(str(error)) from None
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail

    def end(self) -> None:
        """Check that the body is complete."""
        if self._stream is not None and not self._stream.eof:
            raise self._invalid("it ends too early")

    def _invalid(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"The body is no valid {self._encoding} data: {problem}.", code="invalid_encoding")


@dataclass(frozen=True, slots=True)
class FormField:
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
                raise _invalid_form(f"field {self.name!r} has more than {_MOST_FIELD} bytes", param=self.name)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise _invalid_form(f"field {self.name!r} is not UTF-8", param=self.name) from None


async def read_form(request: Request, timeout_s: float, max_file_bytes: int) -> AsyncIterator[FormField]:
    """Yield the parts of the form in their order. Raises InvalidRequestError or Refused for a body that is not such a
    form, is encoded, ends early, comes too slowly, or is larger than a form with a file of `max_file_bytes`.

    timeout_s: limit for the whole body, and as much again for every 16 MiB that have come.
    """
    _encoding(request.headers, ())
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
    """Return the value of a header and its parameters. Raises InvalidRequestError.

    `name*=utf-8''%xx` takes precedence over `name=`, and other encodings are refused, as in RFC 8187.
    """
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
    for name in [one for one in found if one.endswith("*")]:
        encoding, _, text = found.pop(name).partition("'")
        if encoding.lower() != "utf-8":
            raise _invalid_form(f"the header {value[:80]!r} has the encoding {encoding[:20]!r}: use utf-8")
        try:
            found[name.removesuffix("*")] = unquote_to_bytes(text.partition("'")[2]).decode()
        except UnicodeDecodeError:
            raise _invalid_form(f"the header {value[:80]!r} is not UTF-8") from None
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
        del self._here[: len(end)]

    async def until(self, end: bytes, most: int) -> bytes:
        """Return the bytes before `end`, and consume `end`. most: bytes to receive before giving up."""
        while (place := self._here.find(end)) < 0:
            if len(self._here) > most:
                raise _invalid_form(
                    f"the headers of a part, or what precedes the first part, have more than {most} bytes"
                )
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
            raise _invalid_form("the form ends too early") from None
        except asyncio.TimeoutError:
            raise Refused(too_slow(limit_s)) from None
        self._here += piece
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise Refused(too_large(self._max_bytes))


def _invalid_form(message: str, *, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="invalid_form")
