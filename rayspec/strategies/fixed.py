"""Strategies whose plan never changes: "ar" (no draft), "static", "lookup", "recycling", "lookahead", "layerskip".

lookup: drafts from the sequence's own text (prompt lookup, Saxena 2023). recycling: trees of tokens that the target
found likely at earlier verifies (Token Recycling, Luo et al. 2025). lookahead: n-grams that the sequences' Jacobi
windows have produced. layerskip: the draft exits the model at a fixed layer (LayerSkip, Elhoushi et al., 2024). That
paper's verify reuses the draft's states and keys of all layers before the exit; here, this is the prefix of every plan.
Its models were trained for early exit; with other models, fewer draft tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rayspec.choices import FULL, SKIP, Choice, choices_of, nearest
from rayspec.config import SpeculationOptions
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.types import ConfigError, Plan, PlanRecord, no_draft

_EXIT_TOKENS = 6  # of a draft of LayerSkip


class FixedPlan:
    """The same plan in every round. capture: whether every round captures hidden states."""

    status = "the plan is fixed"

    def __init__(self, plan: Plan, *, capture: bool = False) -> None:
        self.chosen = RoundPlan(plan=plan, capture=capture)

    def choose(self, state: BatchState) -> RoundPlan:
        return self.chosen

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        pass

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        return None


def static_plan(
    skip: Sequence[int],
    num_sublayers: int,
    num_draft_tokens: int,
    *,
    choice: Choice = FULL,
    ways: Sequence[Collection[Choice]] | None = None,
) -> Plan:
    """Return the plan that skips the sublayers `skip` and runs the others by `choice`, or the nearest of their possible
    choices (`ways`; None: all). Raises ConfigError for a sublayer that does not exist."""
    foreign = [index for index in skip if not 0 <= index < num_sublayers]
    if foreign:
        raise ConfigError(f"option 'skip' names sublayer {foreign[0]}; the model has 0 to {num_sublayers - 1}")
    possible = [(choice,)] * num_sublayers if ways is None else ways
    choices = tuple(SKIP if index in set(skip) else nearest(choice, each) for index, each in enumerate(possible))
    return Plan(choices=choices, num_draft_tokens=num_draft_tokens, source="static")


def lookup_plan(num_sublayers: int, num_tokens: int, source: str = "lookup") -> Plan:
    """Return the plan of drafts of at most `num_tokens` tokens that no pass has to draft."""
    return replace(no_draft(num_sublayers, source), num_lookup_tokens=num_tokens)


def lookahead_plan(num_sublayers: int) -> Plan:
    """Return the plan of Lookahead, in which the model itself drafts no tokens."""
    return replace(no_draft(num_sublayers, "lookahead"), lookahead=True)


def early_exit_plan(options: SpeculationOptions, num_sublayers: int) -> Plan:
    """Return the plan that skips the layers from the exit layer on. Raises ConfigError if there is no such layer."""
    num_layers = num_sublayers // 2
    exit_layer = max(1, num_layers // 4) if options.exit_layer is None else options.exit_layer
    if exit_layer >= num_layers:
        raise ConfigError(
            f"option 'exit_layer' is {exit_layer}, the model has {num_layers} layers: choose fewer, or another strategy"
        )
    choices = choices_of([index < 2 * exit_layer for index in range(num_sublayers)])
    return Plan(choices=choices, num_draft_tokens=min(_EXIT_TOKENS, options.max_draft_tokens), source="layerskip")
