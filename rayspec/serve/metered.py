"""An engine that measures its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import rayspec
from rayspec.async_engine import AsyncEngine
from rayspec.config import SamplingParams
from rayspec.serve.metrics import EngineMetrics
from rayspec.types import RequestOutput


class MeteredEngine(AsyncEngine):
    """Records the metrics of every request, also of requests that fail."""

    def __init__(self, llm: rayspec.LLM, metrics: EngineMetrics) -> None:
        super().__init__(llm)
        self._metrics = metrics

    async def run(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        with self._metrics.request() as request:
            output = await super().run(prompt_token_ids, params)
            request.observe(output)
        return output

    async def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, interval_s: float = 0.0
    ) -> AsyncGenerator[RequestOutput, None]:
        with self._metrics.request() as request:
            async with aclosing(super().stream(prompt_token_ids, params, interval_s)) as outputs:
                async for output in outputs:
                    request.observe(output)
                    yield output
