from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from rayspec.planning.gate import Gate

from tests.exhaustive import few_of

ACCEPTANCE, NUM_DRAFT_TOKENS = 0.85, 5
DRAFT_TOKENS = sum(ACCEPTANCE**k for k in range(NUM_DRAFT_TOKENS + 1))


def simulate(
    seed: int, gain: Callable[[int], float], num_rounds: int, new_plan_every: int | None = None
) -> tuple[float, float]:
    """Time lost against always knowing the faster mode, and the share of rounds in it.

    A plain round takes 1 s, a drafted one as long as its mean tokens at `gain` times that rate. Every round's time is
    disturbed by 10 %, and one of fifty takes 5 to 21 times as long.
    """
    rng, gate = np.random.default_rng(seed), Gate()
    for _ in range(4):
        gate.observe("plain", 1, 1.0)
    gate.new_plan(1.3)
    spent_s = oracle_s = num_right = 0.0
    for index in range(num_rounds):
        if new_plan_every and index and index % new_plan_every == 0:
            gate.new_plan(1.3)
        mode, now = gate.choose(), gain(index)
        mean_tokens, seconds = (1.0, 1.0) if mode == "plain" else (DRAFT_TOKENS, DRAFT_TOKENS / now)
        tokens = 1 + (mode == "draft") * int((rng.random(NUM_DRAFT_TOKENS) < ACCEPTANCE).cumprod().sum())
        spent_s += seconds
        oracle_s += mean_tokens / max(1.0, now)
        num_right += (mode == "draft") == (now > 1)
        gate.observe(mode, tokens, seconds * rng.lognormal(0, 0.1) * (1 + (rng.random() < 0.02) * rng.uniform(4, 20)))
    return spent_s / oracle_s - 1, num_right / num_rounds


@pytest.mark.parametrize(
    ("gain", "num_rounds", "most_lost", "least_right"),
    [
        (lambda index: 0.45, 4000, 0.02, 0.95),
        (lambda index: 0.8, 4000, 0.02, 0.95),
        (lambda index: 1.25, 3000, 0.01, 0.95),
        (lambda index: 1.6, 3000, 0.01, 0.95),
        (lambda index: 0.7 if index < 3000 else 1.4, 9000, 0.03, 0.85),
        (lambda index: 1.4 if index < 3000 else 0.7, 6000, 0.03, 0.95),
    ],
    ids=["collapse", "never pays", "pays", "pays much", "comes to pay", "stops paying"],
)
def test_close_to_the_oracle(
    gain: Callable[[int], float], num_rounds: int, most_lost: float, least_right: float
) -> None:
    """That a draft has come to pay is seen in probes only, and how often these run is what bounds their cost."""
    lost, right = zip(*(simulate(seed, gain, num_rounds) for seed in range(4)), strict=True)
    assert np.mean(lost) < most_lost
    assert max(lost) < most_lost + 0.02
    assert np.mean(right) > least_right


@pytest.mark.parametrize("gain", [0.95, 1.05])
def test_where_it_hardly_matters_little_is_lost(gain: float) -> None:
    assert np.mean([simulate(seed, lambda index: gain, 3000)[0] for seed in range(4)]) < 0.03


def test_plans_that_keep_coming_and_never_pay() -> None:
    assert np.mean([simulate(seed, lambda index: 0.5, 3000, new_plan_every=100)[0] for seed in range(4)]) < 0.03


def speed_up(seed: int, gain: float, total: int, acceptance: float = ACCEPTANCE, promised: float = 1.001) -> float:
    """Of so many tokens in all over plain decoding, where the gate is told how many are to come."""
    rng, gate = np.random.default_rng(seed), Gate()
    mean_tokens = sum(acceptance**k for k in range(NUM_DRAFT_TOKENS + 1))
    num_tokens = num_rounds = 0
    spent_s = 0.0
    while num_tokens < total:
        if num_rounds == 4:
            gate.new_plan(promised)
        mode = gate.choose()
        tokens = 1 + (mode == "draft") * int((rng.random(NUM_DRAFT_TOKENS) < acceptance).cumprod().sum())
        seconds = (mean_tokens / gain if mode == "draft" else 1.0) * rng.lognormal(0, 0.05)
        num_tokens, num_rounds, spent_s = num_tokens + tokens, num_rounds + 1, spent_s + seconds
        gate.observe(mode, tokens, seconds, num_outstanding_tokens=max(total - num_tokens, 0))
    return num_tokens / spent_s


