"""Content-Encoding of request bodies: gzip and deflate, inflated as they come."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from rayspec.openai.errors import InvalidRequestError
from rayspec.serve.replies import unknown_encoding

_GZIP, _ZLIB, _BARE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_INFLATED = ("gzip", "x-gzip", "deflate")
_MOST_AT_ONCE = 2**18
_DEFLATE_METHOD = 8  # in the low bits of the first byte of zlib's format; other clients send deflate data without it


class Decoder(Protocol):
    """Decodes a body. Both methods raise InvalidRequestError for data that is not in the encoding. keeps_size: the
    content has as many bytes as the body."""

    keeps_size: bool

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes of the body, in pieces of bounded size."""

    def end(self) -> None:
        """Check that the body is complete."""


def decoder(headers: Mapping[str, str]) -> Decoder:
    """Return the decoder for a body with these headers. Raises InvalidRequestError for an unknown encoding."""
    name = _name(headers)
    if name in _INFLATED:
        return _Inflater(name)
    require_plain(headers, *_INFLATED)
    return _Plain()


def require_plain(headers: Mapping[str, str], *others: str) -> None:
    """Check that a body has no encoding. others: those that the request may have. Raises InvalidRequestError."""
    if (name := _name(headers)) not in {"", "identity"}:
        error = unknown_encoding(name, others)
        raise InvalidRequestError(error.message, code=error.code, status=error.status)


def _name(headers: Mapping[str, str]) -> str:
    return headers.get("content-encoding", "").strip().lower()


class _Plain:
    keeps_size = True

    def pieces(self, data: bytes) -> Iterator[bytes]:
        yield data

    def end(self) -> None:
        """Any plain body is complete."""


class _Inflater:
    keeps_size = False

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: zlib._Decompress | None = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                self._stream = zlib.decompressobj(self._format(data))
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
        if self._stream is not None and not self._stream.eof:
            raise self._invalid("it ends too early")

    def _format(self, data: bytes) -> int:
        if self._encoding != "deflate":
            return _GZIP
        return _ZLIB if data[0] & 15 == _DEFLATE_METHOD else _BARE

    def _invalid(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"The body is no valid {self._encoding} data: {problem}.", code="invalid_encoding")
