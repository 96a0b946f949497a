from __future__ import annotations

from dataclasses import replace

import pytest

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


@pytest.mark.parametrize("row_s", [0.0, 0.5])
@pytest.mark.parametrize("widths", [(), (1, 2, 4, 8)])
def test_drafts_of_a_trial_are_shorter_where_their_rows_cost_more(row_s: float, widths: tuple[int, ...]) -> None:
    """A draft step takes 2 s, and a row of the verify `4 * row_s`; a branch has up to eight rows."""
    trials = Trials(latency_model(2, row_s=row_s), "plain")
    now = replace(state(), num_outstanding_tokens=1000)
    plan = replace(PLAN, num_draft_tokens=10**6, tree_widths=widths)
    ways = {"plain": Proposed(no_draft(4, "plain"), 0.25), "plan": Proposed(plan, 0.5)}
    trials.take(now, ways)
    trials.observe(now, 1, 4.0)
    taken = trials.take(now, ways)
    cost_s = 2 + 4 * row_s * (8 if widths else 1)
    assert taken.num_draft_tokens == max(1, int(trials.arbiter.remaining_loss_s(trials._last.rates) / cost_s))  # type: ignore[union-attr]
