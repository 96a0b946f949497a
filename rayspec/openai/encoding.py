"""Responses as JSON and as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from rayspec.openai.chunks import Chunk
from rayspec.openai.errors import ApiError
from rayspec.openai.models import ModelCard, ModelList
from rayspec.openai.responses import Response
from rayspec.openai.tokenizing import DetokenizeResponse, TokenizeResponse
from rayspec.types import RayspecError

Body = Response | Chunk | ModelCard | ModelList | TokenizeResponse | DetokenizeResponse
END_OF_EVENTS = b"data: [DONE]\n\n"


def json_body(body: Body | ApiError) -> bytes:
    """Compact, UTF-8."""
    return msgspec.json.encode(body.body if isinstance(body, ApiError) else body)


def plain_body(body: Body) -> dict[str, Any]:
    """As `json.loads` would give it."""
    plain: dict[str, Any] = msgspec.to_builtins(body)
    return plain


def event(body: Chunk | ApiError) -> bytes:
    return b"data: " + json_body(body) + b"\n\n"


async def events(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
    """The whole body of a streamed response. An error before the first chunk is raised, for there is still time for
    another status; a later one becomes an event. Closing it closes the chunks."""
    async with aclosing(chunks):
        yield event(await anext(chunks))
        try:
            async for chunk in chunks:
                yield event(chunk)
        except RayspecError as error:
            yield event(ApiError.of(error))
        yield END_OF_EVENTS
