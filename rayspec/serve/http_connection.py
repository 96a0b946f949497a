"""An HTTP/1.1 connection of the front: uvicorn's, with a deadline for headers and with OpenAI's errors."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rayspec.openai.errors import ApiError
from rayspec.serve.replies import MALFORMED, Reply, slow_headers


class Connection(H11Protocol):
    """header_timeout_s: from the first byte of a request, or from the connection, until the headers are complete.

    h11 reads the body of a request that asks for an upgrade and answers with HTTP/1.1. uvicorn's faster parser loses
    such a body.
    """

    header_timeout_s: float

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def _expect_headers(self) -> None:
        """Between requests without a byte of the next, uvicorn's own deadline for idle connections counts."""
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self._give_up)

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
        """Answer what is no request, where the answer to an earlier request is not on its way, and end."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.write(_raw(Reply.failed(error)))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing to warn of: the request is answered with HTTP/1.1."""


def connections(header_timeout_s: float) -> type[Connection]:
    return type("Connection", (Connection,), {"header_timeout_s": header_timeout_s})


def _raw(reply: Reply) -> bytes:
    reason = {400: "Bad Request", 408: "Request Timeout"}[reply.status]
    head = (
        f"HTTP/1.1 {reply.status} {reason}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(reply.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + reply.body
