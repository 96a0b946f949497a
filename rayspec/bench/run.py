"""Compares strategies, and transformers generate, on the same prompts with interleaved repeats."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import rayspec
from rayspec import demo
from rayspec.batch.document_task import summary_prompt
from rayspec.bench.contenders import Contender, HfGenerate, Ours
from rayspec.bench.options import BenchOptions
from rayspec.bench.result import BASELINE, HF, Sample, bench_row, describe_environment
from rayspec.bench.workloads import Workload, make_workloads
from rayspec.choices import FULL
from rayspec.command.terminal import exit_on_sigterm, hide_progress_bars, load_llm
from rayspec.config import DType, EngineConfig, SpeculationOptions, Strategy
from rayspec.decode.engine import Engine
from rayspec.demo.widen import widen
from rayspec.local_engine import engine_like
from rayspec.model.weights import load_model, load_tokenizer, resolve_device
from rayspec.types import ConfigError

_WARM_UP_TOKENS = 16
_WITH_SAVED_PLANS = ("self-sd", "knn-ssd")
# Some middle sublayers of the bundled models' 32.
_SKIPPED = (13, 15, 16, 17, 18, 19, 21)

Say = Callable[[str], None]


def run_bench(
    options: BenchOptions,
    say: Say,
    *,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    arranged: Callable[[list[Workload]], list[Workload]] = lambda workloads: workloads,
    forgets: bool = False,
) -> dict[str, Any]:
    """Load every contender. Then, for each workload, warm up all contenders and measure them interleaved.

    keep: called after each workload with the result so far. arranged: changes the workloads. forgets: contenders forget
    before each repeat. Raises ConfigError, CheckpointError, and the error of a failed prompt.
    """
    with loaded_contenders(options, say) as (llm, contenders):
        result: dict[str, Any] = {
            "environment": describe_environment(),
            "options": options.model_dump(mode="json"),
            "dtype": llm.config.dtype,
            "workloads": [],
        }
        for workload in arranged(make_workloads(llm, options, template=summary_prompt(options.engine.model))):
            if not workload.prompts:
                say(f"{workload.name}: left out, as all of its {workload.num_left_out} prompts are longer")
                continue
            samples = take_turns(contenders, workload, options, say, forgets=forgets)
            found = {
                "name": workload.name,
                "domain": workload.domain,
                "context": workload.context,
                "num_left_out": workload.num_left_out,
                "prompt_tokens": [len(prompt) for prompt in workload.prompts],
                "results": [bench_row(name, samples, one.used) for name, one in contenders.items()],
            }
            result["workloads"].append(found)
            keep(result)
    return result


@contextmanager
def loaded_contenders(options: BenchOptions, say: Say) -> Iterator[tuple[rayspec.LLM, dict[str, Contender]]]:
    """Load all contenders; engines share their weights where they can. Also yield an LLM of the same model. Raises
    ConfigError, CheckpointError."""
    names = strategy_names(options)
    hide_progress_bars()
    exit_on_sigterm()  # so that the folder of a widened model is removed
    with model_folder(options.engine, options.widen) as folder, ExitStack() as stack:

        def loaded(config: EngineConfig) -> tuple[rayspec.LLM, Engine]:
            llm = stack.enter_context(load_llm(config))
            return llm, llm.engine

        say("loading")
        configs = {name: engine_config(options, folder, BASELINE if name == HF else name) for name in names}
        # The strategy with the most quantised copies of weights, so that the other engines can share them.
        ours = [name for name in names if name != HF]
        first = max(ours, key=lambda name: len(configs[name].speculation.draft_weights))
        llm, engine = loaded(configs[first])
        contenders: dict[str, Contender] = {}
        for name, config in configs.items():
            if name == HF:
                contenders[name] = HfGenerate(config, batch=options.batch)
            else:
                own = engine if name == first else engine_like(engine, config) or loaded(config)[1]
                contenders[name] = Ours(own)
        yield llm, contenders


def strategy_names(options: BenchOptions) -> list[str]:
    """Return the names, with "all" expanded and the baseline first. Raises ConfigError. Its message names the nearest
    strategy for an unknown name, or the option that a strategy lacks."""
    speculation = options.engine.speculation
    if speculation.warm_start is not None:
        raise ConfigError(
            f"option 'warm_start' is {speculation.warm_start!r}: name the strategy that the saved plans are for, as "
            f"--plans self-sd={speculation.warm_start}"
        )
    needs_more = {name for name in _WITH_SAVED_PLANS if name not in options.plans}
    if not speculation.skip and speculation.static_choice == FULL:
        needs_more.add("static")
    every = [name for name in get_args(Strategy) if name not in needs_more]
    asked = [one for name in options.strategies for one in (every if name == "all" else (name,))]
    for name in asked:
        if name != HF:
            engine_config(options, options.engine.model, name)
    for name, file in options.plans.items():
        if name not in asked:
            raise ConfigError(f"option 'plans' has {file!r} for {name!r}, which does not run: add it to 'strategies'")
    return list(dict.fromkeys([BASELINE, *asked, *([HF] if options.hf else [])]))


def take_turns(
    contenders: Mapping[str, Contender], workload: Workload, options: BenchOptions, say: Say, *, forgets: bool = False
) -> dict[str, list[Sample]]:
    """Return the samples of each contender by repeat. Contenders first forget; with `forgets` before each repeat."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for repeat in range(options.repeats):
        for name, contender in contenders.items() if forgets or not repeat else ():
            say(f"{workload.name}: warming up {name}")
            contender.forget()
            contender.warm_up(workload.prompts, _WARM_UP_TOKENS)
        for name, sample in _side_by_side(contenders, workload, options.max_tokens, random.Random(repeat)).items():
            samples[name].append(sample)
            done = f"{workload.name}: repeat {repeat + 1} of {options.repeats}"
            say(f"{done}: {name} {sample.tokens_per_s:.1f} tokens/s")
    return samples


