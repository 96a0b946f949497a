"""Expected drafts against simulated ones, and the rule as learned from use."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rayspec.planning.acceptance import expected_tokens
from rayspec.planning.stopping import NEVER, DraftWhileSure, StopRecord, StopRule, expected_draft


def simulate(acceptance: float, length: int, rule: StopRule, rng: random.Random) -> tuple[int, int]:
    """One draft: tokens drafted, and accepted."""
    num_accepted, sound = 0, True
    for step in range(1, length + 1):
        sound = sound and rng.random() < acceptance
        num_accepted += sound
        if rng.random() < (rule.misfires if sound else rule.detects):
            return step, num_accepted
    return length, num_accepted


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
def test_without_a_rule_drafts_reach_their_length(acceptance: float) -> None:
    expected = expected_draft([acceptance], 7, NEVER)
    assert expected.num_drafted[0] == pytest.approx(np.arange(1, 8))
    assert 1 + expected.num_accepted[0] == pytest.approx(expected_tokens(acceptance, np.arange(1, 8)))


@pytest.mark.parametrize("acceptance", [0.2, 0.8, 0.97])
@pytest.mark.parametrize("rule", [StopRule(detects=0.6, misfires=0.05), StopRule(detects=1.0), StopRule(misfires=0.3)])
def test_expected_drafts_are_the_mean_of_simulated_ones(acceptance: float, rule: StopRule) -> None:
    rng = random.Random(0)
    drafts = np.array([simulate(acceptance, 9, rule, rng) for _ in range(20_000)])
    expected = expected_draft([acceptance, 0.5], 9, rule)
    assert expected.num_drafted.shape == expected.num_accepted.shape == (2, 9)
    assert drafts.mean(0) == pytest.approx([expected.num_drafted[0, -1], expected.num_accepted[0, -1]], rel=0.03)


def test_the_rule_is_learned_from_drafts() -> None:
    record, true_rule, rng = StopRecord(), StopRule(detects=0.9, misfires=0.15), random.Random(1)
    assert record.rule == StopRule(detects=0.6, misfires=0.05)
    for _ in range(2000):
        num_accepted, ended = 0, False
        for _step in range(16):
            accepted = rng.random() < 0.8
            num_accepted += accepted
            ended = rng.random() < (true_rule.misfires if accepted else true_rule.detects)
            if not accepted or ended:
                break
        record.observe(num_accepted=num_accepted, num_tested=num_accepted + (not accepted), ended=ended)
    assert record.rule.detects == pytest.approx(true_rule.detects, abs=0.08)
    assert record.rule.misfires == pytest.approx(true_rule.misfires, abs=0.05)


def test_a_threshold_ends_drafts_whose_last_token_was_below_it() -> None:
    rule = DraftWhileSure(threshold=0.5)
    assert rule([[0.4, 0.6], [0.9, 0.4], [0.5], [0.1]]) == [True, False, True, False]
