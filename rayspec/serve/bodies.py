"""Reading a request's body no further than is allowed."""

from __future__ import annotations

import asyncio

from fastapi import Request

from rayspec.openai.errors import ApiError, InvalidRequestError
from rayspec.serve.replies import NO_UPGRADE, NOT_JSON, too_large, too_slow

_JSON = "application/json"
_UPGRADE_TIMEOUT_S = 5.0  # Serve's proxy loses such a body, and never says that the body ends


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Raises InvalidRequestError as soon as more than `max_bytes` are announced or have come, and when the end has not
    come after `timeout_s`: a client that stops in the middle must not hold a place for ever. A body that is not
    announced as JSON is refused: web pages of any origin may send other types without asking."""
    upgrades = _asks_for_upgrade(request)
    timeout_s = min(timeout_s, _UPGRADE_TIMEOUT_S) if upgrades else timeout_s
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise _invalid(NOT_JSON)
    try:
        body = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise _invalid(NO_UPGRADE if upgrades else too_slow(timeout_s)) from None
    if upgrades and not body:
        raise _invalid(NO_UPGRADE)
    return body


def _asks_for_upgrade(request: Request) -> bool:
    tokens = request.headers.get("connection", "").lower().split(",")
    return "upgrade" in request.headers or "upgrade" in [token.strip() for token in tokens]


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _invalid(too_large(max_bytes))
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _invalid(too_large(max_bytes))
    return bytes(body)


def _invalid(error: ApiError) -> InvalidRequestError:
    return InvalidRequestError(error.message, code=error.code, status=error.status)
