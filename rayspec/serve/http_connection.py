"""An HTTP/1.1 connection of the front: uvicorn's, with deadlines for headers and for answers that nobody reads, and
errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rayspec.openai.errors import ApiError
from rayspec.serve.replies import MALFORMED, Reply, slow_headers

_SLICE_BYTES = 2**14  # parsed at a time; also the longest headers
_FREE_CHUNKS, _BYTES_OF_CHUNK = 1000, 64


class _Parser(h11.Connection):
    """Refuses bodies of tiny chunks: each chunk costs the event loop as much as some kilobytes do."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_OF_CHUNK:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class Connection(H11Protocol):
    """Ends when the headers of a request are late, or when its client does not read.

    header_timeout_s: limit from the connection, or from the first byte of a later request, to the end of the headers.
    write_timeout_s: limit for the client to make room in a full buffer, and to read the rest after the end.
    The parser is h11, which reads the body of a request for an upgrade and answers with HTTP/1.1. uvicorn's faster
    parser loses such a body.
    """

    header_timeout_s: float
    write_timeout_s: float

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, _SLICE_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _SLICE_BYTES])
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        self._end_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._end_reading()
        super().resume_writing()
        self._expect_end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_end()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def _expect_headers(self) -> None:
        """Start or end the deadline. While a connection is idle between requests, uvicorn's own deadline applies."""
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _expect_end(self) -> None:
        """A transport that closes waits until its client has read the rest."""
        if self.transport.is_closing():
            self._expect_reading()

    def _expect_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        has_begun, _ = self.conn.trailing_data
        if has_begun:
            self._refuse(slow_headers(self.header_timeout_s))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless the response to an earlier request has begun, and close the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.write(_raw(Reply.failed(error)))
        self.transport.close()
        self._expect_end()

    def _unsupported_upgrade_warning(self) -> None:
        """Log no warning: the request is answered with HTTP/1.1."""


def connections(*, header_timeout_s: float, write_timeout_s: float) -> type[Connection]:
    limits = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    return type("Connection", (Connection,), limits)


def _raw(reply: Reply) -> bytes:
    reason = {400: "Bad Request", 408: "Request Timeout"}[reply.status]
    head = (
        f"HTTP/1.1 {reply.status} {reason}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(reply.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + reply.body
