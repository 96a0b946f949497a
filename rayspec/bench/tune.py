"""Tune plans on calibration prompts, and save them for the strategies `self-sd` and `knn-ssd`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

import rayspec
from rayspec.batch.document_task import summary_prompt
from rayspec.bench.run import model_folder
from rayspec.bench.workloads import WorkloadOptions, make_workloads
from rayspec.choices import FULL, SKIP
from rayspec.command.loading import load_llm
from rayspec.config import EngineConfig, TuningOptions
from rayspec.decode.engine import Engine
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlan, SavedPlans
from rayspec.strategies.tuning import Tried, knapspec_plan, tune_domains, tune_plan
from rayspec.types import ConfigError

_SUFFIX = ".json"
# Seed of the bundled prompts, far from those of benchmarks, which start at 0.
_SEED = 7000
_TELL_EVERY_S = 5.0
_UNUSED_SKIP = (0,)  # placeholder: each trial sets its own plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The model to tune for, and the calibration prompts. Raises ConfigError.

    inputs: "[DOMAIN=]INPUT". INPUT is the same as for benchmarks: "demo:DOMAIN", "demo:all", a file of documents, or a
    file of questions, whose categories are domains. Without DOMAIN, the input's own name is the domain. A single domain
    that was not named gives a plan for any text. context: prompt tokens; documents are cut to this length. num_prompts:
    for each domain of an input, at most. batch: prompts decoded at once. widen: factor by which the model is widened.
    """

    engine: EngineConfig
    tuning: TuningOptions
    inputs: tuple[str, ...]
    output: Path
    context: int = 1024
    num_prompts: int = 8
    batch: int = 1
    widen: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("option 'input' is missing: name calibration prompts, as FILE or DOMAIN=FILE")
        if self.output.suffix != _SUFFIX:
            raise ConfigError(f"option 'output' is {str(self.output)!r}: its name must end in {_SUFFIX}")
        if self.output.is_dir():
            raise ConfigError(f"option 'output' is {str(self.output)!r}, a folder: name a file")
        if self.output.exists() and not self.overwrite:
            raise ConfigError(
                f"option 'output' is {str(self.output)!r}, which exists: choose another name or pass --overwrite"
            )


def run_tune(options: TuneOptions, say: Callable[[str], None]) -> SavedPlans:
    """Tune, save and return the plans. say: called with progress messages. Raises ConfigError, CheckpointError, and the
    error of an invalid input."""
    _make_place(options.output)
    with model_folder(options.engine, options.widen) as folder, load_llm(_engine_config(options, folder)) as llm:
        engine = llm.engine
        if not isinstance(engine, Engine):
            raise ConfigError("option 'replicas' is more than 1: plans are tuned on one replica, which serves them all")
        domains = calibration_prompts(llm, options)
        identity = ModelIdentity.of(engine.config, engine.stages.num_sublayers)
        model = msgspec.structs.replace(identity, name=_model_name(options))
        saved = _tune(engine, domains, options.tuning, model, say)
    saved.save(options.output)
    return saved


def calibration_prompts(llm: rayspec.LLM, options: TuneOptions) -> dict[str, list[list[int]]]:
    """Return token ids by domain; the domain is "" if the plan is for any text. Raises ConfigError for an invalid
    input, and for a domain that occurs again without DOMAIN=."""
    template = summary_prompt(options.engine.model)
    domains: dict[str, list[list[int]]] = {}
    for name in options.inputs:
        domain, source = _domain_and_source(name)
        asked = WorkloadOptions(
            inputs=(source,), contexts=(options.context,), num_prompts=options.num_prompts, seed=_SEED
        )
        for workload in make_workloads(llm, asked, template=template):
            prompts = domains.setdefault(workload.domain if domain is None else domain, [])
            if prompts and domain is None:
                raise ConfigError(f"option 'input' names two of domain {workload.domain!r}: say DOMAIN=FILE of each")
            prompts.extend(workload.prompts)
    named = [name for name in options.inputs if _domain_and_source(name)[0] is not None]
    return domains if len(domains) > 1 or named else {"": next(iter(domains.values()))}


