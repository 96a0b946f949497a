"""An engine for coroutines: many coroutines submit prompts, and one engine loop runs all prompts together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

import rayspec
from rayspec.config import SamplingParams
from rayspec.decode.chat import chat_template, conversation_tokens
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.decode.output import PieceQueue
from rayspec.decode.progress import Progress
from rayspec.pipeline.ray_stages import RayStages, StageUse
from rayspec.pool.pool import Replicas
from rayspec.prompts import text_tokens
from rayspec.types import ConfigError, EngineLoad, EngineStats, Request, RequestOutput


class AsyncEngine:
    """The engine of an LLM, for coroutines."""

    def __init__(self, llm: rayspec.LLM) -> None:
        self.llm = llm
        self.tokenizer: PreTrainedTokenizerBase = llm.tokenizer
        self._loop = llm.loop
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """The most prompt and output tokens of a request together."""
        return self.llm.engine.max_model_len

    @property
    def max_new_tokens(self) -> int | None:
        """The checkpoint's length of an output for which nobody states one; None: it states none."""
        return self.llm.engine.defaults.max_new_tokens

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def stats(self) -> EngineStats:
        return self.llm.stats

    @property
    def load(self) -> EngineLoad:
        return self.llm.engine.load

    @property
    def progress(self) -> Progress:
        """Whether the thread that runs the engine is stuck."""
        return self.llm.engine.progress

    @property
    def is_recovering(self) -> bool:
        """Whether lost shards are being replaced, or no replica is up. Meanwhile the engine makes no progress. If
        recovery fails, the engine ends by itself."""
        engine = self.llm.engine
        if isinstance(engine, Replicas):
            return engine.is_recovering
        return isinstance(engine.stages, RayStages) and engine.stages.is_recovering

    def stage_use(self) -> list[StageUse]:
        """Return how busy the stages of a pipeline were since the last call. The list is empty for a model in one
        process and for several replicas."""
        engine = self.llm.engine
        stages = None if isinstance(engine, Replicas) else engine.stages
        return list(stages.recent_use()) if isinstance(stages, RayStages) else []

    @property
    def death(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs."""
        return self._loop.death

    def tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a text. Raises RequestError."""
        return text_tokens(prompt, self.tokenizer)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the prompt tokens of a conversation, see `conversation_tokens`. Raises InvalidMessagesError;
        ConfigError without a template."""
        if not self.has_chat:
            raise ConfigError(f"the tokenizer of {self.llm.config.model!r} has no chat template: give it plain prompts")
        template = chat_template(self.tokenizer)
        return conversation_tokens(messages, self.tokenizer, template, add_generation_prompt=add_generation_prompt)

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        """Run a request and return its finished output. An error of the request is in `error` of the output. Raises
        EngineDeadError. Cancelling the call aborts the request."""
        return await asyncio.wrap_future(self._loop.submit(self._request(prompt_token_ids, params)))

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield new output as it is generated, see RequestOutput. interval_s: outputs that follow each other faster are
        joined, see PieceQueue. Raises EngineDeadError. Closing the generator aborts the request."""
        pieces = PieceQueue(interval_s)
        future = self._loop.submit(self._request(prompt_token_ids, params, stream=True), pieces.put)
        future.add_done_callback(pieces.end)
        try:
            async for piece in pieces.read():
                yield piece
        finally:
            future.cancel()

    async def ping(self) -> None:
        """Wait until the engine's loop and all processes of the model have answered. Raises EngineDeadError and
        StageLostError. A loop that is stuck never answers: the caller needs a deadline."""
        await asyncio.wrap_future(self._loop.ping())

    def _request(self, prompt_token_ids: Sequence[int], params: SamplingParams, *, stream: bool = False) -> Request:
        name = str(next(self._numbers))
        return Request(request_id=name, params=params, prompt_token_ids=prompt_token_ids, stream=stream)

    def stop(self) -> None:
        """End the loop and the model's processes. Unfinished requests fail with EngineDeadError."""
        self.llm.shutdown()
