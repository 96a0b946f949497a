"""An engine for coroutines: many coroutines submit prompts, and one engine loop runs all prompts together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

import rayspec
from rayspec.config import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.output import PieceQueue
from rayspec.decode.progress import Progress
from rayspec.decode.stages import StageUse
from rayspec.prompts import text_tokens
from rayspec.types import EngineLoad, EngineStats, Request, RequestOutput


class AsyncEngine:
    """The engine of an LLM, for coroutines."""

    def __init__(self, llm: rayspec.LLM) -> None:
        self.llm = llm
        self.tokenizer: PreTrainedTokenizerBase = llm.tokenizer
        self._client = llm.client
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """The most prompt and output tokens of a request together."""
        return self._client.info.max_model_len

    @property
    def max_new_tokens(self) -> int | None:
        """The checkpoint's length of an output for which nobody states one; None: it states none."""
        return self._client.info.defaults.max_new_tokens

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def stats(self) -> EngineStats:
        return self.llm.stats

    @property
    def load(self) -> EngineLoad:
        return self._client.load

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""
        return self._client.progress

    @property
    def is_recovering(self) -> bool:
        """See `Client.is_recovering`."""
        return self._client.is_recovering

    def stage_use(self) -> Sequence[StageUse]:
        """See `Client.stage_use`."""
        return self._client.stage_use()

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs."""
        return self._client.death

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
        return await asyncio.wrap_future(self._client.submit(request))

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output as it is generated, see RequestOutput. interval_s: outputs that follow each other faster are
        joined, see PieceQueue. Raises EngineDeadError. Closing the generator aborts the request."""
        pieces = PieceQueue(interval_s)
        future = self._client.submit(self._request(prompt_token_ids, params, stream=True), pieces.put)
        future.add_done_callback(pieces.end)
        try:
            async for piece in pieces.read():
                yield piece
        finally:
            future.cancel()

    async def ping(self) -> None:
        """Wait until the engine's loop and all processes of the model have answered. Raises EngineDeadError and
        StageLostError. A loop that is stuck never answers: the caller needs a deadline."""
        await asyncio.wrap_future(self._client.ping())

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
