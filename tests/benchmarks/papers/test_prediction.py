from __future__ import annotations

from functools import partial

import pytest

from benchmarks.papers.prediction import (
    best_length,
    needed_acceptance,
    needed_cost,
    relative_gain,
    relative_latency,
)
from rayspec.choices import FULL, SKIP

ACCEPTANCES = (0.80, 0.85, 0.90, 0.93, 0.95, 0.97)
GAINS = {  # worked out apart from S = (1 - a^(g+1)) / (1 - a) / (g c + 1), c = 1 - skipped: best S, and its g
    0.3: ((1.06, 1), (1.09, 1), (1.13, 2), (1.16, 2), (1.20, 3), (1.24, 4)),
    0.4: ((1.12, 1), (1.17, 2), (1.23, 2), (1.29, 3), (1.33, 4), (1.39, 5)),
    0.5: ((1.22, 2), (1.29, 2), (1.38, 3), (1.45, 4), (1.51, 5), (1.60, 7)),
    0.6: ((1.36, 2), (1.45, 3), (1.58, 4), (1.68, 5), (1.77, 6), (1.90, 8)),
    0.7: ((1.55, 3), (1.69, 4), (1.87, 5), (2.03, 6), (2.18, 8), (2.37, 11)),
}


@pytest.mark.parametrize("skipped", GAINS)
def test_the_best_gain_for_a_cost_and_its_length(skipped: float) -> None:
    for acceptance, (gain, length) in zip(ACCEPTANCES, GAINS[skipped], strict=True):
        decision = best_length(relative_latency(1 - skipped), (FULL, SKIP), acceptance, context=0, max_draft_tokens=18)
        assert decision.predicted_gain == pytest.approx(gain, abs=0.01)
        assert decision.num_draft_tokens == length


@pytest.mark.parametrize(("acceptance", "cost"), [(0.6, 0.2), (0.944, 0.51), (0.99, 0.7), (0.9, 0.95)])
def test_what_a_gain_needs_is_what_gave_it(acceptance: float, cost: float) -> None:
    gain = relative_gain(cost, acceptance, max_draft_tokens=18)
    assert needed_cost(gain, acceptance, max_draft_tokens=18) == pytest.approx(cost, abs=1e-5)
    found = needed_acceptance(gain, partial(relative_gain, cost, max_draft_tokens=18))
    assert found == pytest.approx(acceptance, abs=1e-5)
