"""The HTTP server of `rayspec serve`. Serve's proxy would be two processes more, without a deadline for headers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import resource
import socket
import sys
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
from rayspec.serve.access import HALF_CLOSED, MALFORMED, OVERRUN, error_response, network_of

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
_LONGEST_PAUSE_S = 2.0  # in a body that is dropped
_BYTES_SENT_AT_ONCE = 2**16  # as many as a connection buffers
_MOST_IDLE = 1024  # connections
_MOST_NOT_ACCEPTED = 1024  # more would make others wait for longer while many come
_ACCEPTED_AT_ONCE = 16  # and then what has come on others is read
_ANSWERED = "rayspec.answered"  # in the state of a request: what notes that its answer has been sent


class Named:
    """ASGI middleware that gives each request an id (x-request-id), counts error responses, and refuses other versions
    of HTTP and requests with two lengths, which proxies and servers may cut differently (RFC 9112, 6.1).

    The connection ends after a response that did not need the whole body. Until then the rest of the body is dropped,
    for `drop_timeout_s` at most, and while more comes: a client that still sends loses the response when its connection
    is reset.

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
                scope["state"][_ANSWERED]()
                with suppress(asyncio.TimeoutError):
                    await _drop_body(receive, time.monotonic() + self._drop_timeout_s)
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


async def _drop_body(receive: Receive, end_s: float) -> None:
    num_bytes, has_rest = 0, True
    while has_rest and num_bytes < _MOST_DROPPED_BYTES and (left_s := end_s - time.monotonic()) > 0:
        message = await asyncio.wait_for(receive(), min(left_s, _LONGEST_PAUSE_S))
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


class _Connections:
    """Ends connections that wait for their clients, one with each new connection, while `most_idle` have no request
    under way, or more than `most` are open: of the network of which most wait, the one that has waited for longest.
    Those with an answer that is not read come last."""

    def __init__(self, most_idle: int, most: int) -> None:
        self._most_idle, self._most, self._num_idle = most_idle, most, 0
        # By network, the longest wait first: those without a request under way, and those with an unread answer.
        self._waiting: tuple[dict[str, dict[_HttpConnection, None]], ...] = ({}, {})

    def makes_room(self, num_open: int) -> bool:
        """Return whether there is room for the last of so many connections."""
        if self._num_idle < self._most_idle and num_open <= self._most:
            return True
        for networks in filter(None, self._waiting):
            most = max(networks, key=lambda network: len(networks[network]))
            oldest = next(iter(networks[most]))
            self.remove(oldest)
            oldest.transport.abort()
            return True
        return False

    def add(self, connection: _HttpConnection, *, is_unread: bool) -> None:
        self.remove(connection)
        self._waiting[is_unread].setdefault(connection.network, {})[connection] = None
        self._num_idle += not is_unread

    def remove(self, connection: _HttpConnection) -> None:
        for networks in self._waiting:
            ones = networks.get(connection.network, {})
            if connection in ones:
                del ones[connection]
                self._num_idle -= networks is self._waiting[0]
                if not ones:
                    del networks[connection.network]


_Wait = Literal["headers", "request", "rest", "reader"]


class _HttpConnection(H11Protocol):
    """Ends when the headers of a request are late, or when its client does not read.

    header_timeout_s: limit from the connection, or from the first byte of a later request, to the end of the headers.
    write_timeout_s: limit for the client to make room in a full buffer, and to read the rest after the end. all: of the
    server. The parser is h11: uvicorn's faster parser loses the body of a request for an upgrade.
    """

    header_timeout_s: float
    write_timeout_s: float
    all: _Connections

    network = ""
    _waits_for: _Wait | None = None
    _deadline: asyncio.TimerHandle | None = None
    _is_answered = False  # the rest of the last request's body is dropped

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(h11.SERVER, _SLICE_BYTES)
        self.app_state = {**self.app_state, _ANSWERED: self._answered}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.network = network_of(self.client and self.client[0])
        if self.all.makes_room(len(self.connections)):
            self._wait("headers")
        else:
            self._refuse(OVERRUN)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + _SLICE_BYTES])
        if self._waits_for != "reader":
            self._wait("headers" if self.conn.their_state is h11.IDLE else self._next_wait())

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
        self._wait("reader" if self.transport.is_closing() else self._next_wait())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._waits_for is None:
            self._wait(self._next_wait())
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

    def _answered(self) -> None:
        self._is_answered = True
        if self._waits_for is None:
            self._wait("rest")

    def _next_wait(self) -> _Wait | None:
        """Return what the connection waits for when all that was sent is read."""
        if self._is_answered:
            return "rest"
        return "request" if self.conn.their_state is h11.IDLE else None

    def _wait(self, what: _Wait | None) -> None:
        """Wait for the client; the same wait goes on. Those for a next request and for the rest of a body have their
        deadlines elsewhere. None: a request is under way, or the connection has ended."""
        if what == self._waits_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._waits_for, self._deadline = what, None
        if what is None:
            self.all.remove(self)
        else:
            self.all.add(self, is_unread=what == "reader")
        if what in {"headers", "reader"}:
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
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = _Connections(_MOST_IDLE, sys.maxsize if most_files == resource.RLIM_INFINITY else most_files // 2)
    config = uvicorn.Config(
        Named(app, errors, write_timeout_s),
        http=type("Connection", (_HttpConnection,), {**limits, "all": connections}),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED_AT_ONCE,
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
    listener.listen(_MOST_NOT_ACCEPTED)  # the server has set the number that it accepts at once
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()
