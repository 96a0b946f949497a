"""An engine without a model, for what the endpoint itself costs: each sequence gets a token at a fixed pace.

The requests, texts, threads and deliveries around it are those of any engine.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

import rayspec
from rayspec.config import EngineConfig
from rayspec.decode.engine import EngineInfo
from rayspec.decode.output import NewOutput
from rayspec.decode.requests import LiveRequest, ModelInfo, Requests
from rayspec.decode.stages import Progress
from rayspec.decode.work import GenerationDefaults
from rayspec.model.weights import load_tokenizer
from rayspec.serve.model_server import ModelServer
from rayspec.serve.options import LLMConfig
from rayspec.types import EngineLoad, EngineStats, Request

TOKENS_PER_S = 40
_MAX_MODEL_LEN = 4096


class PacedEngine:
    """Speaks as `decode.engine.Engine` does, to a loop. Every sequence gets one token a tick, of a text that goes
    round. tokens_per_s: ticks per second; None: as many as there can be."""

    max_model_len = _MAX_MODEL_LEN
    stages = SimpleNamespace(is_recovering=False, recent_use=lambda: ())

    def __init__(self, config: EngineConfig, tokens_per_s: float | None = TOKENS_PER_S) -> None:
        self.config = config
        self.info = EngineInfo(config=config, max_model_len=_MAX_MODEL_LEN, defaults=GenerationDefaults(), latency=None)
        self.stats = EngineStats()
        self.progress = Progress()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config)
        text = "The quick brown fox jumps over the lazy dog while the agency spends forty million dollars on roads. "
        self._tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._requests = Requests(
            model=ModelInfo(
                vocab_size=len(self.tokenizer),
                eos_token_ids=(),
                max_model_len=_MAX_MODEL_LEN,
                tokenizer=self.tokenizer,
            ),
            num_slots=2**31,
            clock=time.perf_counter,
        )
        self._period_s = 1 / tokens_per_s if tokens_per_s else 0.0
        self._next_s = 0.0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(num_running=len(self._requests), num_waiting=0, kv_used_tokens=0, kv_total_tokens=1)

    @property
    def has_unfinished(self) -> bool:
        return bool(len(self._requests))

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = self._requests.admit(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            live = self._requests[request_id]
            for sequence in live.sequences:
                sequence.finish_reason = "abort"
            self._requests.new_output(live)

    def wake(self) -> None:
        """Do nothing: a tick is short."""

    def advance(self) -> list[NewOutput]:
        time.sleep(max(0.0, self._next_s - time.perf_counter()))
        self._next_s = max(self._next_s + self._period_s, time.perf_counter())
        for live in self._requests.values():
            self._grow(live)
        return self._requests.outputs()

    def ping(self) -> None:
        """There are no stages."""

    def shutdown(self) -> None:
        """Nothing to end."""

    def _grow(self, live: LiveRequest) -> None:
        for sequence in live.sequences:
            if not sequence.finished:
                sequence.commit([self._tokens[sequence.num_tokens % len(self._tokens)]])
                self.stats.num_generated_tokens += 1
                sequence.metrics.first_token_s = sequence.metrics.first_token_s or time.perf_counter()
                if live.finished:
                    sequence.metrics.finished_s = time.perf_counter()


def paced_llm(tokens_per_s: float | None = TOKENS_PER_S, **options: Any) -> rayspec.LLM:
    """An LLM of the bundled model's tokenizer over such an engine."""
    with _paced(tokens_per_s):
        return rayspec.LLM("demo", **options)


class PacedModelServer(ModelServer):
    """A replica over such an engine."""

    def __init__(self, config: LLMConfig, **options: Any) -> None:
        with _paced():
            super().__init__(config, **options)


def _paced(tokens_per_s: float | None = TOKENS_PER_S) -> AbstractContextManager[Any]:
    """An LLM that is made meanwhile has such an engine."""
    load_engine = partial(PacedEngine, tokens_per_s=tokens_per_s)
    return patch.multiple("rayspec.llm", load_engine=load_engine)
