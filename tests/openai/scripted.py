"""An engine that does as it is told, with the tokenizer of the bundled model."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from rayspec import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.openai.answer import respond, stream
from rayspec.openai.parsers import OutputParser, Thought
from rayspec.openai.protocol import ApiError
from rayspec.prompts import Rendering
from rayspec.types import CompletionOutput, RayspecError, RequestOutput
from tests.demo_model import demo_tokenizer


class ScriptedEngine:
    """Answers a prompt with its own tokens, or as `outcomes` says of its first token; "wait" for good. A stream repeats
    the tokens for ever, or up to its outcome."""

    tokenizer = demo_tokenizer()
    max_model_len = 512
    client_name = ""

    def __init__(self, outcomes: Mapping[int, RayspecError | str] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.num_asked = self.num_open = 0
        config = SimpleNamespace(kv_cache_tokens=512, tool_call_parser=None, reasoning_parser=None, lora_modules={})
        defaults = SimpleNamespace(max_new_tokens=None)
        self.client = SimpleNamespace(info=SimpleNamespace(config=config, defaults=defaults), tokenizer=self.tokenizer)
        self.llm = SimpleNamespace(config=config, chat_tokens=self.chat_tokens)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> list[int]:
        return list(self.tokenizer("".join(message["content"] for message in messages))["input_ids"])

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        self.num_asked += 1
        self.num_open += 1
        try:
            outcome = self.outcomes.get(prompt_token_ids[0])
            if isinstance(outcome, EngineDeadError):
                raise outcome
            if outcome == "wait":
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1
        return self._output(prompt_token_ids, outcome, "stop")

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float
    ) -> AsyncGenerator[RequestOutput, None]:
        self.num_open += 1
        try:
            for step in itertools.count():
                await asyncio.sleep(0)
                yield self._output(prompt_token_ids, self.outcomes.get(prompt_token_ids[0]) if step == 3 else None)
        finally:
            self.num_open -= 1

    def _output(self, token_ids: Sequence[int], outcome: object, reason: Any = None) -> RequestOutput:
        text, ids = self.tokenizer.decode(list(token_ids)), tuple(token_ids)
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(index=0, text=text, token_ids=ids, finish_reason=reason)],
            finished=reason is not None,
            error=outcome if isinstance(outcome, RayspecError) else None,
        )


def whole_answer(request: Any, engine: Any) -> dict[str, Any]:
    work = respond(request, engine, ("m",), name="7", created=9)
    return msgspec.to_builtins(asyncio.run(asyncio.wait_for(work, 60)))


def streamed_events(request: Any, engine: Any) -> list[dict[str, Any]]:
    """What the events of a stream hold, without the [DONE] of chats. Those of the Responses API are named."""

    async def read() -> bytes:
        found = stream(request, engine, ("m",), name="7", created=9, failure=ApiError.of)
        return b"".join([event async for event in found])

    events = []
    for one in asyncio.run(asyncio.wait_for(read(), 60)).decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = one.rpartition("data: ")
        if data != "[DONE]":
            events.append(json.loads(data))
            assert name == (f"event: {events[-1]['type']}\n" if "sequence_number" in events[-1] else "")
    return events


Read = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, names and arguments of calls


def joined(parser: OutputParser, parts: Sequence[str]) -> Read:
    """What a parser makes of a text that comes in these parts."""
    thought, content, calls = "", "", list[tuple[str, str]]()
    for at, part in enumerate(parts):
        for piece in parser.feed(part, finished=at == len(parts) - 1):
            if isinstance(piece, Thought):
                thought += piece.text
            elif isinstance(piece, str):
                content += piece
            else:
                if piece.name is not None:
                    assert piece.index == len(calls), "the name comes first, and once"
                    calls.append((piece.name, ""))
                calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return thought, content, calls


def require_one_reading(
    make: Callable[[], OutputParser], words: Sequence[str], num_texts: int, *, keeps_text: bool = False
) -> None:
    """Of random texts of these words, wherever they are cut. keeps_text: nothing but calls is left out."""
    for seed in range(num_texts):
        chance = random.Random(seed)
        text = "".join(chance.choices(words, k=chance.randrange(1, 14)))
        whole, cut = joined(make(), [text]), chance.randrange(len(text) + 1)
        assert joined(make(), list(text)) == joined(make(), [text[:cut], text[cut:]]) == whole, repr(text)
        assert whole[2] or not keeps_text or whole[1] == text
