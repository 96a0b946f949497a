"""Reading a request's body no further than is allowed."""

from __future__ import annotations

import asyncio

from fastapi import Request

from rayspec.service.openai.errors import ApiError, InvalidRequestError
from rayspec.service.serve.replies import NO_UPGRADE, too_large, too_slow


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Raises InvalidRequestError as soon as more than `max_bytes` are announced or have come, and when the end has not
    come after `timeout_s`: a client that stops in the middle must not hold a place for ever."""
    try:
        body = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise _invalid(too_slow(timeout_s)) from None
    if not body and "upgrade" in request.headers:
        raise _invalid(NO_UPGRADE)
    return body


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
