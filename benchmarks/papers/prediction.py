"""The gain of a draft with given cost and acceptance, and conversely the cost or acceptance that a gain requires.

c, the relative cost, is the time of a draft step over that of a plain decoding step. Where a verify costs as much as a
plain step, as for one sequence, a draft gains speed only at an acceptance above c.
"""

from __future__ import annotations

from collections.abc import Callable

from rayspec.choices import FULL, SKIP, Choices
from rayspec.planning.acceptance import Decision, DraftRates
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.learning import NEVER, StopRule

_MANY_ROWS = 4096
_NUM_HALVINGS = 20


def best_length(
    latency: LatencyModel,
    choices: Choices,
    acceptance: float,
    *,
    context: float,
    max_draft_tokens: int,
    stop_rule: StopRule = NEVER,
) -> Decision:
    """Return the best length of this draft for one sequence, and its gain, even if that is a loss (see `best_choice`).

    The verify runs all sublayers on all rows, as the papers' code does. For a draft that runs all sublayers in full,
    the result is no draft.
    """
    rates = DraftRates(
        latency=latency,
        context=context,
        batch=1,
        max_draft_tokens=max_draft_tokens,
        stop_rule=stop_rule,
        reuse_prefix=False,
    )
    return rates.best_choice([choices], [acceptance], min_gain=-1.0)


def draft_cost(latency: LatencyModel, choices: Choices, *, context: float) -> float:
    """Return c: the time of a draft step over that of a plain decoding step."""
    return latency.draft_step_s(choices, context=context, batch=1) / latency.decode_step_s(context=context, batch=1)


def relative_latency(cost: float) -> LatencyModel:
    """Return a latency model of two sublayers: the first takes `cost`, both take 1, for any number of rows.

    A draft that skips the second sublayer is the textbook's draft, whose only parameter is c. Raises ValueError outside
    0 <= cost < 1.
    """
    if not 0 <= cost < 1:
        raise ValueError(f"cost is {cost}; it must be 0 or more, and below 1")
    curves = {
        name: Curve(rows=(1, _MANY_ROWS), base_s=(seconds, seconds))
        for name, seconds in (("kept", cost), ("left out", 1 - cost), ("head", 0.0))
    }
    return LatencyModel(
        sublayers=("kept", "left out"), curves=curves, head="head", stages=(0, 0), transfer_s=(0.0, 0.0)
    )


def relative_gain(cost: float, acceptance: float, *, max_draft_tokens: int, stop_rule: StopRule = NEVER) -> float:
    """Return the gain of a draft of relative cost c at its best length; a verify costs as much as a plain step."""
    decision = best_length(
        relative_latency(cost),
        (FULL, SKIP),
        acceptance,
        context=0,
        max_draft_tokens=max_draft_tokens,
        stop_rule=stop_rule,
    )
    return decision.tpt / decision.plain_tpt


def oracle_gain(cost: float, acceptance: float) -> float:
    """Return 1 / (a c + 1 - a), the gain of an ideal draft that ends just before each token to be rejected. It bounds
    the gain of all drafts of this cost and acceptance."""
    return 1 / (acceptance * cost + 1 - acceptance)


def needed_acceptance(gain: float, gain_at: Callable[[float], float]) -> float | None:
    """Return the least acceptance at which `gain_at`, a rising function, reaches `gain`; None if not even at 1."""
    if gain_at(1.0) < gain:
        return None
    return 0.0 if gain_at(0.0) >= gain else _crossing(lambda acceptance: gain_at(acceptance) >= gain)


def cost_if_all_accepted(gain: float, num_draft_tokens: int) -> float | None:
    """Return c at which drafts of g tokens, all accepted, have this gain: gain = (g + 1) / (g c + 1), where g is
    `num_draft_tokens`. None if c would be below 0."""
    cost = ((num_draft_tokens + 1) / gain - 1) / num_draft_tokens
    return cost if cost >= 0 else None


def needed_cost(gain: float, acceptance: float, *, max_draft_tokens: int) -> float | None:
    """Return c at which a draft of the best length has this gain; None if c would have to be below 0, or above 1."""
    below_one = 1 - 1e-9

    def falls_short(cost: float) -> bool:
        return relative_gain(cost * below_one, acceptance, max_draft_tokens=max_draft_tokens) < gain

    return None if falls_short(0.0) or not falls_short(1.0) else _crossing(falls_short)


def _crossing(holds: Callable[[float], bool]) -> float:
    """Return by bisection the number between 0 and 1 above which `holds` is true and below which it is false."""
    low, high = 0.0, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