@pytest.mark.parametrize("total", few_of([128, 256, 512, 4096], [128, 512]))
@pytest.mark.parametrize(("gain", "acceptance"), [(0.3, 0.1), (0.6, 0.5), (0.9, 0.8)])
def test_trials_of_little_work_are_cheap(gain: float, acceptance: float, total: int) -> None:
    assert np.mean([speed_up(seed, gain, total, acceptance) for seed in range(24)]) > 0.97


def test_what_promises_much_may_cost_more_in_trials_and_is_found_sooner() -> None:
    """In 128 tokens, of a draft that keeps its promise and of one that does not."""
    found = {promised: [speed_up(seed, 1.6, 128, promised=promised) for seed in range(24)] for promised in (1.001, 1.6)}
    assert np.mean(found[1.6]) > np.mean(found[1.001]) > 1.2
    assert np.mean([speed_up(seed, 0.6, 128, 0.5, promised=1.6) for seed in range(24)]) > 0.95


@pytest.mark.parametrize(("total", "least"), [(128, 1.25), (512, 1.5)])
def test_what_pays_is_found_in_little_work(total: int, least: float) -> None:
    assert np.mean([speed_up(seed, 1.6, total, promised=1.3) for seed in range(24)]) > least


def steady(gate: Gate, num_rounds: int, draft_s: float, batch: Callable[[int], int] = lambda index: 1) -> list[str]:
    """Rounds without noise: one token a sequence plain, three drafted. Seconds do not depend on the batch."""
    modes = []
    for index in range(num_rounds):
        mode, size = gate.choose(), batch(index)
        modes.append(mode)
        tokens, seconds = (size, 1.0) if mode == "plain" else (3 * size, draft_s)
        gate.observe(mode, tokens, seconds, reference_rate=float(size))
    return modes


def test_starts_plain_and_tries_a_plan_once_it_knows_the_plain_rate() -> None:
    gate = Gate()
    assert set(steady(gate, 200, 1.0)) == {"plain"}
    assert "no plan" in gate.reason
    assert not gate.is_open
    gate.new_plan(1.5)
    assert gate.is_open
    modes = steady(gate, 500, 2.0)
    assert modes[0] == "draft"
    assert modes.count("plain") <= 40
    assert gate.reason.startswith("drafting: measured x1.5")


def test_a_plan_waits_for_plain_rounds_and_is_open_until_it_has_lost() -> None:
    gate = Gate()
    gate.new_plan(1.5)
    assert gate.is_open
    modes = steady(gate, 40, 6.0)
    assert modes[:5] == ["plain"] * 4 + ["draft"]
    assert not gate.is_open


def test_rounds_of_neither_mode_bring_the_next_probe_nearer() -> None:
    gate = Gate()
    gate.new_plan(1.5)
    steady(gate, 40, 6.0)
    assert gate.choose() == "plain"
    for _ in range(1000):
        gate.pass_over(1.0, num_outstanding_tokens=None)
    assert gate.choose() == "draft"
    assert steady(gate, 100, 2.0)[-1] == "draft"


def test_a_plan_not_to_draft_is_obeyed_at_once() -> None:
    gate = Gate()
    steady(gate, 10, 2.0)
    gate.new_plan(1.5)
    steady(gate, 100, 2.0)
    gate.new_plan(1.0)
    assert set(steady(gate, 300, 2.0)) == {"plain"}


def test_probes_of_a_loser_become_rare() -> None:
    gate = Gate()
    steady(gate, 10, 6.0)
    gate.new_plan(1.5)
    modes = steady(gate, 6000, 6.0)
    assert modes[:1000].count("draft") > modes[-1000:].count("draft")
    assert 0 < modes[2000:].count("draft") < 0.01 * 4000 * 2
    assert gate.reason.startswith("not drafting: measured x0.50")


def test_a_shrinking_batch_is_not_taken_for_a_slower_mode() -> None:
    gate = Gate()
    steady(gate, 10, 2.0, lambda index: 32)
    gate.new_plan(1.5)
    modes = steady(gate, 1000, 2.0, lambda index: max(1, 32 - index // 30))
    assert modes.count("plain") < 60


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError):
        Gate().observe("plain", 1, 0.0)
