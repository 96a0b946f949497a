"""Reading of a request's body, with limits on its size and time."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from fastapi import Request

from rayspec.openai.errors import ApiError, InvalidRequestError
from rayspec.serve.admission import Admission
from rayspec.serve.content_encoding import decoder
from rayspec.serve.replies import NO_UPGRADE, NOT_JSON, too_large, too_slow

LARGE = 2**20
_JSON = "application/json"
_UPGRADE_TIMEOUT_S = 5.0  # Serve's proxy loses the body of a request for an upgrade, and never ends it


async def read_body(request: Request, max_bytes: int, timeout_s: float, *, large: Admission, held: ExitStack) -> bytes:
    """Return the body. Raises InvalidRequestError as soon as more than `max_bytes` are announced or received, and when
    the body is incomplete after `timeout_s`: a stalled client must not occupy a place for ever. A body without a JSON
    content type is refused: web pages of any origin may send other types without a CORS preflight. A body in gzip or
    deflate is inflated, and `max_bytes` limits both sizes; another encoding is refused.

    large: counts the bytes of large bodies, when more than LARGE have come; may refuse the body. held: ends that.
    """
    upgrades = _asks_for_upgrade(request)
    timeout_s = min(timeout_s, _UPGRADE_TIMEOUT_S) if upgrades else timeout_s
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise _invalid(NOT_JSON)
    try:
        body = await asyncio.wait_for(_read(request, max_bytes, large, held), timeout_s)
    except asyncio.TimeoutError:
        raise _invalid(NO_UPGRADE if upgrades else too_slow(timeout_s)) from None
    if upgrades and not body:
        raise _invalid(NO_UPGRADE)
    return body


def _asks_for_upgrade(request: Request) -> bool:
    tokens = request.headers.get("connection", "").lower().split(",")
    return "upgrade" in request.headers or "upgrade" in [token.strip() for token in tokens]


async def _read(request: Request, max_bytes: int, large: Admission, held: ExitStack) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _invalid(too_large(max_bytes))
    content, body, num_received, is_large = decoder(request.headers), bytearray(), 0, False
    async for received in request.stream():
        num_received += len(received)
        for piece in content.pieces(received):
            body += piece
            if len(body) > LARGE and not is_large:
                has_size = announced.isdecimal() and content.keeps_size
                held.enter_context(large.admit(int(announced) if has_size else max_bytes))
                is_large = True
            if max(num_received, len(body)) > max_bytes:
                raise _invalid(too_large(max_bytes))
            await asyncio.sleep(0)
    content.end()
    return bytes(body)


def _invalid(error: ApiError) -> InvalidRequestError:
    return InvalidRequestError(error.message, code=error.code, status=error.status)
