"""Responses as JSON and as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from rayspec.openai.answer import Part
from rayspec.openai.chunks import Chunk
from rayspec.openai.errors import ApiError
from rayspec.openai.models import ModelCard, ModelList
from rayspec.openai.responses import Response
from rayspec.openai.tokenizing import DetokenizeResponse, TokenizeResponse

Body = Response | Chunk | ModelCard | ModelList | TokenizeResponse | DetokenizeResponse
END_OF_EVENTS = b"data: [DONE]\n\n"


def json_body(body: Body | ApiError) -> bytes:
    """Encode a body as compact JSON in UTF-8."""
    return msgspec.json.encode(body.body if isinstance(body, ApiError) else body)


def plain_body(body: Body) -> dict[str, Any]:
    """Return a body in the types that `json.loads` returns."""
    plain: dict[str, Any] = msgspec.to_builtins(body)
    return plain


def event(body: Chunk | ApiError) -> bytes:
    return b"data: " + json_body(body) + b"\n\n"


async def events(
    parts: AsyncGenerator[Part, None], told: Callable[[Exception], ApiError]
) -> AsyncGenerator[bytes, None]:
    """Yield the whole body of a streamed response, a part at a time.

    An error before the first part is raised, because the HTTP status can still change. A later error becomes an event.
    told: converts an error to the form for clients. Closing the generator closes the parts.
    """
    async with aclosing(parts):
        yield _encoded(await anext(parts))
        try:
            async for part in parts:
                yield _encoded(part)
        except Exception as error:  # noqa: BLE001 - reported to the client
            yield event(told(error)) + END_OF_EVENTS


def _encoded(part: Part) -> bytes:
    return b"".join(map(event, part.chunks)) + (END_OF_EVENTS if part.is_last else b"")
