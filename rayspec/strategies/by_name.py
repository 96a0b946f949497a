"""Makes the selector of each strategy from the strategy's name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rayspec.choices import Choice
from rayspec.config import EngineConfig, SpeculationOptions
from rayspec.decode.selection.auto import Auto
from rayspec.decode.selection.base import FixedPlan, Selector, lookup_plan, static_plan
from rayspec.decode.selection.knapspec import Candidate
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.asd import ASD
from rayspec.strategies.clasp import CLaSp
from rayspec.strategies.dynamic_exit import DEL
from rayspec.strategies.knn_ssd import KnnSSD
from rayspec.strategies.layerskip import early_exit_plan
from rayspec.strategies.lookahead import lookahead_plan
from rayspec.strategies.only_if_faster import OnlyIfFaster
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans, known_candidates
from rayspec.strategies.self_sd import SelfSD
from rayspec.strategies.swift import Swift
from rayspec.types import ConfigError, Plan, no_draft

logger = logging.getLogger(__name__)

_LOOKUP_TOKENS = 10  # of prompt lookup as published


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The inputs from which strategies are made."""

    config: EngineConfig
    latency: LatencyModel

    @property
    def options(self) -> SpeculationOptions:
        return self.config.speculation

    @property
    def num_sublayers(self) -> int:
        return len(self.latency.sublayers)

    @property
    def num_lookup_tokens(self) -> int:
        return min(_LOOKUP_TOKENS, self.options.max_draft_tokens)

    @property
    def saved_plans(self) -> SavedPlans:
        assert self.options.warm_start is not None
        saved = SavedPlans.load(self.options.warm_start, ModelIdentity.of(self.config, self.num_sublayers))
        return saved.within([self.latency.choices_of(index) for index in range(self.num_sublayers)])

    @property
    def known(self) -> Sequence[Candidate]:
        return known_candidates(self.saved_plans) if self.options.warm_start is not None else ()


_Make = Callable[[_Given], Selector]

_WITH_THEIR_OWN_GATE: Mapping[str, _Make] = {
    "knapspec": lambda given: Auto(given.options, given.latency, known=given.known, looks_up=False),
    "auto": lambda given: Auto(given.options, given.latency, known=given.known),
    "knn-ssd": lambda given: KnnSSD(given.saved_plans, given.options, given.latency),
}
_BEHIND_THE_GATE: Mapping[str, _Make] = {
    "clasp": lambda given: CLaSp(given.options, given.latency),
    "swift": lambda given: Swift(given.options, given.latency),
    "self-sd": lambda given: SelfSD.of(given.saved_plans.only(), given.options, given.num_sublayers),
    "del": lambda given: DEL(given.options, given.latency),
    "layerskip": lambda given: FixedPlan(early_exit_plan(given.options.layerskip, given.num_sublayers)),
    "asd": lambda given: ASD(given.options, given.latency),
    "lookup": lambda given: FixedPlan(lookup_plan(given.num_sublayers, given.num_lookup_tokens)),
    "lookahead": lambda given: FixedPlan(lookahead_plan(given.num_sublayers)),
}


def needs_latency(config: EngineConfig) -> bool:
    """Whether the strategy uses a latency model."""
    return config.speculation.strategy not in ("static", "ar")


def make_selector(
    config: EngineConfig,
    num_sublayers: int,
    latency: LatencyModel | None,
    *,
    ways: Sequence[Collection[Choice]] | None = None,
) -> Selector:
    """Return the selector of the configured strategy, behind the gate of `OnlyIfFaster` if the options ask for it.

    latency: None for a strategy that does not need it. ways: for static drafts, the possible choices of each sublayer;
    None: all choices. Raises ConfigError for options that the model cannot serve, and for saved plans that cannot be
    read or belong to another model.
    """
    options = config.speculation
    if latency is not None and options.strategy in _WITH_THEIR_OWN_GATE:
        return _WITH_THEIR_OWN_GATE[options.strategy](_Given(config=config, latency=latency))
    if latency is not None and options.strategy in _BEHIND_THE_GATE:
        strategy = _BEHIND_THE_GATE[options.strategy](_Given(config=config, latency=latency))
        return OnlyIfFaster(strategy, latency) if options.gate else strategy
    if options.strategy == "static":
        return FixedPlan(_static_plan(options, num_sublayers, ways))
    assert options.strategy == "ar", f"strategy {options.strategy!r} needs a latency model"
    return FixedPlan(no_draft(num_sublayers, "ar"))


def _static_plan(options: SpeculationOptions, num_sublayers: int, ways: Sequence[Collection[Choice]] | None) -> Plan:
    choice = options.static_choice
    try:
        plan = static_plan(options.skip, num_sublayers, options.max_draft_tokens, choice=choice, ways=ways)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if plan.prefix < num_sublayers:
        return plan
    logger.warning("there are no drafts: no sublayer can run by option 'static_choice' %r", choice)
    return no_draft(num_sublayers, f"static: no sublayer can run by {choice!r}")
