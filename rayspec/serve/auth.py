"""Who may use the endpoint: bearers of one of its keys. Keys are kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import Self

_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """SHA-256 digests; with none, everyone may."""

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
