"""The contenders of a benchmark: programs that complete prompts, above all the strategies of our engine."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from typing_extensions import Self

from rayspec.bench.result import Run
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.strategies.by_name import make_strategy
from rayspec.types import EngineStats, PlanRecord, Request, RequestOutput

# A run under way: the generator yields the number of tokens so far after each increment, and returns the run.
Writing: TypeAlias = Generator[int, None, Run]

_COUNTS = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
_TIMES = ("draft_s", "verify_s", "optimise_s", "prefill_s", "total_s")


class Contender(Protocol):
    """Something that completes prompts."""

    @property
    def device(self) -> torch.device | None:
        """Device that the contender runs on; None if it runs in other processes."""

    @property
    def used(self) -> EngineStats:
        """Statistics of the work since `warm_up`."""

    def forget(self) -> None:
        """Forget everything learned from text so far."""

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None: ...

    def write(self, prompts: Sequence[list[int]], max_tokens: int) -> Writing:
        """Complete the prompts in increments, with no work between them. Raises the error of a failed prompt."""


class Ours:
    """A strategy of our engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = itertools.count()
        self._before = _Snapshot.of(engine.stats)

    @property
    def device(self) -> torch.device | None:
        config = self.engine.config
        return torch.device(config.device) if config.parallel is None else None

    def forget(self) -> None:
        """Replace the strategy by a new one. Only strategies with a latency model learn; the others stay unchanged."""
        engine = self.engine
        if engine.latency is not None:
            engine.replace_strategy(make_strategy(engine.config, engine.stages.num_sublayers, engine.latency))

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        finish(self.write(prompts[:1], max_tokens))
        self._before = _Snapshot.of(self.engine.stats)

    @property
    def used(self) -> EngineStats:
        return self._before.until(self.engine.stats)

    def write(self, prompts: Sequence[list[int]], max_tokens: int) -> Writing:
        """Yield after each step. A model in other processes runs without a pause: the whole run is one increment."""
        engine, stats = self.engine, self.engine.stats
        before = copy.copy(stats)
        requests = [self._request(prompt, max_tokens) for prompt in prompts]
        for request in requests:
            engine.add(request)
        outputs: dict[str, RequestOutput] = {}
        prefill_cpu_s = left_s = 0.0
        while engine.has_unfinished:
            cpu_s, prefill_s, total_s = time.process_time(), stats.prefill_s, stats.total_s
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                outputs[output.request_id] = output
            left_s += self._settle()
            if stats.prefill_s > prefill_s:
                share = min(1.0, (stats.prefill_s - prefill_s) / (stats.total_s - total_s))
                prefill_cpu_s += share * (time.process_time() - cpu_s)
            if self.device is not None:
                yield stats.num_generated_tokens - before.num_generated_tokens
        return Run(
            seconds=stats.total_s - before.total_s + left_s,
            prefill_s=stats.prefill_s - before.prefill_s + left_s,
            prefill_cpu_s=prefill_cpu_s,
            token_ids=[list(outputs[request.request_id].outputs[0].token_ids) for request in requests],
        )

    def _settle(self) -> float:
        """Wait for the GPU before another contender runs, and return the seconds. Only prefill leaves launches behind:
        a round ends when the host has its tokens."""
        device = self.device
        if device is None or device.type != "cuda":
            return 0.0
        started = time.perf_counter()
        torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def _request(self, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return Request(request_id=f"bench-{next(self._num_requests)}", params=params, prompt_token_ids=prompt)


def next_piece(writing: Writing) -> int | Run:
    """Run the next increment and return the number of tokens so far, or the run if it is complete."""
    try:
        return next(writing)
    except StopIteration as end:
        run: Run = end.value
        return run


def finish(writing: Writing) -> Run:
    """Run all remaining increments and return the run."""
    while not isinstance(piece := next_piece(writing), Run):
        pass
    return piece


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The statistics of an engine at one moment. Plan records keep growing, so each is stored with a copy."""

    stats: EngineStats
    plans: list[tuple[PlanRecord, PlanRecord]]

    @classmethod
    def of(cls, stats: EngineStats) -> Self:
        return cls(copy.copy(stats), [(record, copy.copy(record)) for record in stats.plans])

    def until(self, now: EngineStats) -> EngineStats:
        """Return the statistics since the snapshot, with the plans that were in use since then."""
        changed = {name: getattr(now, name) - getattr(self.stats, name) for name in (*_COUNTS, *_TIMES)}
        plans = [self._since(record) for record in now.plans]
        return EngineStats(**changed, gate_reason=now.gate_reason, plans=[one for one in plans if one.num_tokens])

    def _since(self, record: PlanRecord) -> PlanRecord:
        then = next((copied for known, copied in self.plans if known is record), None)
        if then is None:
            return record
        return replace(
            record,
            num_tokens=record.num_tokens - then.num_tokens,
            sequence_s=record.sequence_s - then.sequence_s,
            num_accepted_tokens=record.num_accepted_tokens - then.num_accepted_tokens,
            num_tested_tokens=record.num_tested_tokens - then.num_tested_tokens,
        )
