from collections.abc import Sequence

import numpy as np
import pytest

from rayspec.planning.learning import Trigger


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


@pytest.mark.parametrize(("acceptance", "alarms"), [(0.8, range(6)), (0.55, [100]), (0.97, [100])])
def test_drift_of_acceptance_is_noticed_and_noise_is_not(acceptance: float, alarms: Sequence[int]) -> None:
    """Of a hundred seeds."""
    found = 0
    for seed in range(100):
        trigger = made()
        run(trigger, 40 if acceptance == 0.8 else 60, acceptance, seed)
        found += "acceptance" in str(trigger.reason(context=1000, batch=4))
    assert found in alarms


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
