from __future__ import annotations

import numpy as np

from rayspec.planning.budget import Budget, Trigger
from rayspec.planning.learning import FIRST_SEARCH_SHARE


def test_budget_is_never_exceeded() -> None:
    budget, rng, elapsed = Budget(0.02), np.random.default_rng(0), 0.0
    for _ in range(2000):
        elapsed += 0.1
        cost = float(rng.uniform(0.01, 1.0))
        if budget.allows(cost, elapsed_s=elapsed):
            budget.spent_s += cost
            elapsed += cost
        assert budget.spent_s <= 0.02 * elapsed + 1e-9
    assert budget.spent_s > 0.01 * elapsed


def test_budget_may_be_spent_ahead_and_may_be_nothing() -> None:
    assert not Budget(0.02).allows(1.0, elapsed_s=10)
    assert Budget(0.02).allows(1.0, elapsed_s=10, expected_remaining_s=50)
    assert not Budget(0.0).allows(1e-9, elapsed_s=1e9)


def test_the_first_searches_together_may_take_a_share_of_what_their_plan_saves() -> None:
    budget = Budget(0.02)
    for spent_s in (0.0, 2.0):
        budget.spent_s += spent_s
        assert budget.may_invest(1.0, saving_s=1.01 * (spent_s + 1.0) / FIRST_SEARCH_SHARE)
        assert not budget.may_invest(1.0, saving_s=0.99 * (spent_s + 1.0) / FIRST_SEARCH_SHARE)
    assert not Budget(0.0).may_invest(1e-9, saving_s=1e9)


def made(**changes: object) -> Trigger:
    trigger = Trigger()
    assert trigger.reason(context=1000, batch=4) == "no plan yet"
    values = {"changed": True, "context": 1000, "batch": 4, "expected_acceptance": 0.8, **changes}
    trigger.planned(**values)  # type: ignore[arg-type]
    return trigger


def run(trigger: Trigger, num_rounds: int, acceptance: float, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(num_rounds):
        accepted = int((rng.random(4) < acceptance).cumprod().sum())
        trigger.observe(num_tokens=accepted + 1, num_accepted=accepted, num_tested=min(accepted + 1, 4))


def test_context_and_batch() -> None:
    trigger = made()
    assert trigger.reason(context=9000, batch=4) is None  # too soon after the last search
    run(trigger, 30, 0.8)
    assert trigger.reason(context=1400, batch=4) is None
    assert "context" in str(trigger.reason(context=1600, batch=4))
    assert "batch" in str(trigger.reason(context=1000, batch=2))


def test_drift_of_acceptance() -> None:
    calm = made()
    worse, better = made(), made()
    run(calm, 40, 0.8)
    run(worse, 60, 0.55)
    run(better, 60, 0.97)
    assert calm.reason(context=1000, batch=4) is None
    assert "acceptance" in str(worse.reason(context=1000, batch=4))
    assert "acceptance" in str(better.reason(context=1000, batch=4))


def test_calm_rarely_alarms() -> None:
    alarms = 0
    for seed in range(100):
        trigger = made()
        run(trigger, 40, 0.8, seed)
        alarms += trigger.reason(context=1000, batch=4) is not None
    assert alarms <= 5


def test_searches_that_change_nothing_become_rare() -> None:
    trigger, num_searches, last = Trigger(), 0, 0
    for token in range(100_000):
        if trigger.reason(context=1000, batch=1):
            trigger.planned(changed=num_searches == 0, context=1000, batch=1)
            num_searches, last = num_searches + 1, token
        trigger.observe(num_tokens=1)
    assert 5 < num_searches < 15
    assert 100_000 - last <= 16384
    trigger.planned(changed=True, context=1000, batch=1)
    for _ in range(512):
        trigger.observe(num_tokens=1)
    assert trigger.reason(context=1000, batch=1) is not None
