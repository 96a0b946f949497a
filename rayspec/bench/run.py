"""Compare strategies, and transformers generate, on the same prompts in the same run, with interleaved repeats."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import rayspec
from rayspec import demo
from rayspec.batch.document_task import summary_prompt
from rayspec.bench.contenders import Completed, Contender, Cost, HfGenerate, Ours, measured
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF, Sample, bench_row
from rayspec.bench.workloads import Workload, make_workloads
from rayspec.choices import FULL
from rayspec.command.environment import describe_environment
from rayspec.command.loading import hide_progress_bars, load_llm
from rayspec.command.terminal import exit_on_sigterm
from rayspec.config import EngineConfig, Strategy
from rayspec.decode.engine import Engine
from rayspec.demo.widen import widen
from rayspec.local_engine import engine_like
from rayspec.model.weights import load_model, load_tokenizer
from rayspec.types import ConfigError

_WARM_UP_TOKENS = 16
_ALL = "all"
_WITH_SAVED_PLANS = ("self-sd", "knn-ssd")

Say = Callable[[str], None]


def run_bench(
    options: BenchOptions, say: Say, *, keep: Callable[[dict[str, Any]], None] = lambda result: None
) -> dict[str, Any]:
    """Load every contender. Then, for each workload, warm up all contenders and measure them interleaved.

    keep: called after each workload with the result so far. Raises ConfigError, CheckpointError, and the error of a
    failed prompt.
    """
    names = strategy_names(options)
    hide_progress_bars()
    exit_on_sigterm()  # so that the folder of a widened model is removed
    found: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": {}, "options": options.as_json(), "workloads": found}
    with model_folder(options.engine, options.widen) as folder, ExitStack() as stack:
        say("loading")
        configs = {name: engine_config(options, folder, BASELINE if name == HF else name) for name in names}
        ours = {name: config for name, config in configs.items() if name != HF}
        # The strategy with the most quantised copies of weights, so that the other engines can share them.
        first = max(ours, key=lambda name: len(ours[name].speculation.draft_weights))
        llm = stack.enter_context(load_llm(ours[first]))
        loaded = _one_engine(llm)
        result |= {"environment": describe_environment(), "dtype": loaded.config.dtype}
        workloads = make_workloads(llm, options.workloads, template=summary_prompt(options.engine.model))
        contenders: dict[str, Contender] = {}
        for name, config in configs.items():
            if name == HF:
                contenders[name] = HfGenerate(config, batch=options.batch)
            elif name == first:
                contenders[name] = Ours(loaded)
            else:
                engine = engine_like(loaded, config)
                contenders[name] = Ours(engine or _one_engine(stack.enter_context(load_llm(config))))
        for workload in workloads:
            if not workload.prompts:
                say(f"{workload.name}: left out, as all of its {workload.num_left_out} prompts are longer")
                continue
            samples = take_turns(contenders, workload, options, say)
            found.append(
                {
                    "name": workload.name,
                    "domain": workload.domain,
                    "context": workload.context,
                    "mix_ratio": workload.mix_ratio,
                    "num_left_out": workload.num_left_out,
                    "prompt_tokens": [len(prompt) for prompt in workload.prompts],
                    "prompt_domains": workload.domains,
                    "results": [bench_row(name, samples, one.used) for name, one in contenders.items()],
                }
            )
            keep(result)
    return result


def strategy_names(options: BenchOptions) -> list[str]:
    """Return the names, with "all" expanded and the baseline first. Raises ConfigError. Its message names the nearest
    strategy for an unknown name, or the option that a strategy lacks."""
    asked = [one for name in options.strategies for one in (_all_strategies(options) if name == _ALL else (name,))]
    for name in asked:
        if name != HF:
            engine_config(options, options.engine.model, name)
    _check_plans_are_used(asked, options)
    return list(dict.fromkeys([BASELINE, *asked, *([HF] if options.hf else [])]))


def _all_strategies(options: BenchOptions) -> list[str]:
    """Return all strategies whose required options are set."""
    missing = {name for name in _WITH_SAVED_PLANS if _plans_of(options, name) is None}
    if not options.engine.speculation.skip and options.engine.speculation.static_choice == FULL:
        missing.add("static")
    return [name for name in get_args(Strategy) if name not in missing]


def _plans_of(options: BenchOptions, strategy: str) -> str | None:
    """Return a strategy's file of saved plans: from `plans`, else `warm_start` if the strategy requires plans."""
    of_all = options.engine.speculation.warm_start if strategy in _WITH_SAVED_PLANS else None
    return options.plans.get(strategy, of_all)


