"""The HTTP server of `rayspec serve`. Serve's proxy would be two processes more, without a deadline for headers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Literal

import h11
import uvicorn
from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rayspec.openai.protocol import ApiError
from rayspec.openai.responses import json_body
from rayspec.serve.access import HALF_CLOSED, MALFORMED, error_response

_ID = "x-request-id"
_LENGTHS = {"content-length", "transfer-encoding"}
_VERSIONS = ("1.0", "1.1")
_HTTP_URI = re.compile(rb"https?://(?P<host>[^/?]+)(?P<target>.*)", re.IGNORECASE)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_ERRORS = "serve_num_http_error_requests"  # the name in Serve's proxy, so that dashboards and alerts find it
_SLICE_BYTES = 2**14  # parsed at a time; also the longest headers
_BYTES_OF_HEADER = 32  # more than its text, as in HTTP/2
_FREE_CHUNKS, _BYTES_OF_CHUNK = 250, 1024
_MOST_DROPPED_BYTES = 2**28  # more than a file for batches has by default
_BYTES_SENT_AT_ONCE = 2**16  # as many as a connection buffers


class Named:
    """ASGI middleware that gives each request an id (x-request-id), counts error responses, and refuses other versions
    of HTTP and requests with two lengths, which proxies and servers may cut differently (RFC 9112, 6.1).

    The connection ends after a response that did not need the whole body. Until then the rest of the body is dropped,
    for `drop_timeout_s` at most: a client that still sends loses the response when its connection is reset.

    Large bodies are sent in pieces, each when the client has read those before, so the application knows that it reads.
    """

    def __init__(self, app: ASGIApp, errors: Counter, drop_timeout_s: float) -> None:
        self._app, self._errors, self._drop_timeout_s = app, errors, drop_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, send = Headers(scope=scope), _in_pieces(send)
        name = headers.get(_ID)
        if name is None:
            name = str(uuid.uuid4())
            scope["headers"] = [*scope["headers"], (_ID.encode(), name.encode())]

        has_rest = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        last: list[Message] = []  # held back while the rest of the body comes

        async def receive_noted() -> Message:
            nonlocal has_rest
            message = await receive()
            has_rest = has_rest and message.get("more_body", False)
            return message

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_ID] = name
                if has_rest:
                    MutableHeaders(scope=message)["connection"] = "close"
                if message["status"] >= 400:
                    # A client may invent methods, and each series of a metric stays in memory.
                    method = scope["method"] if scope["method"] in _METHODS else "other"
                    self._errors.inc(tags={"error_code": str(message["status"]), "method": method})
            elif has_rest and not message.get("more_body", False):
                last.append({"type": "http.response.body"})
                message = {**message, "more_body": True}
            await send(message)

        app = self._app
        if scope["http_version"] not in _VERSIONS or set(headers.keys()) >= _LENGTHS:
            app = error_response(MALFORMED, {"connection": "close"})
        await app(scope, receive_noted, send_named)
        if last:
            if "expect" not in headers:  # such a client waits before it sends the body
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_drop_body(receive), self._drop_timeout_s)
            await send(last[0])


def _in_pieces(send: Send) -> Send:
    async def send_pieces(message: Message) -> None:
        body = message.get("body", b"")
        for start in range(0, len(body), _BYTES_SENT_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # lets the server see that a client has left: each write would be a line of log
            end = start + _BYTES_SENT_AT_ONCE
            has_more = end < len(body) or message.get("more_body", False)
            await send({"type": message["type"], "body": body[start:end], "more_body": has_more})
        if not body:
            await send(message)

    return send_pieces


async def _drop_body(receive: Receive) -> None:
    num_bytes, has_rest = 0, True
    while has_rest and num_bytes < _MOST_DROPPED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        has_rest = message.get("more_body", False)


class _Parser(h11.Connection):
    """Refuses long headers and bodies of tiny chunks, which are slow. Takes the host of a whole URI (RFC 9112)."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            num_bytes = len(event.target) + sum(map(len, itertools.chain.from_iterable(event.headers)))
            if num_bytes + _BYTES_OF_HEADER * len(event.headers) > _SLICE_BYTES:
                raise h11.RemoteProtocolError("too long headers")
            if (uri := _HTTP_URI.fullmatch(event.target)) is not None:
                others = [(name, value) for name, value in event.headers if name != b"host"]
                event = h11.Request(
                    method=event.method,
                    target=b"/" + uri["target"].removeprefix(b"/"),
                    headers=[(b"host", uri["host"]), *others],
                    http_version=event.http_version,
                )
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_OF_CHUNK:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class _HttpConnection(H11Protocol):
    """Ends when the headers of a request are late, or when its client does not read.

    header_timeout_s: limit from the connection, or from the first byte of a later request, to the end of the headers.
    write_timeout_s: limit for the client to make room in a full buffer, and to read the rest after the end. The parser
    is h11: uvicorn's faster parser loses the body of a request for an upgrade.
    """

    header_timeout_s: float
    write_timeout_s: float

    _waits_for: Literal["headers", "reader"] | None = None
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, _SLICE_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait("headers")

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _SLICE_BYTES])
        if self._waits_for != "reader":
            self._wait("headers" if self.conn.their_state is h11.IDLE else None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Tell a client that has ended its side too early why it gets no answer; one that has left gets nothing."""
        if self.conn.their_state is not h11.IDLE:
            self._refuse(HALF_CLOSED)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait("reader" if self.transport.is_closing() else None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_end()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def _expect_end(self) -> None:
        """A transport that closes waits until its client has read the rest."""
        if self.transport.is_closing():
            self._wait("reader")

    def _wait(self, what: Literal["headers", "reader"] | None) -> None:
        """Wait for the client with a deadline, which the same wait keeps. None: uvicorn's own, for idle connections."""
        if what == self._waits_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._waits_for, self._deadline = what, None
        if what is not None:
            limit_s = self.header_timeout_s if what == "headers" else self.write_timeout_s
            self._deadline = self.loop.call_later(limit_s, self._give_up)

    def _give_up(self) -> None:
        if self._waits_for == "reader":
            self.transport.abort()
        elif self.conn.trailing_data[0]:
            message = f"The headers did not come within {self.header_timeout_s:g} s."
            self._refuse(ApiError(408, "request_timeout", message))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless the response to an earlier request has begun, and close the connection."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            content = json_body(error)
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + content)
        self.transport.close()
        self._expect_end()

    def _unsupported_upgrade_warning(self) -> None:
        """Log no warning: the request is answered with HTTP/1.1."""


@contextmanager
def http_server(
    app: ASGIApp, listener: socket.socket, *, header_timeout_s: float, write_timeout_s: float
) -> Iterator[threading.Thread]:
    """Run the server in a thread while the context is open, and yield the thread. listener: a listening socket. The
    timeouts are those of `_HttpConnection`."""
    errors = Counter(_ERRORS, "Requests that were answered with an error.", tag_keys=("error_code", "method"))
    limits = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    config = uvicorn.Config(
        Named(app, errors, write_timeout_s),
        http=type("Connection", (_HttpConnection,), limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # Connections inherit it. Otherwise the body of an answer waits until the client acknowledges the headers, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="rayspec-http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.02)
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()
