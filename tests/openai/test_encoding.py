"""Bytes on the wire, and what the official client makes of them over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import openai
import pytest

from rayspec.openai.errors import ApiError
from rayspec.openai.responses import (
    END_OF_EVENTS,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    Chunk,
    Completion,
    CompletionChoice,
    Part,
    PromptTokensDetails,
    Usage,
    event,
    events,
    json_body,
    plain_body,
)
from rayspec.types import EmptyPromptError, OutOfMemoryError, RayspecError

STAMP = {"id": "i", "created": 5, "model": "m"}
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
)


def chat_chunk(text: str, **values: Any) -> ChatCompletionChunk:
    choice = ChatChunkChoice(index=0, delta=ChatDelta(content=text))
    return ChatCompletionChunk(**{**STAMP, "choices": [choice], **values})


def text_chunk(text: str, **values: Any) -> Completion:
    choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=None, stop_reason=None)
    return Completion(**{**STAMP, "choices": [choice], **values})


async def _parts(*items: Chunk | RayspecError, closed: list[bool] | None = None) -> AsyncGenerator[Part, None]:
    try:
        for number, item in enumerate(items, start=1):
            if isinstance(item, RayspecError):
                raise item
            yield Part(chunks=[item], is_last=number == len(items))
    finally:
        if closed is not None:
            closed.append(True)


def told(error: Exception) -> ApiError:
    assert isinstance(error, RayspecError)
    return ApiError.of(error)


def encoded(*items: Chunk | RayspecError) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [one async for one in events(_parts(*items), told)]

    return asyncio.run(collect())


def test_json_is_compact_and_leaves_out_what_is_unset() -> None:
    begin = b'{"id":"i","created":5,"model":"m","choices":['
    end = b',"object":"chat.completion.chunk"}'
    choice = (
        '{"index":0,"delta":{"content":"é\\n\\n"},"logprobs":null,"finish_reason":null,"stop_reason":null}]'.encode()
    )
    assert json_body(chat_chunk("é\n\n")) == begin + choice + end
    assert json_body(chat_chunk("é\n\n", usage=None)) == begin + choice + b',"usage":null' + end
    assert plain_body(chat_chunk("é\n\n")) == json.loads(json_body(chat_chunk("é\n\n")))


def test_a_stream_is_events_and_an_end() -> None:
    assert encoded(text_chunk("a\n"), text_chunk("b")) == [
        event(text_chunk("a\n")),
        event(text_chunk("b")) + END_OF_EVENTS,
    ]
    (one,) = encoded(text_chunk("a\n\ndata: [DONE]\n\n\u2028"))
    assert one.startswith(b"data: ")
    assert one.index(b"\n") == len(one) - 2 - len(END_OF_EVENTS)


def test_chunks_that_are_there_together_travel_together() -> None:
    async def parts() -> AsyncGenerator[Part, None]:
        yield Part(chunks=[text_chunk("a"), text_chunk("b")], is_last=False)
        yield Part(chunks=[], is_last=True)

    async def collect() -> list[bytes]:
        return [one async for one in events(parts(), told)]

    assert asyncio.run(collect()) == [event(text_chunk("a")) + event(text_chunk("b")), END_OF_EVENTS]


def test_an_error_before_the_first_chunk_is_raised() -> None:
    with pytest.raises(EmptyPromptError):
        encoded(EmptyPromptError("nothing"))


@pytest.mark.parametrize("error", [OutOfMemoryError("full"), EmptyPromptError("nothing")])
def test_a_later_error_is_an_event(error: RayspecError) -> None:
    chunk, end = encoded(text_chunk("a"), error)
    assert chunk == event(text_chunk("a"))
    assert end.endswith(END_OF_EVENTS)
    assert json.loads(end.removesuffix(END_OF_EVENTS).removeprefix(b"data: ")) == ApiError.of(error).body


def test_closing_the_events_closes_the_chunks() -> None:
    closed: list[bool] = []

    async def close_early() -> None:
        stream = events(_parts(text_chunk("a"), text_chunk("b"), closed=closed), told)
        await anext(stream)
        assert not closed
        await stream.aclose()
        assert closed

    asyncio.run(close_early())


def test_the_official_client_raises_an_error_in_mid_stream() -> None:
    """The rest is tested with that client and a real endpoint."""
    content = b"".join(encoded(text_chunk("a"), OutOfMemoryError("the arena is full")))
    answer = httpx2.MockTransport(lambda _: httpx2.Response(200, content=content))
    with openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=answer)) as client:
        stream = client.completions.create(model="m", prompt="x", stream=True)
        assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="the arena is full") as caught:
            next(stream)
    assert (caught.value.code, caught.value.type) == ("out_of_memory", "server_error")


def test_an_error_is_json_too() -> None:
    error = ApiError.of(EmptyPromptError("nothing"))
    assert json.loads(json_body(error)) == error.body
