from __future__ import annotations

from dataclasses import replace

from rayspec.choices import FULL, SKIP
from rayspec.decode.selection.trials import Proposed, Trials
from rayspec.types import Plan, no_draft
from tests.decode.selecting import latency_model, state

PLAN = Plan(choices=(FULL, SKIP, FULL, SKIP), num_draft_tokens=8, source="test")


def test_a_trial_with_shorter_drafts_is_judged_by_what_was_predicted_for_them() -> None:
    """Drafts of eight tokens are twice as fast as plain decoding. The trial can afford short ones only, which are
    slower, as predicted."""
    trials, lengths = Trials(latency_model(2), "plain"), []
    now = replace(state(), num_outstanding_tokens=60)
    ways = {
        "plain": Proposed(no_draft(4, "plain"), 0.25),
        "plan": Proposed(PLAN, 0.5, shorter=lambda longest: 0.24),
    }
    for _ in range(40):
        plan = trials.take(now, ways)
        rate = 0.25 if not plan.drafts else 0.5 if plan.num_draft_tokens == 8 else 0.24
        num_tokens = 3 if plan.drafts else 1
        trials.observe(now, num_tokens, num_tokens / rate)
        lengths.append(plan.num_draft_tokens)
    assert 0 < min(length for length in lengths if length) < 8
    assert set(lengths[-10:]) == {8}
