"""The baseline that users know: `generate` of transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rayspec.bench.contenders import Writing
from rayspec.bench.result import Run
from rayspec.config import EngineConfig
from rayspec.model.fast_dtype import in_fast_dtype
from rayspec.model.weights import resolve_device
from rayspec.types import EngineStats


class HfGenerate:
    """`model.generate(do_sample=False)` with transformers' default attention; batches are padded on the left."""

    def __init__(self, config: EngineConfig, *, batch: int) -> None:
        self._batch = batch
        self.device = resolve_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        )
        self._model: Any = in_fast_dtype(model.to(self.device).eval(), config)
        eos = self._model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        pad = self._model.generation_config.pad_token_id
        self._pad = pad if pad is not None else min(self._eos, default=0)
        self._prefill_s = self._prefill_cpu_s = 0.0

    def forget(self) -> None:
        """Do nothing: `generate` learns nothing from text."""

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Complete one batch, then measure the prefill time of all prompts."""
        self._complete(prompts[: self._batch], max_tokens)
        started, started_cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), self._batch):
            self._complete(prompts[first : first + self._batch], 1)
        self._prefill_s, self._prefill_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu

    @property
    def used(self) -> EngineStats:
        """Empty statistics: `generate` counts nothing."""
        return EngineStats()

    def write(self, prompts: Sequence[list[int]], max_tokens: int) -> Writing:
        """Yield after each batch of prompts."""
        seconds = 0.0
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), self._batch):
            started = time.perf_counter()
            outputs += self._complete(prompts[first : first + self._batch], max_tokens)
            seconds += time.perf_counter() - started
            yield sum(map(len, outputs))
        return Run(seconds=seconds, prefill_s=self._prefill_s, prefill_cpu_s=self._prefill_cpu_s, token_ids=outputs)

    @torch.inference_mode()
    def _complete(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = [[self._pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
        )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(tokens) if token in self._eos), len(tokens) - 1)
        return tokens[: end + 1]
