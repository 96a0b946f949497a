"""The HTTP server of `rayspec serve`: an ingress in the process of the command.

Serve's proxy and an ingress deployment would add two processes that can fail, and the proxy has no deadline for
headers. Endpoints deployed by `serve deploy` or RayService have both processes, see `app.py`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayspec.serve.admission import error_response
from rayspec.serve.http_connection import connections
from rayspec.serve.replies import MALFORMED

_ID = "x-request-id"
_LENGTHS = {"content-length", "transfer-encoding"}
_VERSIONS = ("1.0", "1.1")
_IDLE_CONNECTION_S = 30
_POLL_S = 0.02
_ERRORS = "serve_num_http_error_requests"  # the name in Serve's proxy, so that dashboards and alerts find it


class Named:
    """ASGI middleware that gives each request an id (x-request-id) if it has none, and repeats the id in the response.
    The middleware counts error responses, and refuses requests of unsupported HTTP versions and requests with two
    lengths, which proxies and servers may cut differently (RFC 9112, 6.1)."""

    def __init__(self, app: ASGIApp, errors: Counter) -> None:
        self._app, self._errors = app, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = headers.get(_ID)
        if name is None:
            name = str(uuid.uuid4())
            scope["headers"] = [*scope["headers"], (_ID.encode(), name.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_ID] = name
                if message["status"] >= 400:
                    self._errors.inc(tags={"error_code": str(message["status"]), "method": scope["method"]})
            await send(message)

        app = self._app
        if scope["http_version"] not in _VERSIONS or set(headers.keys()) >= _LENGTHS:
            app = error_response(MALFORMED, {"connection": "close"})
        await app(scope, receive, send_named)


@contextmanager
def http_server(
    app: ASGIApp, listener: socket.socket, *, header_timeout_s: float, write_timeout_s: float
) -> Iterator[threading.Thread]:
    """Run the server in a thread while the context is open, and yield the thread. listener: a listening socket. The
    timeouts are those of `Connection`."""
    errors = Counter(_ERRORS, "Requests that were answered with an error.", tag_keys=("error_code", "method"))
    config = uvicorn.Config(
        Named(app, errors),
        http=connections(header_timeout_s=header_timeout_s, write_timeout_s=write_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level=logging.ERROR,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="rayspec-http", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(_POLL_S)
    try:
        yield thread
    finally:
        server.should_exit = True
        thread.join()
