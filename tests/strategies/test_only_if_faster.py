from __future__ import annotations

from typing import Any

import pytest

from rayspec.choices import FULL, SKIP
from rayspec.decode.search import Cosines
from rayspec.decode.selection.base import BatchState, FixedPlan
from rayspec.strategies.only_if_faster import OnlyIfFaster
from rayspec.types import Plan
from tests.decode.selecting import Asker, latency_model, round_of, state, turn

PLAN = Plan(choices=(FULL, SKIP, FULL, FULL), num_draft_tokens=4, source="test")
LATENCY = latency_model(2)
ASKER = Asker(lambda question: Cosines([], 0.0))


class _Strategy(FixedPlan):
    """One plan; counts what it is asked, and can let choosing take time."""

    wants_taps = True

    def __init__(self, plan: Plan = PLAN, choosing_s: float = 0.0) -> None:
        super().__init__(plan)
        self.now = 0.0
        self.choosing_s = choosing_s
        self.num_improved = 0
        self.seen: list[Plan] = []

    def observe(self, state: BatchState, plan: Plan, *rest: Any) -> None:
        self.seen.append(plan)

    def improve(self, *arguments: Any) -> None:
        self.num_improved += 1
        self.now += self.choosing_s


def _run(
    strategy: _Strategy, *, num_accepted: int, draft_s: float, num_rounds: int = 600
) -> tuple[OnlyIfFaster, list[bool]]:
    """Plain rounds take a second. Returns which rounds drafted."""
    gated = OnlyIfFaster(strategy, LATENCY, clock=lambda: strategy.now)
    drafted = []
    for _ in range(num_rounds):
        drafted.append(gated.plan(state()).drafts)
        turn(gated, ASKER, num_accepted=num_accepted, seconds=lambda plan: draft_s if plan.drafts else 1.0)
    return gated, drafted


def test_a_strategy_that_pays_drafts_and_one_that_does_not_stops() -> None:
    gated, drafted = _run(_Strategy(), num_accepted=3, draft_s=2.0)
    assert sum(drafted) > 500
    assert "drafting: measured x" in gated.gate_reason
    gated, drafted = _run(_Strategy(), num_accepted=1, draft_s=3.0)
    assert 4 <= sum(drafted) < 60
    assert "not drafting: measured x0." in gated.gate_reason


def test_a_strategy_has_its_trial_although_no_gain_was_predicted() -> None:
    _, drafted = _run(_Strategy(), num_accepted=4, draft_s=1.5)
    assert drafted[-1]


def test_the_time_of_choosing_is_the_strategys() -> None:
    _, drafted = _run(_Strategy(choosing_s=0.0), num_accepted=2, draft_s=2.0)
    assert drafted[-1]
    _, drafted = _run(_Strategy(choosing_s=1.5), num_accepted=2, draft_s=2.0)
    assert sum(drafted) < 60


def test_a_strategy_that_would_rather_not_draft_pays_for_finding_out() -> None:
    strategy = _Strategy(Plan(choices=(FULL,) * 4, num_draft_tokens=0, source="none"))
    gated = OnlyIfFaster(strategy, LATENCY, clock=lambda: strategy.now)
    strategy._plan = PLAN
    for _ in range(50):
        turn(gated, ASKER, num_accepted=4, seconds=lambda plan: 1.0)
    assert gated.plan(state()).drafts
    strategy._plan = Plan(choices=(FULL,) * 4, num_draft_tokens=0, source="none")
    strategy.choosing_s = 1.0
    for _ in range(200):
        turn(gated, ASKER, seconds=lambda plan: 1.0)
    assert strategy.num_improved < 200
    assert gated.plan(state()) is not strategy._plan


def test_while_plain_decoding_pays_the_strategy_chooses_nothing() -> None:
    strategy = _Strategy()
    gated, drafted = _run(strategy, num_accepted=0, draft_s=3.0)
    assert strategy.num_improved < 80
    assert not drafted[-1]
    assert not gated.wants_taps
    assert len(strategy.seen) == 600, "it hears of every round"


def test_until_there_is_a_plan_the_strategy_looks_for_one() -> None:
    strategy = _Strategy(Plan(choices=(FULL,) * 4, num_draft_tokens=0, source="none"))
    gated = OnlyIfFaster(strategy, LATENCY, clock=lambda: strategy.now)
    for number in range(20):
        assert gated.wants_taps
        turn(gated, ASKER)
        assert strategy.num_improved == number + 1
    assert not gated.plan(state()).drafts


def test_rounds_in_which_nobody_may_draft_say_nothing() -> None:
    """Sequences that are one token from their end."""
    strategy = _Strategy()
    gated = OnlyIfFaster(strategy, LATENCY, clock=lambda: strategy.now)
    for _ in range(40):
        turn(gated, ASKER, num_accepted=3, seconds=lambda plan: 2.0 if plan.drafts else 1.0)
    reason = gated.gate_reason
    none = round_of(Plan(choices=PLAN.choices, num_draft_tokens=0, source=""))
    for _ in range(100):
        gated.observe(state(), PLAN, none, 1, 50.0)
    assert gated.gate_reason == reason


@pytest.mark.parametrize("threshold", [0.5, None])
def test_the_rule_of_drafting_is_the_strategys(threshold: float | None) -> None:
    strategy = _Strategy()
    strategy.keep_drafting = lambda state: threshold  # type: ignore[assignment, method-assign, return-value]
    assert OnlyIfFaster(strategy, LATENCY).keep_drafting(state()) == threshold
