"""Who may use the endpoint: clients that send one of its keys and call it by an allowed host name.

A web page can make its own domain name resolve to the loopback address. Then it can call servers on the visitor's
machine as if they were its own (DNS rebinding). The Host header of such a request still contains the page's name.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from typing_extensions import Self

ANY = "*"
_SCHEME = "bearer"


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
        return scheme.lower() == _SCHEME and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def allowed_host(header: str | None, names: Collection[str]) -> bool:
    """Return whether a client may call the endpoint by this host.

    header: the Host header, with or without a port; None (HTTP/1.0) is allowed, because no browser omits it. names:
    allowed names in addition to the loopback names, in lower case; ANY allows all.
    """
    if header is None or ANY in names:
        return True
    name = _name_of(header)
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
    """Return whether a host name or IP address is a loopback one. name: without port and brackets."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(header: str) -> str:
    """Return the host name in a Host header, without port and brackets; empty where the header is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        return name if bracket and (not port or _is_port(port)) else ""
    name, colon, number = text.partition(":")
    return name.removesuffix(".") if not colon or _is_port(colon + number) else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and (text == ":" or text[1:].isdecimal())
