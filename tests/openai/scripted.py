"""An engine that does as it is told, with the tokenizer of the bundled model."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rayspec import SamplingParams
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.prompts import Rendering
from rayspec.types import CompletionOutput, RayspecError, RequestOutput
from tests.demo_model import demo_tokenizer


class ScriptedEngine:
    """Answers a prompt with its own tokens, or as `outcomes` says of its first token; "wait" for good. A stream repeats
    the tokens for ever, or up to its outcome."""

    tokenizer = demo_tokenizer()
    max_model_len = 512
    max_new_tokens = None
    kv_cache_tokens = 512
    adapters = ()
    llm = SimpleNamespace(config=SimpleNamespace(tool_call_parser=None, reasoning_parser=None))

    def __init__(self, outcomes: Mapping[int, RayspecError | str] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.num_asked = self.num_open = 0

    def tokens(self, prompt: Any) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> list[int]:
        return self.tokens("".join(message["content"] for message in messages))

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
