"""Who may use the endpoint, how many requests may be under way, and the errors for the others."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import Self

from rayspec.openai.protocol import ApiError
from rayspec.openai.responses import json_body

ANY = "*"
_PATIENCE_S = 1.0  # for a body, while other requests find no place
_RETRY_AFTER_S = 5  # about the time a replica of a small model takes to restart

# Errors that the endpoint itself answers with.
UNAUTHORIZED = ApiError(401, "invalid_api_key", "No valid API key: send one as 'Authorization: Bearer KEY'.")
BUSY = ApiError(429, "rate_limit_exceeded", "The model has too many requests waiting. Please try again later.")
STARTING = ApiError(503, "starting", "The model is starting. Please try again later.")
GONE = ApiError(503, "engine_dead", "The engine cannot serve this request now. Please try again later.")
ENDING = ApiError(503, "shutting_down", "The endpoint is shutting down. Please try another, or again later.")
OVERRUN = ApiError(429, "rate_limit_exceeded", "The endpoint has too many requests at once. Please try again later.")
NO_STORE = ApiError(
    503, "store_unavailable", "The folder of files and batches cannot be used now. Please try again later."
)
NOT_JSON = ApiError(
    415, "unsupported_media_type", "Send the body as JSON, with the header 'Content-Type: application/json'."
)
WRONG_HOST = ApiError(
    403, "host_not_allowed", "The Host header names no host of this endpoint: use another, or have it allowed there."
)
WRONG_ORIGIN = ApiError(403, "origin_not_allowed", "Pages of this origin may not send such a request to this endpoint.")
MALFORMED = ApiError(
    400,
    "invalid_http",
    "This is no valid HTTP/1.1 request, its headers exceed 16 KiB, or its body comes in over 250 chunks of under 1 KB: "
    "send a Content-Length.",
)
HALF_CLOSED = ApiError(400, "half_closed", "The client closed its side before the answer: keep it open until then.")

# Java's client asks for HTTP/2 by default. Serve's proxy goes on with HTTP/1.1 then, without the body.
NO_UPGRADE = ApiError(
    400, "upgrade_unsupported", "The body was lost: have the client use HTTP/1.1 and not ask for an upgrade."
)


def timed_out(timeout_s: float) -> ApiError:
    return ApiError(504, "timeout", f"The answer took longer than {timeout_s:g} s.")


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"The body has more than {max_bytes} bytes.")


def too_slow(timeout_s: float) -> ApiError:
    return ApiError(408, "request_timeout", f"The body did not come within {timeout_s:g} s.")


class Refused(Exception):  # noqa: N818 - an answer, and no error of the program
    """A request that is answered with `error` and goes no further."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """SHA-256 digests of the API keys, compared in constant time. Without keys, everyone is admitted."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Iterable[str]) -> Self:
        return cls(tuple(map(_digest, keys)))

    def admit(self, authorization: str | None) -> bool:
        """Return whether the header value, "Bearer KEY", is admitted. Its timing does not reveal similar keys."""
        if not self.digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return scheme.lower() == "bearer" and any(matches)

    def owner(self, authorization: str | None) -> str:
        """Return a name of the key in an admitted header value; "" if there are no keys."""
        return _digest((authorization or "").partition(" ")[2].strip()).hex()[:16] if self.digests else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def allowed_host(header: str | None, names: Collection[str]) -> bool:
    """Return whether a client may call the endpoint by this host: a web page can make its own name resolve to the
    loopback address (DNS rebinding). header: None (HTTP/1.0) is allowed, because no browser omits it. names: allowed
    names in addition to the loopback names, in lower case; ANY allows all."""
    if header is None or ANY in names:
        return True
    match = re.fullmatch(r"(?:\[([^]]*)\]|([^:\[]*?)\.?)(?::[0-9]*)?", header.strip().lower())
    name = (match[1] or match[2] or "") if match is not None else ""  # without port and brackets
    return name in names or is_loopback(name)


def allowed_origin(headers: Mapping[str, str], origins: Collection[str]) -> bool:
    """Return whether a POST or DELETE request may come from its origin. headers: by lower-case names. origins: allowed
    origins of web pages, in addition to the endpoint's own; ANY allows all."""
    origin = headers.get("origin")
    if origin is None or ANY in origins or origin in origins or headers.get("sec-fetch-site") == "same-origin":
        return True
    host = origin.partition("://")[2]
    return bool(host) and host == headers.get("host", "").strip().lower()


