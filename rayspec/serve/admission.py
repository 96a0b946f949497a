"""Checks that a request passes before it reaches a route: limits, hosts, origins, keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rayspec.openai.errors import ApiError
from rayspec.serve.access import ApiKeys, allowed_host, allowed_origin
from rayspec.serve.replies import BUSY, ENDING, UNAUTHORIZED, WRONG_HOST, WRONG_ORIGIN, Refused, Reply

_REQUEST_HEADERS = ("authorization", "content-type", "x-request-id")
_RESPONSE_HEADERS = ("retry-after", "x-request-id")


class Admission:
    """Counts the total weight of the requests under way, and refuses further requests at a limit.

    most: the limit; None: no limit. A request is admitted while the total is below `most`, whatever its own weight: a
    large request is refused no more often than a small one. refusal: error of a refused request.
    """

    def __init__(self, most: int | None = None, refusal: ApiError = BUSY) -> None:
        self._most, self._refusal = most, refusal
        self.under_way = 0

    @contextmanager
    def admit(self, weight: int = 1) -> Iterator[None]:
        """Count a request while the context is open. Raises Refused at the limit."""
        if self._most is not None and self.under_way >= self._most:
            raise Refused(self._refusal)
        self.under_way += weight
        try:
            yield
        finally:
            self.under_way -= weight


@dataclass(slots=True, kw_only=True)
class Entry:
    """Decides which requests may enter.

    hosts: names by which clients may call the endpoint, see `allowed_host`. origins: origins of web pages that may send
    POST and DELETE requests, see `allowed_origin`. posts: counts POST and DELETE requests. gets: counts other requests
    that need a key. free: counts the rest, without a limit. draining: no request may enter any more.
    """

    keys: ApiKeys
    hosts: Collection[str]
    origins: Collection[str]
    posts: Admission
    gets: Admission
    free: Admission = field(default_factory=Admission)
    draining: bool = False

    @property
    def num_under_way(self) -> int:
        return self.posts.under_way + self.gets.under_way + self.free.under_way

    def refusal(self, headers: Headers, *, costs: bool, needs_key: bool) -> Response | None:
        if not allowed_host(headers.get("host"), self.hosts):
            return error_response(WRONG_HOST)
        if costs and not allowed_origin(headers, self.origins):
            return error_response(WRONG_ORIGIN)
        if needs_key and not self.keys.admit(headers.get("authorization")):
            return error_response(UNAUTHORIZED, {"www-authenticate": "Bearer"})
        return error_response(ENDING) if self.draining else None


class AdmissionControl:
    """ASGI middleware that refuses requests that may not enter. open_paths: paths that need no key."""

    def __init__(self, app: ASGIApp, *, entry: Entry, open_paths: Collection[str]) -> None:
        self._app, self._entry, self._open_paths = app, entry, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        costs, needs_key = scope["method"] in {"POST", "DELETE"}, scope["path"] not in self._open_paths
        try:
            with (self._entry.posts if costs else self._entry.gets if needs_key else self._entry.free).admit():
                refusal = self._entry.refusal(Headers(scope=scope), costs=costs, needs_key=needs_key)
                await (refusal or self._app)(scope, receive, send)
        except Refused as refused:
            await error_response(refused.error)(scope, receive, send)


class Cors(CORSMiddleware):
    """Lets web pages of `origins` use the endpoint; browsers keep pages of other origins out."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=_REQUEST_HEADERS,
            expose_headers=_RESPONSE_HEADERS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code == 200 else error_response(WRONG_ORIGIN, {"vary": "Origin"})


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return response_of(Reply.failed(error), headers)


def response_of(reply: Reply, headers: Mapping[str, str] | None = None) -> Response:
    waits = {} if reply.retry_after_s is None else {"retry-after": str(reply.retry_after_s)}
    return Response(
        reply.body, status_code=reply.status, media_type="application/json", headers={**waits, **(headers or {})}
    )