def _side_by_side(
    contenders: Mapping[str, Contender], workload: Workload, max_tokens: int, rng: random.Random
) -> dict[str, Sample]:
    """Run all contenders interleaved, next the one with the fewest tokens so far: a change of the machine's speed
    affects all. Ties are broken at random, so that the caches that one contender leaves behind favour no other."""
    writings = {name: contender.write(workload.prompts, max_tokens) for name, contender in contenders.items()}
    num_written = dict.fromkeys(contenders, 0)
    samples: dict[str, Sample] = {}
    while num_written:
        least = min(num_written.values())
        name = rng.choice([name for name, num_tokens in num_written.items() if num_tokens == least])
        try:
            num_written[name] = next(writings[name])
        except StopIteration as end:
            samples[name] = end.value
            del num_written[name]
    return samples


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
    asked, is_static = options.engine.speculation, strategy == "static"
    drafts: dict[str, Any] = {"skip": asked.skip, "static_choice": asked.static_choice} if is_static else {}
    longest = max(options.context) + options.max_tokens
    drafts |= {"strategy": strategy, "warm_start": options.plans.get(strategy)}
    return measured_engine(options.engine, folder, batch=options.batch, longest=longest, **drafts)


def measured_engine(base: EngineConfig, folder: str, *, batch: int, longest: int, **speculation: Any) -> EngineConfig:
    """Return the options of an engine that completes the same prompts again and again. longest: tokens of a prompt with
    its output. speculation: options in place of those in `base`, whose drafts and saved plans are not kept.
    Raises ConfigError for several replicas."""
    if base.parallel is not None and base.parallel.replicas > 1:
        raise ConfigError(f"option 'replicas' is {base.parallel.replicas}: one replica is measured, leave it out")
    drafts = {"skip": (), "static_choice": FULL, "warm_start": None} | speculation
    return base.replace(
        model=folder,
        max_num_seqs=batch,
        enable_prefix_caching=False,  # each repeat of a prompt must be prefilled again
        max_model_len=base.max_model_len or longest,
        speculation=base.speculation.replace(**drafts),
    )


def run_selfcheck(*, device: str, dtype: DType, num_threads: int | None, quick: bool, say: Say) -> dict[str, Any]:
    """Compare texts with drafts with those of plain decoding: in float32, where rounding cannot change the most likely
    token of these texts, also with transformers `generate`; in `dtype` with option `deterministic`.

    A check that raises has failed; the others still run. Returns JSON values, where "ok" says that no check failed.
    Raises ConfigError if the device does not exist.
    """
    options = {"device": device, "dtype": dtype, "num_threads": num_threads, "quick": quick}
    found: dict[str, Any] = {"ok": True, "options": options, "device": str(resolve_device(device))}
    found |= {"environment": describe_environment(), "load_average": os.getloadavg(), "checks": []}
    rounding: DType = "bfloat16" if dtype == "auto" else dtype
    exact: dict[str, Any] = {"dtype": "float32"}
    for name, kind in {
        "texts in float32": exact,
        "deterministic texts": {"dtype": rounding, "deterministic": True},
    }.items():
        started = time.perf_counter()
        try:
            engine = {"device": device, "num_threads": num_threads, **kind}
            numbers: Any = _compared(engine, hf=kind is exact, quick=quick)
            status = "passed" if all(row["identical"] == row["total"] for row in numbers) else "failed"
            told = "; ".join(
                f"{row['model']}, {'transformers generate' if row['strategy'] == HF else row['strategy']}: "
                f"{row['identical']} of {row['total']} texts equal plain decoding"
                for row in numbers
                if row["strategy"] != BASELINE
            )
        except Exception as error:  # noqa: BLE001 - it is reported, and the others still run
            status, told = "failed", f"the check raised {type(error).__name__}: {error}"
            numbers = {"traceback": traceback.format_exc()}
            say(numbers["traceback"])
        seconds = time.perf_counter() - started
        say(f"{name}: {status} ({seconds:.1f} s): {told}")
        found["checks"].append({"name": name, "seconds": seconds, "status": status, "found": told, "numbers": numbers})
        found["ok"] = found["ok"] and status == "passed"
        gc.collect()  # free the models of this check
    return found


def _compared(engine: dict[str, Any], *, hf: bool, quick: bool) -> list[dict[str, Any]]:
    """Return how many texts of each bundled model and strategy are those of plain decoding."""
    found = []
    for model in list(demo.BUNDLED)[: 1 if quick else None]:
        speculation = SpeculationOptions(strategy="static", skip=_SKIPPED)
        options = BenchOptions(
            engine=EngineConfig(model=model, speculation=speculation, **engine),
            context=(384,),
            num_prompts=1 if quick else 3,
            strategies=("static", "auto"),
            max_tokens=24 if quick else 48,
            repeats=1,
            hf=hf,
        )
        rows = run_bench(options, lambda line: None)["workloads"][0]["results"]
        found += [{"model": model} | {name: row[name] for name in ("strategy", "identical", "total")} for row in rows]
    return found