def plans_table(saved: SavedPlans) -> Table:
    """Return the plans as a table, one row for each domain. Speeds are tokens per second of one sequence."""
    table = Table(title=f"plans for {saved.model.name}", title_justify="left")
    table.add_column("domain")
    for heading in ("skipped attention", "skipped MLP", "draft", "acceptance", "tokens/s", "plain", "gain", "radius"):
        table.add_column(heading, justify="right")
    for plan in saved.plans:
        table.add_row(plan.domain or "any text", *_cells(plan, saved.model.num_sublayers))
    return table


def _cells(plan: SavedPlan, num_sublayers: int) -> list[str]:
    skipped = [index for index, choice in enumerate(plan.choices) if choice == SKIP]
    num_mlp = sum(index % 2 for index in skipped)
    num_layers = num_sublayers // 2
    return [
        f"{len(skipped) - num_mlp} of {num_layers}",
        f"{num_mlp} of {num_layers}",
        str(plan.num_draft_tokens),
        f"{100 * plan.acceptance:.0f} %",
        f"{plan.tokens_per_s:.1f}",
        f"{plan.plain_tokens_per_s:.1f}",
        f"x{plan.tokens_per_s / plan.plain_tokens_per_s:.2f}",
        f"{plan.radius:.3f}" if plan.anchors else "-",
    ]


def _tune(
    engine: Engine,
    domains: dict[str, list[list[int]]],
    options: TuningOptions,
    model: ModelIdentity,
    say: Callable[[str], None],
) -> SavedPlans:
    for domain, prompts in domains.items():
        say(f"{_shown(domain)}: {len(prompts)} prompts of up to {max(map(len, prompts), default=0)} tokens")
    tell = _Progress(options, say)
    if list(domains) != [""]:
        return tune_domains(engine, domains, options, model=model, tell=tell)
    if options.plans_by == "knapspec":
        return SavedPlans(model=model, plans=(knapspec_plan(engine, domains[""], options),))
    return SavedPlans(model=model, plans=(tune_plan(engine, domains[""], options, tell=tell),))


class _Progress:
    """Reports the first plan of each domain, each new best plan, and otherwise one plan every few seconds."""

    def __init__(self, options: TuningOptions, say: Callable[[str], None]) -> None:
        self._num_tries = options.num_tries
        self._say = say
        self._said_s = time.monotonic()
        self._best = 0.0

    def __call__(self, tried: Tried) -> None:
        best, plain = tried.best_tokens_per_s, tried.plain_tokens_per_s
        now = time.monotonic()
        if tried.number == 1 or best > self._best or now - self._said_s >= _TELL_EVERY_S:
            gain = f" (x{best / plain:.2f} of plain)" if plain else ""
            self._say(
                f"{_shown(tried.domain)}: plan {tried.number} of {self._num_tries} makes {tried.tokens_per_s:.1f} "
                f"tokens/s, the best {best:.1f}{gain}"
            )
            self._said_s = now
        self._best = best


def _engine_config(options: TuneOptions, folder: str) -> EngineConfig:
    """Return options for tuning: "static" for trials, which set their own plans; else "knapspec", which measures."""
    base, by_trials = options.engine, options.tuning.plans_by == "trials"
    return base.replace(
        model=folder,
        max_num_seqs=options.batch,
        enable_prefix_caching=False,  # each repeat of a prompt must be prefilled again
        max_model_len=base.max_model_len or options.context + options.tuning.max_tokens,
        speculation=base.speculation.replace(
            strategy="static" if by_trials else "knapspec",
            skip=_UNUSED_SKIP if by_trials else (),
            static_choice=FULL,
            warm_start=None,
        ),
    )


def _model_name(options: TuneOptions) -> str:
    return options.engine.model + (f", {options.widen} times as wide" if options.widen > 1 else "")


def _domain_and_source(name: str) -> tuple[str | None, str]:
    """Split "[DOMAIN=]INPUT". The name of an existing file is never split at its "=". Raises ConfigError."""
    domain, equals, source = name.partition("=")
    if not equals or Path(name).exists():
        return None, name
    if not domain or not source:
        raise ConfigError(f"option 'input' is {name!r}: write it as FILE or DOMAIN=FILE")
    return domain, source


def _shown(domain: str) -> str:
    return domain or "any text"


def _make_place(output: Path) -> None:
    """Create the output folder and check that it is writable, before hours of tuning. Raises ConfigError."""
    folder = output.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"option 'output' is {str(output)!r}: {error.strerror}; choose another place") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"option 'output' is {str(output)!r}: {str(folder)!r} cannot be written to")
