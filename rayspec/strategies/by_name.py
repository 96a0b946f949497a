"""Makes each strategy from its name, behind the gate."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence

from rayspec.choices import Choice
from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.decode.strategy import Strategy
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.asd import ASD
from rayspec.strategies.clasp import CLaSp
from rayspec.strategies.dynamic_exit import DEL
from rayspec.strategies.fixed import FixedPlan, early_exit_plan, lookahead_plan, lookup_plan, static_plan
from rayspec.strategies.gate import Gated
from rayspec.strategies.knapspec import Auto
from rayspec.strategies.knn_ssd import KnnSSD
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans, known_candidates
from rayspec.strategies.self_sd import SelfSD
from rayspec.strategies.swift import Swift
from rayspec.types import ConfigError, no_draft

logger = logging.getLogger(__name__)

_LOOKUP_TOKENS = 10  # of prompt lookup as published

# Strategies that need nothing but the options and the latency model. All stand behind the gate.
BY_NAME: Mapping[str, Callable[[SpeculationOptions, LatencyModel], Strategy]] = {
    "clasp": CLaSp,
    "swift": Swift,
    "del": DEL,
    "asd": ASD,
    "layerskip": lambda options, latency: FixedPlan(early_exit_plan(options, len(latency.sublayers))),
    "lookup": lambda options, latency: FixedPlan(
        lookup_plan(len(latency.sublayers), min(_LOOKUP_TOKENS, options.max_draft_tokens))
    ),
    "recycling": lambda options, latency: FixedPlan(
        lookup_plan(len(latency.sublayers), options.max_draft_tokens, "recycling")
    ),
    "lookahead": lambda options, latency: FixedPlan(lookahead_plan(len(latency.sublayers))),
}

# Strategies whose drafts may all be copied or recycled: they need no sublayers and no trees.
COPYING = ("auto", "lookup", "recycling")


def needs_latency(config: EngineConfig) -> bool:
    """Whether the strategy uses a latency model."""
    return config.speculation.strategy not in ("static", "ar")


def make_strategy(
    config: EngineConfig,
    num_sublayers: int,
    latency: LatencyModel | None,
    *,
    ways: Sequence[Collection[Choice]] | None = None,
) -> Strategy:
    """Return the configured strategy. All but "static" and "ar" stand behind the gate, if the options ask for it.

    latency: None for a strategy that does not need it. ways: for static drafts, the possible choices of each sublayer;
    None: all choices. Raises ConfigError for options that the model cannot serve, for saved plans that cannot be read
    or belong to another model, and for a strategy "module:name" that cannot be imported.
    """
    options, name = config.speculation, config.speculation.strategy
    if name == "static":
        choice = options.static_choice
        plan = static_plan(options.skip, num_sublayers, options.max_draft_tokens, choice=choice, ways=ways)
        if plan.prefix == num_sublayers:
            logger.warning("there are no drafts: no sublayer can run by option 'static_choice' %r", choice)
            plan = no_draft(num_sublayers, f"static: no sublayer can run by {choice!r}")
        return FixedPlan(plan)
    if name == "ar":
        return FixedPlan(no_draft(num_sublayers, "ar"))
    assert latency is not None, f"strategy {name!r} needs a latency model"
    saved = None
    if options.warm_start is not None:
        saved = SavedPlans.load(options.warm_start, ModelIdentity.of(config, num_sublayers))
        saved = saved.within([latency.choices_of(index) for index in range(num_sublayers)])
    if name in ("auto", "knapspec"):  # with a gate of their own
        known = known_candidates(saved) if saved is not None else ()
        return Auto(options, latency, known=known, looks_up=name == "auto")
    if name == "knn-ssd":  # with a gate for each domain
        assert saved is not None
        return KnnSSD(saved, options, latency)
    if name == "self-sd":
        assert saved is not None
        strategy: Strategy = SelfSD.of(saved.only(), options)
    else:
        try:
            make = BY_NAME.get(name) or pkgutil.resolve_name(name)
        except (AttributeError, ImportError, ValueError) as error:
            raise ConfigError(
                f"option 'strategy' is {name!r}, which cannot be imported ({error}): give 'module:name' of a class or "
                "function that takes the options and the latency model, with the module on PYTHONPATH of every process"
            ) from error
        strategy = make(options, latency)
    return Gated(strategy, latency) if options.gate else strategy


def for_undivided(config: EngineConfig, reason: str) -> EngineConfig:
    """Return the options of an engine of a model that does not split into sublayers. Raises ConfigError for options
    that need sublayers. reason: why it does not split."""
    for name in ("deterministic", "offload", "lora_modules", "own_bits"):
        if getattr(config, name):
            raise ConfigError(f"option {name!r} needs a model that splits into sublayers: {reason}")
    speculation = config.speculation
    if speculation.strategy in COPYING:  # no plan can be searched, or have been saved
        speculation = speculation.replace(optimise_share=0.0, warm_start=None)
    # Each sequence has a cache of its own.
    return config.replace(enable_prefix_caching=False, speculation=speculation)


def copying_strategy(config: EngineConfig, num_sublayers: int, latency: LatencyModel | None, reason: str) -> Strategy:
    """Return the strategy of a model that does not split, and say so. latency: None if it cannot verify copies."""
    if latency is None or config.speculation.strategy not in COPYING:
        logger.warning("speculation is off for this model, which decodes plainly: %s", reason)
        return FixedPlan(no_draft(num_sublayers, reason))
    logger.warning("drafts of this model are only copied or recycled tokens: %s", reason)
    return make_strategy(config, num_sublayers, latency)
