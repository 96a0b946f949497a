"""Speed of a pipeline: the same prompts through several numbers of stages and cohorts, and through one process.

Each case is loaded, warmed up, measured and ended before the next one, so that no other case uses the cores. The model
in one process is measured before and after all cases: its spread shows how steady the machine was. All requests of a
group start at once. The timed part begins after the last prefill and ends when the first request finishes. In it every
cohort has work, as in the middle of a long job.

Each shard has one torch thread, unless the options say otherwise. Two cores run at most two stages at the same time:
cases with more stages measure the queue for the cores rather than the pipeline. A shard that waits for a core counts as
busy. If other programs use the machine, too, stages may be busy for longer than a round.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

import rayspec
from benchmarks.pipeline_result import Case, HopTimes, PipelineRun, TimedPart, pipeline_rows
from rayspec.batch.document_task import summary_prompt
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, describe_environment
from rayspec.bench.run import engine_config, model_folder
from rayspec.bench.workloads import make_workloads
from rayspec.choices import FULL
from rayspec.command.terminal import exit_on_sigterm, hide_progress_bars, load_llm
from rayspec.config import EngineConfig, ParallelOptions, SamplingParams
from rayspec.decode.engine import Engine
from rayspec.pipeline.ray_stages import RayStages
from rayspec.ray_session import ray_session
from rayspec.types import ConfigError, EngineStats, Request, RequestOutput

_CASE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_HOP_BYTES = 16 * 1024
_NUM_LAPS = 100
# Ray's CPU reservation for a shard: small, so that Ray places more stages than cores. `num_threads` sets the threads.
_CPUS_RESERVED = 0.25


def parse_cases(text: str) -> tuple[Case, ...]:
    """Parse cases such as 1x1,2x1,2x4: stages x cohorts. Raises ConfigError."""
    cases = []
    for name in filter(None, map(str.strip, text.split(","))):
        match = _CASE.fullmatch(name)
        if match is None:
            raise ConfigError(f"option 'cases' is {text!r}: {name!r} is not stages x microbatches, as 1x1,2x1,2x4")
        cases.append(Case(stages=int(match[1]), cohorts=int(match[2])))
    if not cases:
        raise ConfigError(f"option 'cases' is {text!r}: name at least one, as 2x4")
    return tuple(dict.fromkeys(cases))


def num_prompts_for(cases: Sequence[Case], batch: int) -> int:
    """Return the least number of prompts that every case splits into groups that fill all its cohorts."""
    return batch * math.lcm(*(case.cohorts for case in cases))


def run_pipeline_bench(options: BenchOptions, cases: Sequence[Case], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every strategy in every case. In `options`, `batch` is the number of sequences in a cohort, and
    `num_prompts` a multiple of `num_prompts_for`.

    Raises ConfigError, CheckpointError, PlacementError, UnsupportedModelError.
    """
    strategies = _strategies(options)
    hide_progress_bars()
    runs: list[PipelineRun] = []
    hops: list[HopTimes] = []
    with model_folder(options.engine, options.widen) as folder, ray_session():
        exit_on_sigterm()
        prompts: list[list[int]] = []
        places = [None, *cases, None]
        for number, case in enumerate(places):
            for strategy in strategies:
                say(f"loading {case.name if case else 'one process'}, {strategy}")
                with load_llm(case_config(options, folder, strategy, case)) as llm:
                    prompts = prompts or _prompts(llm, options)
                    bench = _Measured(_engine_of(llm), options, case)
                    samples = bench.run(prompts)
                    hops += bench.hops() if strategy == strategies[0] else []
                runs.append(PipelineRun(case=case, strategy=strategy, samples=tuple(samples), layers=bench.layers))
                say(f"{number + 1} of {len(places)}: {strategy} {samples[-1].tokens_per_s:.1f} tokens/s")
    return {
        "environment": describe_environment(),
        "options": options.model_dump(mode="json") | {"cases": [one.name for one in cases]},
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "hop_bytes": _HOP_BYTES,
        "hops": [asdict(one) for one in hops],
        "results": [asdict(row) for row in pipeline_rows(runs, hops)],
    }


def case_config(options: BenchOptions, folder: str, strategy: str, case: Case | None) -> EngineConfig:
    """Return options for one process (case None) or stages, with KV cache for all cohorts: nothing is preempted."""
    config = engine_config(options, folder, strategy)
    num_seqs = options.batch * (case.cohorts if case else 1)
    assert config.max_model_len is not None
    per_sequence = config.max_model_len + config.speculation.max_draft_tokens
    parallel = None
    if case is not None:
        base = config.parallel or ParallelOptions(cpus_per_shard=_CPUS_RESERVED)
        parallel = base.replace(stages=case.stages, cohorts=case.cohorts)
    return config.replace(
        max_num_seqs=num_seqs,
        num_threads=config.num_threads or 1,
        kv_cache_tokens=config.kv_cache_tokens or num_seqs * per_sequence,
        parallel=parallel,
    )