def _check_plans_are_used(names: Sequence[str], options: BenchOptions) -> None:
    """Check that a strategy uses each file of saved plans; otherwise raise ConfigError."""
    for name, file in options.plans.items():
        if name not in names:
            raise ConfigError(f"option 'plans' has {file!r} for {name!r}, which does not run: add it to 'strategies'")
    of_all = options.engine.speculation.warm_start
    if of_all is not None and not set(names) & set(_WITH_SAVED_PLANS):
        raise ConfigError(
            f"option 'warm_start' is {of_all!r}, and none of the strategies {', '.join(names)} needs saved plans: add "
            f"{' or '.join(_WITH_SAVED_PLANS)}, or say for which one they are with 'plans'"
        )


def _one_engine(llm: rayspec.LLM) -> Engine:
    if llm.client.engine is None:
        raise ConfigError("option 'replicas' is more than 1: one replica is measured at a time, leave it out")
    return llm.client.engine


def take_turns(
    contenders: Mapping[str, Contender], workload: Workload, options: BenchOptions, say: Say
) -> dict[str, list[Sample]]:
    """Return the samples of each contender, repeat by repeat. Contenders forget what they learned before each workload,
    and in a stream before each repeat."""
    for name, contender in contenders.items():
        say(f"{workload.name}: warming up {name}")
        contender.forget()
        contender.warm_up(workload.prompts, _WARM_UP_TOKENS)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for repeat in range(options.repeats):
        if workload.is_stream:
            for contender in contenders.values():
                contender.forget()
        for name, sample in _side_by_side(contenders, workload, options.max_tokens, random.Random(repeat)).items():
            samples[name].append(sample)
            done = f"{workload.name}: repeat {repeat + 1} of {options.repeats}"
            say(f"{done}: {name} {sample.tokens_per_s:.1f} tokens/s")
    return samples


def _side_by_side(
    contenders: Mapping[str, Contender], workload: Workload, max_tokens: int, rng: random.Random
) -> dict[str, Sample]:
    """Run all contenders interleaved: the contender with the fewest tokens so far runs its next increment. All are at
    about the same place of the text, so a change of the machine's speed within seconds affects all of them. Ties are
    broken at random, so that the caches that one contender leaves behind favour no other."""
    writings = {name: contender.write(workload.prompts, max_tokens) for name, contender in contenders.items()}
    num_written = dict.fromkeys(contenders, 0)
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    samples: dict[str, Sample] = {}

    def increment(name: str) -> int | Completed:
        try:
            return next(writings[name])
        except StopIteration as end:
            completed: Completed = end.value
            return completed

    while num_written:
        least = min(num_written.values())
        name = rng.choice([name for name, num_tokens in num_written.items() if num_tokens == least])
        written, cost = measured(lambda: increment(name))  # noqa: B023 - called at once
        costs[name].append(cost)
        if isinstance(written, Completed):
            samples[name] = _sample(written, costs[name] if contenders[name].device is not None else [])
            del num_written[name]
        else:
            num_written[name] = written
    return samples


def _sample(completed: Completed, costs: Sequence[Cost]) -> Sample:
    """Return the sample of a contender. costs: of its increments; empty if it ran in other processes."""
    cpu_s, waits = sum(cost.cpu_s for cost in costs), [cost.waited_s for cost in costs if cost.waited_s is not None]
    is_known = len(waits) == len(costs) > 0 and cpu_s > 0
    return Sample(
        token_ids=completed.token_ids,
        seconds=completed.seconds,
        prefill_s=completed.prefill_s,
        decode_cpu_s=cpu_s - completed.prefill_cpu_s if costs else None,
        quiet_share=cpu_s / (cpu_s + sum(waits)) if is_known else None,
    )


@contextmanager
def model_folder(config: EngineConfig, factor: int) -> Iterator[str]:
    """Yield the model's own path, or a temporary folder with the widened model. Its files are the same every time, so
    that saved plans and saved latency profiles match it again."""
    place = demo.local_path(config.model)
    if factor == 1:
        yield place
        return
    local = config.replace(model=place)
    with tempfile.TemporaryDirectory(prefix="rayspec-wide-") as folder:
        try:
            wide = widen(load_model(local), factor)
        except ValueError as error:
            raise ConfigError(f"option 'widen' is {factor}: {error}") from error
        wide.save_pretrained(folder)
        load_tokenizer(local).save_pretrained(folder)
        del wide
        yield folder


def engine_config(options: BenchOptions, folder: str, strategy: str) -> EngineConfig:
    """Return the options of one strategy; skipped sublayers and saved plans are kept only if it uses them. Raises
    ConfigError for an unknown strategy, or one that lacks a required option."""
    base, is_static = options.engine, strategy == "static"
    speculation = base.speculation.replace(
        strategy=strategy,
        skip=base.speculation.skip if is_static else (),
        static_choice=base.speculation.static_choice if is_static else FULL,
        warm_start=_plans_of(options, strategy),
    )
    return base.replace(
        model=folder,
        max_num_seqs=options.batch,
        enable_prefix_caching=False,  # each repeat of a prompt must be prefilled again
        max_model_len=base.max_model_len or max(options.workloads.contexts) + options.max_tokens,
        speculation=speculation,
    )
