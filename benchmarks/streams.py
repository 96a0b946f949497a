"""Streams of prompts whose domain changes: how soon a strategy follows. After KNN-SSD, section 4."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from rayspec.bench.options import BenchOptions
from rayspec.bench.run import run_bench
from rayspec.bench.workloads import Workload
from rayspec.types import ConfigError


def run_streams(options: BenchOptions, ratios: Sequence[float], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a stream for each ratio. Contenders forget what they learned before each repeat. The result has the form
    of `rayspec bench`, and a `mix_ratio` in each workload. Raises ConfigError, and the errors of `run_bench`."""
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"option 'ratios' has {ratio}: a ratio lies between 0 and 1")

    def streams(domains: list[Workload]) -> list[Workload]:
        return [mixed(domains, ratio, options.num_prompts, seed=options.workload_seed) for ratio in ratios]

    result = run_bench(options, say, arranged=streams, forgets=True)
    for workload, ratio in zip(result["workloads"], ratios, strict=True):
        workload["mix_ratio"] = ratio
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
