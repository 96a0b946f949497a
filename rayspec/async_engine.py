"""An engine for coroutines: many coroutines submit prompts, and one engine loop runs all prompts together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

import rayspec
from rayspec.config import SamplingParams
from rayspec.decode.output import PieceQueue
from rayspec.prompts import text_tokens
from rayspec.types import Request, RequestOutput


class AsyncEngine:
    """The engine of an LLM, for coroutines. client: says what the engine does, and whether it lives."""

    def __init__(self, llm: rayspec.LLM) -> None:
        self.llm = llm
        self.tokenizer: PreTrainedTokenizerBase = llm.tokenizer
        self.client = llm.client
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """The most prompt and output tokens of a request together."""
        return self.client.info.max_model_len

    @property
    def max_new_tokens(self) -> int | None:
        """The checkpoint's length of an output for which nobody states one; None: it states none."""
        return self.client.info.defaults.max_new_tokens

    def tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a text. Raises RequestError."""
        return text_tokens(prompt, self.tokenizer)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt tokens of a conversation, see `conversation_tokens`. Raises InvalidMessagesError;
        ConfigError without a template."""
        return self.llm.chat_tokens(messages, add_generation_prompt=add_generation_prompt)

    async def run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, background: bool = False
    ) -> RequestOutput:
        """Run a request and return its finished output. An error of the request is in `error` of the output. Raises
        EngineDeadError. Cancelling the call aborts the request. background: other requests go first."""
        request = self._request(prompt_token_ids, params, background=background)
        return await asyncio.wrap_future(self.client.submit(request))

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output as it is generated, see RequestOutput. interval_s: outputs that follow each other faster are
        joined, see PieceQueue. Raises EngineDeadError. Closing the generator aborts the request."""
        pieces = PieceQueue(interval_s)
        future = self.client.submit(self._request(prompt_token_ids, params, stream=True), pieces.put)
        future.add_done_callback(pieces.end)
        try:
            async for piece in pieces.read():
                yield piece
        finally:
            future.cancel()

    async def ping(self) -> None:
        """Wait until the engine's loop and all processes of the model have answered. Raises EngineDeadError and
        StageLostError. A loop that is stuck never answers: the caller needs a deadline."""
        await asyncio.wrap_future(self.client.ping())

    def _request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        background: bool = False,
    ) -> Request:
        return Request(
            request_id=str(next(self._numbers)),
            params=params,
            prompt_token_ids=prompt_token_ids,
            stream=stream,
            background=background,
        )

    def stop(self) -> None:
        """End the loop and the model's processes. Unfinished requests fail with EngineDeadError."""
        self.llm.shutdown()