def _prompts(llm: rayspec.LLM, options: BenchOptions) -> list[list[int]]:
    workloads = make_workloads(llm, options, template=summary_prompt(options.engine.model))
    return [prompt for workload in workloads for prompt in workload.prompts]


def _engine_of(llm: rayspec.LLM) -> Engine:
    if llm.client.engine is None:
        raise ConfigError(
            f"option 'replicas' is {llm.config.parallel!r}: one replica is measured at a time, leave it 1"
        )
    return llm.client.engine


def _strategies(options: BenchOptions) -> tuple[str, ...]:
    """Return the strategies, each once, with "ar" first: the tokens of the others are compared with its tokens."""
    for name in options.strategies:
        options.engine.speculation.replace(strategy=name, skip=(), static_choice=FULL)  # raises for unknown names
    return tuple(dict.fromkeys([BASELINE, *options.strategies]))


class _Measured:
    """An engine that is being measured in one case."""

    def __init__(self, engine: Engine, options: BenchOptions, case: Case | None) -> None:
        self._engine, self._options, self._case = engine, options, case
        self._num_requests = itertools.count()
        self._stages = engine.stages if isinstance(engine.stages, RayStages) else None

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of decoder layers of each stage; empty in one process."""
        spans = self._stages.replica.spans if self._stages is not None else ()
        return tuple((last - first) // 2 for first, last in spans)

    def run(self, prompts: Sequence[Sequence[int]]) -> list[TimedPart]:
        """Run once to warm up, then return the timed part of each repeat."""
        return [self._repeat(prompts) for _ in range(1 + self._options.repeats)][1:]

    def hops(self) -> list[HopTimes]:
        if self._stages is None or self._case is None:
            return []
        num_stages = self._case.stages
        laps = [self._stages.hops_s(_HOP_BYTES) for _ in range(_NUM_LAPS)]
        links = [[seconds for link in lap for seconds in link] for lap in zip(*laps, strict=True)]
        return [
            HopTimes(
                case=self._case.name,
                link=f"{stage} and {(stage + 1) % num_stages}",
                p50_s=float(np.percentile(seconds, 50)),
                p99_s=float(np.percentile(seconds, 99)),
                num_samples=len(seconds),
            )
            for stage, seconds in enumerate(links)
        ]

    def _repeat(self, prompts: Sequence[Sequence[int]]) -> TimedPart:
        size = self._options.batch * (self._case.cohorts if self._case else 1)
        return TimedPart.total([self._group(prompts[at : at + size]) for at in range(0, len(prompts), size)])

    def _group(self, prompts: Sequence[Sequence[int]]) -> TimedPart:
        """Run all prompts at once to their last token, and return the timed part (see the head of this file)."""
        engine, start = self._engine, copy.copy(self._engine.stats)
        requests = [self._request(prompt) for prompt in prompts]
        for request in requests:
            engine.add(request)
        while num_prefilled(start, engine.stats) < len(requests):
            if engine.step():
                raise ConfigError(
                    f"option 'max_tokens' is {self._options.max_tokens}: the first output is finished before the last "
                    "prompt is read: raise it, or shorten the prompts with 'context'"
                )
        outputs, part = self._timed()
        while engine.has_unfinished:
            outputs += engine.step()
        return replace(part, token_ids=_tokens(requests, outputs))

    def _timed(self) -> tuple[list[RequestOutput], TimedPart]:
        """Step until the first request is finished; return the finished outputs and the timed part."""
        engine, outputs = self._engine, list[RequestOutput]()
        if self._stages is not None:
            self._stages.usage()
        before = copy.copy(engine.stats)
        while not outputs:
            outputs = engine.step()
        usage = self._stages.usage() if self._stages is not None else []
        part = TimedPart(
            seconds=engine.stats.total_s - before.total_s,
            num_tokens=engine.stats.num_generated_tokens - before.num_generated_tokens,
            num_rounds=(engine.stats.num_rounds - before.num_rounds) / self._options.batch,
            busy_s=tuple(use.busy_s for use in usage),
            num_passes=tuple(use.num_passes for use in usage),
        )
        return outputs, part

    def _request(self, prompt: Sequence[int]) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=self._options.max_tokens, ignore_eos=True)
        return Request(request_id=f"request-{next(self._num_requests)}", params=params, prompt_token_ids=prompt)


def num_prefilled(before: EngineStats, now: EngineStats) -> int:
    """Return how many requests got their first token between two statistics. Prefill gives the first token; each round
    gives its accepted draft tokens and one more."""

    def count(stats: EngineStats) -> int:
        return stats.num_generated_tokens - stats.num_rounds - stats.num_accepted_tokens

    return count(now) - count(before)


def _tokens(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> tuple[tuple[int, ...], ...]:
    by_id = {output.request_id: output for output in outputs}
    for output in outputs:
        if output.error is not None:
            raise output.error
    return tuple(tuple(by_id[request.request_id].outputs[0].token_ids) for request in requests)
