"""Who may use the endpoint: bearers of one of its keys, who call the endpoint by an allowed host.

A web page can have its own name resolve to loopback, and then talk to servers of the visitor's machine as if they were
the page's own (DNS rebinding). The Host header still has the page's name.
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
    """SHA-256 digests, compared in constant time; with none, everyone may."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: Iterable[str]) -> Self:
        return cls(tuple(map(_digest, keys)))

    def admit(self, authorization: str | None) -> bool:
        """By the value of the header, "Bearer KEY". How long it takes does not tell which key came close."""
        if not self.digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self.digests]
        return scheme.lower() == _SCHEME and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def allowed_host(header: str | None, names: Collection[str]) -> bool:
    """header: as sent, with or without a port; None, as HTTP/1.0 has it: no browser sends that. names: allowed besides
    those of loopback, lower case; ANY allows all."""
    if header is None or ANY in names:
        return True
    name = _name_of(header)
    return name in names or is_loopback(name)


def allowed_origin(headers: Mapping[str, str], origins: Collection[str]) -> bool:
    """Whether a request that costs something may come from where it does. headers: by lower-case names. origins: of
    pages that may, besides the endpoint's own; ANY allows all."""
    origin = headers.get("origin")
    if origin is None or ANY in origins or origin in origins or headers.get("sec-fetch-site") == "same-origin":
        return True
    host = origin.partition("://")[2]
    return bool(host) and host == headers.get("host", "").strip().lower()


def is_loopback(name: str) -> bool:
    """name: without port and brackets."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _name_of(header: str) -> str:
    """Empty where the header is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        return name if bracket and (not port or _is_port(port)) else ""
    name, colon, number = text.partition(":")
    return name.removesuffix(".") if not colon or _is_port(colon + number) else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and (text == ":" or text[1:].isdecimal())