def is_loopback(name: str) -> bool:
    """Return whether a host name or IP address, without port and brackets, is a loopback one."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def network_of(host: str | None) -> str:
    """Return what stands for a client without a key: its address, or of an IPv6 address the first half, because each
    customer of a provider has all addresses of the second half."""
    try:
        address = ip_address(host or "")
    except ValueError:
        return host or ""
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ip_network((address, 64), strict=False) if isinstance(address, IPv6Address) else address)


class Admission:
    """Counts the total weight of the requests under way, and refuses further requests with `refusal` while it is `most`
    or more (None: no limit). Also at the limit, a client may have its share: `most`, divided by the clients that have
    requests under way. A large request is refused no more often than a small one, unless `is_strict`: then all of it
    must be within the share, so that many clients together do not have many times `most`."""

    def __init__(self, most: int | None = None, refusal: ApiError = BUSY, *, is_strict: bool = False) -> None:
        self._most, self._refusal, self._is_strict = most, refusal, is_strict
        self.under_way = 0
        self._held: Counter[str] = Counter()

    def refuses(self, client: str, weight: int = 1) -> bool:
        """Return whether the limit is reached and the client has its share."""
        num_clients, added = len(self._held.keys() | {client}), weight if self._is_strict else 1
        is_full = self._most is not None and self.under_way >= self._most
        return is_full and (self._held[client] + added) * num_clients > (self._most or 0)

    def has_some(self, client: str) -> bool:
        return client in self._held

    @contextmanager
    def admit(self, weight: int = 1, client: str = "", *, is_sure: bool = False) -> Iterator[None]:
        """Count a request while the context is open. Raises Refused at the limit, unless it `is_sure` to be kept."""
        if self.refuses(client, weight) and not is_sure:
            raise Refused(self._refusal)
        self.under_way += weight
        self._held[client] += weight
        try:
            yield
        finally:
            self.under_way -= weight
            self._held[client] -= weight
            self._held += Counter()  # drops clients that have none


@dataclass(slots=True, kw_only=True)
class Entry:
    """Decides which requests may enter. hosts, origins: see `allowed_host` and `allowed_origin`. posts: counts POST and
    DELETE requests that need a key; gets: others that do; free: the rest. draining: no request may enter any more.

    While `posts` is full, a client that has its share of them ends the body of its own that has been arriving for
    longest, if that is longer than a second, with each new request: bodies that do not come keep no places.
    """

    keys: ApiKeys
    hosts: Collection[str]
    origins: Collection[str]
    posts: Admission
    gets: Admission
    free: Admission = field(default_factory=Admission)
    draining: bool = False
    # Of which client and since when, the oldest first.
    _arriving: dict[asyncio.Future[None], tuple[str, float]] = field(default_factory=dict)

    @property
    def num_under_way(self) -> int:
        return self.posts.under_way + self.gets.under_way + self.free.under_way

    @contextmanager
    def admitted(self, receive: Receive, client: str) -> Iterator[Receive]:
        """Count a POST or DELETE request while the context is open, and yield what receives its body. Raises Refused,
        and so does what is yielded."""
        late, has_arrived = asyncio.get_running_loop().create_future(), False

        async def received() -> Message:
            nonlocal has_arrived
            if has_arrived:
                return await receive()
            self._arriving.setdefault(late, (client, time.monotonic()))
            message = asyncio.ensure_future(receive())
            try:
                await asyncio.wait({message, late}, return_when=asyncio.FIRST_COMPLETED)
                if late.done():
                    raise Refused(OVERRUN)
                has_arrived = not message.result().get("more_body", False)
            finally:
                message.cancel()
                if has_arrived:
                    self._arriving.pop(late, None)
            return message.result()

        slow = self._slow_of(client) if self.posts.refuses(client) else None
        if slow is not None:
            del self._arriving[slow]
            slow.set_result(None)
        try:
            with self.posts.admit(client=client, is_sure=slow is not None):
                yield received
        finally:
            self._arriving.pop(late, None)

    def _slow_of(self, client: str) -> asyncio.Future[None] | None:
        """Return the body of the client that has been arriving for longest; of all bodies, if the client has no request
        under way. None where that is not long."""
        is_new = not self.posts.has_some(client)
        found = ((one, since_s) for one, (whose, since_s) in self._arriving.items() if is_new or whose == client)
        oldest, since_s = next(found, (None, 0.0))
        return oldest if time.monotonic() - since_s > _PATIENCE_S else None

    def client(self, request: Request) -> str:
        """Return what stands for the client of a request: its key, or its network."""
        owner = self.keys.owner(request.headers.get("authorization"))
        return owner or network_of(request.client and request.client.host)

    def guarded(self, app: ASGIApp, *, open_paths: Collection[str]) -> ASGIApp:
        """Return the application without requests that may not enter. open_paths: paths that need no key."""

        async def guard(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            headers, has_cost = Headers(scope=scope), scope["method"] in {"POST", "DELETE"}
            path = scope["path"].removeprefix(scope.get("root_path", ""))  # the prefix of several applications of Serve
            needs_key, client = path not in open_paths, self.client(Request(scope))
            try:
                with ExitStack() as held:
                    has_body = has_cost and needs_key  # without a key, none is read
                    if not has_body:
                        admission = self.gets if needs_key else self.free
                        held.enter_context(admission.admit(client=client))
                    self._check(headers, has_cost=has_cost, needs_key=needs_key)
                    await app(scope, held.enter_context(self.admitted(receive, client)) if has_body else receive, send)
            except Refused as refused:
                await error_response(refused.error)(scope, receive, send)

        return guard

    def _check(self, headers: Headers, *, has_cost: bool, needs_key: bool) -> None:
        if not allowed_host(headers.get("host"), self.hosts):
            raise Refused(WRONG_HOST)
        if has_cost and not allowed_origin(headers, self.origins):
            raise Refused(WRONG_ORIGIN)
        if needs_key and not self.keys.admit(headers.get("authorization")):
            raise Refused(UNAUTHORIZED)
        if self.draining:
            raise Refused(ENDING)


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status in {429, 503}:
        headers["retry-after"] = str(_RETRY_AFTER_S)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(json_body(error), status_code=error.status, media_type="application/json", headers=headers)


def json_response(found: Any) -> Response:
    """found: a body, encoded or not, or an ApiError."""
    if isinstance(found, ApiError):
        return error_response(found)
    return Response(found if isinstance(found, bytes) else json_body(found), media_type="application/json")
