"""The contenders of a benchmark, which complete prompts: strategies of our engine, and transformers' generate."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from rayspec.bench.result import Sample
from rayspec.config import EngineConfig, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.model.weights import in_fast_dtype, load_model, resolve_device
from rayspec.strategies.by_name import make_strategy
from rayspec.types import EngineStats, Request, RequestOutput

_COUNTS = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
_TIMES = ("draft_s", "verify_s", "optimise_s", "prefill_s", "total_s")

# Work under way: the generator yields the number of tokens so far after each increment, and returns what it completed.
Writing: TypeAlias = Generator[int, None, Sample]


class Ours:
    """A strategy of our engine, which completes prompts in increments. Raises the error of a failed prompt."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = itertools.count()
        self._remember()

    def _remember(self) -> None:
        """Keep the statistics as they are. Plan records keep growing, so each is kept with a copy."""
        self._before = copy.copy(self.engine.stats)
        self._plans_before = [(record, copy.copy(record)) for record in self.engine.stats.plans]

    @property
    def used(self) -> EngineStats:
        """Statistics since the warm-up, with the plans that were in use since then."""
        now = self.engine.stats
        changed = {name: getattr(now, name) - getattr(self._before, name) for name in (*_COUNTS, *_TIMES)}
        counts, plans = ("num_tokens", "sequence_s", "num_accepted_tokens", "num_tested_tokens"), list(now.plans)
        for at, record in enumerate(now.plans):
            for then in [copied for known, copied in self._plans_before if known is record]:
                since = {name: getattr(record, name) - getattr(then, name) for name in counts}
                plans[at] = replace(record, **since)
        return EngineStats(**changed, gate_reason=now.gate_reason, plans=[one for one in plans if one.num_tokens])

    def forget(self) -> None:
        """Replace the strategy by a new one. Only strategies with a latency model learn; the others stay unchanged."""
        engine = self.engine
        if engine.latency is not None:
            engine.replace_strategy(make_strategy(engine.config, engine.stages.num_sublayers, engine.latency))

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        for _ in self.write(prompts[:1], max_tokens):
            pass
        self._remember()

    def write(self, prompts: Sequence[list[int]], max_tokens: int) -> Writing:
        """Yield after each step. A model in other processes runs without a pause: the whole run is one increment.
        Nothing is copied from outputs of an earlier run, which are those of the same prompts."""
        self.engine.forget_texts()
        engine, stats = self.engine, self.engine.stats
        device = torch.device(engine.config.device) if engine.config.parallel is None else None
        before = copy.copy(stats)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        names = [f"bench-{next(self._num_requests)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(Request(request_id=name, params=params, prompt_token_ids=prompt))
        outputs: dict[str, RequestOutput] = {}
        left_s = 0.0
        while engine.has_unfinished:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                outputs[output.request_id] = output
            if device is not None and device.type == "cuda":
                # No other contender runs before the GPU is done. Only prefill leaves launches behind.
                started = time.perf_counter()
                torch.cuda.synchronize(device)
                left_s += time.perf_counter() - started
            if device is not None:
                yield stats.num_generated_tokens - before.num_generated_tokens
        return Sample(
            seconds=stats.total_s - before.total_s + left_s,
            prefill_s=stats.prefill_s - before.prefill_s + left_s,
            token_ids=[list(outputs[name].outputs[0].token_ids) for name in names],
        )


class HfGenerate:
    """`model.generate(do_sample=False)` with transformers' default attention; batches are padded on the left."""

    used = EngineStats()  # empty: `generate` counts nothing

    def __init__(self, config: EngineConfig, *, batch: int) -> None:
        self._batch = batch
        self._device = resolve_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._model: Any = in_fast_dtype(load_model(config), config)
        eos = self._model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        pad = self._model.generation_config.pad_token_id
        self._pad = pad if pad is not None else min(self._eos, default=0)
        self._prefill_s = 0.0

    def forget(self) -> None:
        """Do nothing: `generate` learns nothing from text."""

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Complete one batch, then measure the prefill time of all prompts."""
        self._complete(prompts[: self._batch], max_tokens)
        started = time.perf_counter()
        for first in range(0, len(prompts), self._batch):
            self._complete(prompts[first : first + self._batch], 1)
        self._prefill_s = time.perf_counter() - started

    def write(self, prompts: Sequence[list[int]], max_tokens: int) -> Writing:
        """Yield after each batch of prompts."""
        seconds, outputs = 0.0, list[list[int]]()
        for first in range(0, len(prompts), self._batch):
            started = time.perf_counter()
            outputs += self._complete(prompts[first : first + self._batch], max_tokens)
            seconds += time.perf_counter() - started
            yield sum(map(len, outputs))
        return Sample(seconds=seconds, prefill_s=self._prefill_s, token_ids=outputs)

    @torch.inference_mode()
    def _complete(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = [[self._pad] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
        )
        rows = output[:, width:].tolist()
        ends = (next((index for index, token in enumerate(row) if token in self._eos), len(row)) for row in rows)
        return [row[: end + 1] for row, end in zip(rows, ends, strict=True)]


Contender: TypeAlias = Ours | HfGenerate
