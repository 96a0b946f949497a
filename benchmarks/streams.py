"""Streams of prompts whose domain changes: how soon a strategy follows. After KNN-SSD, section 4."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from rayspec.batch.document_task import summary_prompt
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import Sample
from rayspec.bench.run import empty_result, loaded_contenders, take_turns, workload_result
from rayspec.bench.workloads import Workload, make_workloads
from rayspec.types import ConfigError


def run_streams(options: BenchOptions, ratios: Sequence[float], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a stream for each ratio. Contenders forget what they learned before each repeat. The result has the form
    of `rayspec bench`, and a `mix_ratio` in each workload. Raises ConfigError, and the errors of `run_bench`."""
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"option 'ratios' has {ratio}: a ratio lies between 0 and 1")
    with loaded_contenders(options, say) as (llm, contenders):
        result = empty_result(options, llm)
        domains = make_workloads(llm, options, template=summary_prompt(options.engine.model))
        for ratio in ratios:
            stream = mixed(domains, ratio, options.num_prompts, seed=options.workload_seed)
            samples: dict[str, list[Sample]] = {name: [] for name in contenders}
            for _ in range(options.repeats):
                for name, once in take_turns(contenders, stream, options.replace(repeats=1), say).items():
                    samples[name] += once
            result["workloads"].append(workload_result(stream, samples, contenders) | {"mix_ratio": ratio})
    return result


def mixed(workloads: Sequence[Workload], ratio: float, num_prompts: int, *, seed: int) -> Workload:
    """Return a stream of prompts, which begins in the first workload's domain. No prompt is used twice.

    Before each further prompt the domain changes with probability `ratio`. All other domains are equally likely. Raises
    ConfigError if a domain runs out of prompts, or there is no other domain to change to.
    """
    waiting = {workload.domain: iter(workload.prompts) for workload in workloads if workload.prompts}
    if ratio > 0 and len(waiting) < 2:
        raise ConfigError(f"option 'ratios' has {ratio}, and there is no second domain: give another --input")
    rng, domain = random.Random(seed), next(iter(waiting))
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        if prompts and rng.random() < ratio:
            domain = rng.choice([other for other in waiting if other != domain])
        prompt = next(waiting[domain], None)
        if prompt is None:
            raise ConfigError(
                f"option 'num_prompts' is {num_prompts}, but after {len(prompts)} prompts of the stream there are no "
                f"more of {domain!r}: lower it, or give an input that has more"
            )
        prompts.append(prompt)
    return Workload(domain=f"mix-{ratio:g}", prompts=prompts, context=workloads[0].context)
