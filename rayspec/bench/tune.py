"""Tune plans on calibration prompts, and save them for the strategies `self-sd` and `knn-ssd`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

import rayspec
from rayspec.batch.document_task import summary_prompt
from rayspec.bench.options import TuneOptions, WorkloadOptions
from rayspec.bench.run import measured_engine, model_folder
from rayspec.bench.workloads import make_workloads
from rayspec.choices import SKIP
from rayspec.command.terminal import check_output, load_llm
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from rayspec.strategies.tuning import tune_domains, tune_plan
from rayspec.types import ConfigError

# Seed of the bundled prompts, far from those of benchmarks, which start at 0.
_SEED = 7000
_ANY = "any text"
_UNUSED_SKIP = (0,)  # placeholder: each trial sets its own plan


def run_tune(options: TuneOptions, say: Callable[[str], None]) -> SavedPlans:
    """Tune, save and return the plans. say: called with progress messages. Raises ConfigError, CheckpointError, and the
    error of an invalid input."""
    check_output(options.output, "output")
    drafts = options.engine.speculation
    if "strategy" in drafts.model_fields_set:
        say(f"option 'speculation.strategy' has no effect: plans are tuned without {drafts.strategy}")
    with ExitStack() as stack:
        model = stack.enter_context(model_folder(options.engine, options.widen))
        longest = options.context + options.max_tokens
        static: dict[str, Any] = {"strategy": "static", "skip": _UNUSED_SKIP}  # in which each trial sets its own plan
        config = measured_engine(options.engine, model, batch=options.batch, longest=longest, **static)
        llm = stack.enter_context(load_llm(config))
        engine = llm.engine
        if engine.stages.keeps_state:
            raise ConfigError(
                f"model {options.engine.model!r} does not split into sublayers, and plans say which drafts skip: "
                "use strategy auto, whose drafts for it are copied"
            )
        domains = calibration_prompts(llm, options)
        for domain, prompts in domains.items():
            longest = max(map(len, prompts), default=0)
            most = f"up to {options.num_tries} plans or {options.max_seconds:g} s"
            say(f"{domain or _ANY}: {len(prompts)} prompts of up to {longest} tokens, {most}")
        width = f", {options.widen} times as wide" if options.widen > 1 else ""
        identity = ModelIdentity.of(engine.config, engine.stages.num_sublayers)
        tuned = msgspec.structs.replace(identity, name=f"{options.engine.model}{width}")
        if list(domains) != [""]:
            saved = tune_domains(engine, domains, options, model=tuned, say=say)
        else:
            saved = SavedPlans(model=tuned, plans=(tune_plan(engine, domains[""], options, say=say),))
    place = options.output
    if place.exists() and not options.overwrite:  # another run has written it meanwhile
        place = place.with_stem(f"{place.stem}-{os.getpid()}")
    saved.save(place)
    say(f"saved in {place}")
    return saved


def calibration_prompts(llm: rayspec.LLM, options: TuneOptions) -> dict[str, list[list[int]]]:
    """Return token ids by domain; the domain is "" if the plan is for any text. Raises ConfigError for an invalid
    input, and for a domain that occurs again without DOMAIN=."""
    template = summary_prompt(options.engine.model)
    domains: dict[str, list[list[int]]] = {}
    for name in options.input:
        domain, source = _domain_and_source(name)
        asked = WorkloadOptions(
            input=(source,), context=(options.context,), num_prompts=options.num_prompts, workload_seed=_SEED
        )
        for workload in make_workloads(llm, asked, template=template):
            prompts = domains.setdefault(workload.domain if domain is None else domain, [])
            if prompts and domain is None:
                raise ConfigError(f"option 'input' names two of domain {workload.domain!r}: say DOMAIN=FILE of each")
            prompts.extend(workload.prompts)
    named = [name for name in options.input if _domain_and_source(name)[0] is not None]
    return domains if len(domains) > 1 or named else {"": next(iter(domains.values()))}


def plans_table(saved: SavedPlans) -> Table:
    """Return the plans as a table, one row for each domain. Speeds are tokens per second of one sequence."""
    table = Table(title=f"plans for {saved.model.name}", title_justify="left")
    table.add_column("domain")
    for heading in ("skipped attention", "skipped MLP", "draft", "acceptance", "tokens/s", "plain", "gain", "radius"):
        table.add_column(heading, justify="right")
    num_layers = saved.model.num_sublayers // 2
    for plan in saved.plans:
        num_attention, num_mlp = (plan.choices[kind::2].count(SKIP) for kind in (0, 1))
        table.add_row(
            plan.domain or _ANY,
            f"{num_attention} of {num_layers}",
            f"{num_mlp} of {num_layers}",
            str(plan.num_draft_tokens),
            f"{100 * plan.acceptance:.0f} %",
            f"{plan.tokens_per_s:.1f}",
            f"{plan.plain_tokens_per_s:.1f}",
            f"x{plan.tokens_per_s / plan.plain_tokens_per_s:.2f}",
            f"{plan.radius:.3f}" if plan.anchors else "-",
        )
    return table


def _domain_and_source(name: str) -> tuple[str | None, str]:
    """Split "[DOMAIN=]INPUT". The name of an existing file is never split at its "=". Raises ConfigError."""
    domain, equals, source = name.partition("=")
    if not equals or Path(name).exists():
        return None, name
    if not domain or not source:
        raise ConfigError(f"option 'input' is {name!r}: write it as FILE or DOMAIN=FILE")
    return domain, source
