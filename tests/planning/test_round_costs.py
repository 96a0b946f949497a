from __future__ import annotations

import random

import pytest
from rayspec.planning.round_costs import RecentMean, RecentRate, RoundCosts, RoundShape

from rayspec.choices import FULL, SKIP
from tests.planning.test_latency import model

PLAIN = RoundShape(rows=4, context=1024, batch=4)
LOOKED_UP = RoundShape(rows=20, context=1024, batch=4)
DRAFTED = RoundShape(
    choices=(FULL, SKIP) * 4, num_draft_steps=3, num_drafting=4, rows=16, context=1024, batch=4
)  # fmt: skip


def test_before_anything_was_seen_the_latency_model_counts() -> None:
    latency = model()
    costs = RoundCosts(latency)
    assert costs.seconds(PLAIN) == pytest.approx(latency.decode_step_s(context=1024, batch=4))
    step_s = latency.draft_step_s(DRAFTED.choices, context=1024, batch=4)
    verify_s = latency.verify_s(rows=16, context=1024, batch=4)
    assert costs.seconds(DRAFTED) == pytest.approx(3 * step_s + verify_s + latency.round_s)


def test_what_it_is_off_by_is_learned_for_each_kind_of_round() -> None:
    latency, rng = model(), random.Random(0)
    costs = RoundCosts(latency)
    step_s = latency.draft_step_s(DRAFTED.choices, context=1024, batch=4)
    for _ in range(200):
        for shape, factor in ((PLAIN, 1.5), (LOOKED_UP, 3.0), (DRAFTED, 0.7)):
            noise = rng.lognormvariate(0, 0.1)
            verify_s = factor * noise * latency.verify_s(rows=shape.rows, context=1024, batch=4)
            draft_s = 2.0 * noise * shape.num_draft_steps * step_s
            costs.observe(shape, draft_s=draft_s, verify_s=verify_s, seconds=draft_s + verify_s + 1e-3)
    more = RoundShape(rows=36, context=1024, batch=4)
    verify_s = latency.verify_s(rows=36, context=1024, batch=4)
    assert costs.seconds(more) == pytest.approx(3.0 * verify_s + 1e-3, rel=0.1)
    assert costs.seconds(PLAIN) == pytest.approx(1.5 * latency.verify_s(rows=4, context=1024, batch=4) + 1e-3, rel=0.1)
    drafted_s = 2.0 * 3 * step_s + 0.7 * latency.verify_s(rows=16, context=1024, batch=4) + 1e-3
    assert costs.seconds(DRAFTED) == pytest.approx(drafted_s, rel=0.1)


def test_a_recent_mean_forgets() -> None:
    mean = RecentMean(7.0)
    assert (mean.value, mean.known) == (7.0, False)
    mean.observe(3.0)
    assert (mean.value, mean.known) == (3.0, True)
    for _ in range(200):
        mean.observe(1.0)
    assert mean.value == pytest.approx(1.0, abs=0.01)


def test_a_recent_rate_is_a_ratio_of_sums_that_forgets() -> None:
    rate = RecentRate()
    assert (rate.value, rate.seconds(5)) == (0.0, 0.0)
    rate.observe(1, 1.0)
    rate.observe(9, 1.0)
    assert rate.value == pytest.approx(5.0, abs=0.2)
    for _ in range(300):
        rate.observe(8, 2.0)
    assert rate.value == pytest.approx(4.0)
    assert rate.seconds(6) == pytest.approx(1.5)


def test_a_prior_counts_for_its_seconds() -> None:
    rate = RecentRate()
    assert rate.with_prior(3.0, 24.0) == 3.0
    rate.observe(0, 24.0)
    assert rate.with_prior(3.0, 24.0) == pytest.approx(1.5)
    rate.observe(24, 24.0)
    assert rate.with_prior(3.0, 24.0) == pytest.approx(4 / 3, abs=0.05)


def test_a_row_costs_what_verifies_of_more_rows_take_more() -> None:
    latency = model()
    costs = RoundCosts(latency)
    more_s = latency.verify_s(rows=36, context=1024, batch=4) - latency.verify_s(rows=8, context=1024, batch=4)
    assert costs.row_s(context=1024, batch=4) == pytest.approx(more_s / 28)
    for _ in range(50):
        verify_s = 2 * latency.verify_s(rows=20, context=1024, batch=4)
        costs.observe(LOOKED_UP, draft_s=0.0, verify_s=verify_s, seconds=verify_s)
    assert costs.row_s(context=1024, batch=4) == pytest.approx(2 * more_s / 28)
