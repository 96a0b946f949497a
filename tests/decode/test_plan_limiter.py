from __future__ import annotations

from dataclasses import replace

import pytest
from rayspec.decode.selection.plan_limiter import PlanLimiter

from rayspec.choices import FULL, SKIP
from rayspec.decode.selection.base import BatchState
from rayspec.types import Plan
from tests.decode.selecting import latency_model, state

LATENCY = latency_model(4)  # a step takes 8 s
HALF = Plan(choices=(FULL, SKIP) * 4, num_draft_tokens=16, source="test")
LOOKUP = Plan(choices=(FULL,) * 8, num_draft_tokens=0, source="test", num_lookup_tokens=10)


def on_trial(now: BatchState, step_s: float = 8.0) -> PlanLimiter:
    """After so many plain rounds as it takes."""
    limiter = PlanLimiter(LATENCY, "test: no draft")
    limiter.gate.new_plan(1.1)
    for _ in range(4):
        assert limiter.pass_on(now, HALF) is limiter.no_draft
        limiter.observe(now, now.batch, step_s, drafted=False)
    return limiter


@pytest.mark.parametrize(
    ("num_outstanding", "longest"),
    [(100, 2), (200, 4), (100_000, 16)],
)
def test_a_draft_on_trial_is_no_longer_than_the_work_allows(num_outstanding: int, longest: int) -> None:
    """Of 1 % of 104 rounds, and 0.75 % of those that were, a draft step of half a round fits twice."""
    now = replace(state(), num_outstanding_tokens=num_outstanding + 1)
    limiter = on_trial(now)
    plan = limiter.pass_on(now, HALF)
    assert plan.choices == HALF.choices
    assert plan.num_draft_tokens == longest
    assert limiter.before_passing(plan) is HALF


def test_the_batch_and_the_pace_do_not_change_that() -> None:
    for batch, step_s in ((1, 4.0), (4, 8.0)):
        now = replace(state(batch), num_outstanding_tokens=101 * batch)
        assert on_trial(now, step_s).pass_on(now, HALF).num_draft_tokens == 2


def test_what_a_trial_has_lost_shortens_the_next_draft_down_to_one_token() -> None:
    now = replace(state(), num_outstanding_tokens=301)
    limiter = on_trial(now)
    lengths = []
    while limiter.drafts:
        lengths.append(limiter.pass_on(now, HALF).num_draft_tokens)
        limiter.observe(now, 1, 8.0 + 4.0 * min(lengths[-1], 2), drafted=True)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] >= 1
    assert limiter.pass_on(now, HALF) is limiter.no_draft


def test_once_it_pays_drafts_have_their_length() -> None:
    now = replace(state(), num_outstanding_tokens=301)
    limiter = on_trial(now)
    for _ in range(40):
        plan = limiter.pass_on(now, HALF)
        limiter.observe(now, 4, 16.0, drafted=plan.drafts)
    assert limiter.pass_on(now, HALF) is HALF
    assert limiter.before_passing(HALF) is HALF
    assert limiter.gate.reason.startswith("drafting")


def test_what_the_model_does_not_draft_is_not_shortened() -> None:
    now = replace(state(), num_outstanding_tokens=101)
    assert on_trial(now).pass_on(now, LOOKUP) is LOOKUP
