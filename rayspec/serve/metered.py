"""An engine whose requests are measured, for those who only want an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from transformers import PreTrainedTokenizerBase

from rayspec.async_engine import AsyncEngine
from rayspec.config import SamplingParams
from rayspec.serve.metrics import EngineMetrics
from rayspec.types import RequestOutput


class MeteredEngine:
    """Runs and streams as the engine does, and tells the metrics of every request."""

    def __init__(self, engine: AsyncEngine, metrics: EngineMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def has_chat(self) -> bool:
        return self._engine.has_chat

    def tokens(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        return self._engine.tokens(prompt)

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        """See AsyncEngine.run."""
        with self._metrics.request() as request:
            output = await self._engine.run(prompt_token_ids, params)
            request.observe(output)
        return output

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """See AsyncEngine.stream."""
        with self._metrics.request() as request:
            async with aclosing(self._engine.stream(prompt_token_ids, params)) as outputs:
                async for output in outputs:
                    request.observe(output)
                    yield output
