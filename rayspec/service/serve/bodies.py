"""Reading a request's body no further than is allowed."""

from __future__ import annotations

from fastapi import Request

from rayspec.service.openai.errors import InvalidRequestError
from rayspec.service.serve.replies import too_large


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises InvalidRequestError as soon as more than `max_bytes` are announced or have come."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _refusal(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _refusal(max_bytes)
    return bytes(body)


def _refusal(max_bytes: int) -> InvalidRequestError:
    error = too_large(max_bytes)
    return InvalidRequestError(error.message, code=error.code, status=error.status)
