"""Rounds with made-up times; the gate must come close to always knowing the faster way."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayspec.choices import FULL, SKIP
from rayspec.decode.search import Values
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.strategies.fixed import FixedPlan, lookup_plan
from rayspec.strategies.gate import PLAIN, Gate, Gated, Proposed
from rayspec.types import Plan, no_draft
from tests.exhaustive import few_of
from tests.strategy_cases import Asker, latency_model, round_of, run_round, state

ACCEPTANCE, NUM_DRAFT_TOKENS = 0.85, 5
DRAFT_TOKENS = sum(ACCEPTANCE**k for k in range(NUM_DRAFT_TOKENS + 1))
LATENCY = latency_model(2)
PLAN = Plan(choices=(FULL, SKIP, FULL, FULL), num_draft_tokens=4, source="test")
NO_PLAN = no_draft(4, "none")
ONE_TOKEN = replace(PLAN, num_draft_tokens=1)  # no trial makes it shorter
ASKER = Asker(lambda question: Values([], 0.0))
ENDLESS = replace(state(), num_outstanding_tokens=1e12)


def ways(rates: Mapping[str, float], plan: Plan = ONE_TOKEN, **changes: Any) -> dict[str, Proposed]:
    return {
        way: Proposed(NO_PLAN, rate) if way == PLAIN else Proposed(plan, rate, **changes) for way, rate in rates.items()
    }


def simulate(
    seed: int, gain: Callable[[int], float], num_rounds: int, new_plan_every: int | None = None
) -> tuple[float, float]:
    """Time lost against always knowing the faster way, and the share of rounds in it.

    A plain round takes 1 s, a drafted one as long as its mean tokens at `gain` times that rate, where 1.3 is predicted.
    Every round's time is disturbed by 10 %, and one of fifty takes 5 to 21 times as long.
    """
    rng, gate = np.random.default_rng(seed), Gate(LATENCY)
    spent_s = oracle_s = num_right = 0.0
    for index in range(num_rounds):
        if new_plan_every and index and index % new_plan_every == 0:
            gate.renew("plan")
        taken = gate.choose(ENDLESS, ways({PLAIN: 1.0, "plan": 1.3} if index >= 4 else {PLAIN: 1.0}))
        drafts, now = taken.way == "plan", gain(index)
        mean_tokens, seconds = (DRAFT_TOKENS, DRAFT_TOKENS / now) if drafts else (1.0, 1.0)
        tokens = 1 + drafts * int((rng.random(NUM_DRAFT_TOKENS) < ACCEPTANCE).cumprod().sum())
        spent_s += seconds
        oracle_s += mean_tokens / max(1.0, now)
        num_right += drafts == (now > 1)
        disturbance = rng.lognormal(0, 0.1) * (1 + (rng.random() < 0.02) * rng.uniform(4, 20))
        gate.observe(ENDLESS, taken, tokens, seconds * disturbance)
    return spent_s / oracle_s - 1, num_right / num_rounds


@pytest.mark.parametrize(
    ("gain", "num_rounds", "most_lost", "least_right"),
    [
        (lambda index: 0.45, 4000, 0.02, 0.95),
        (lambda index: 0.95, 3000, 0.03, 0.0),
        (lambda index: 1.25, 3000, 0.015, 0.94),
        (lambda index: 0.7 if index < 3000 else 1.4, 9000, 0.03, 0.85),
        (lambda index: 1.4 if index < 3000 else 0.7, 6000, 0.03, 0.95),
    ],
    ids=["collapse", "hardly matters", "pays", "comes to pay", "stops paying"],
)
def test_near_the_oracle(gain: Callable[[int], float], num_rounds: int, most_lost: float, least_right: float) -> None:
    """That a draft has come to pay is seen in trials only, and how often these happen is what bounds their cost."""
    lost, right = zip(*(simulate(seed, gain, num_rounds) for seed in range(4)), strict=True)
    assert np.mean(lost) < most_lost
    assert max(lost) < most_lost + 0.03
    assert np.mean(right) > least_right


def speed_up(seed: int, gain: float, total: int, acceptance: float = ACCEPTANCE, predicted: float = 1.001) -> float:
    """Of so many tokens in all over plain decoding, where it is known how many are to come. Drafts of a trial are as
    long as the trial may cost."""
    step_s = (sum(acceptance**k for k in range(NUM_DRAFT_TOKENS + 1)) / gain - 1.0) / NUM_DRAFT_TOKENS
    rng, gate = np.random.default_rng(seed), Gate(latency_model(1, sublayer_s=step_s))
    plan = Plan(choices=(FULL, SKIP), num_draft_tokens=NUM_DRAFT_TOKENS, source="test")
    num_tokens = num_rounds = 0
    spent_s = 0.0
    while num_tokens < total:
        now = replace(state(), num_outstanding_tokens=total - num_tokens)
        rates = {PLAIN: 1.0, "plan": predicted} if num_rounds >= 4 else {PLAIN: 1.0}
        taken = gate.choose(now, ways(rates, plan, shorter=lambda longest: _predicted(longest, acceptance, predicted)))
        length = taken.plan.num_draft_tokens
        tokens = 1 + int((rng.random(length) < acceptance).cumprod().sum())
        seconds = (1.0 + length * step_s) * rng.lognormal(0, 0.05)
        num_tokens, num_rounds, spent_s = num_tokens + tokens, num_rounds + 1, spent_s + seconds
        gate.observe(now, taken, tokens, seconds)
    return num_tokens / spent_s


def _predicted(length: int, acceptance: float, predicted: float) -> float:
    """Rate of drafts of at most so many tokens, where those of full length make `predicted`."""
    tokens = [sum(acceptance**k for k in range(count + 1)) for count in range(NUM_DRAFT_TOKENS + 1)]
    step_s = (tokens[-1] / predicted - 1.0) / NUM_DRAFT_TOKENS
    return max(tokens[count] / (1 + count * step_s) for count in range(1, length + 1))


@pytest.mark.parametrize("total", few_of([128, 256, 512, 4096], [128, 512]))
@pytest.mark.parametrize(("gain", "acceptance"), [(0.3, 0.1), (0.6, 0.5), (0.9, 0.8)])
def test_trials_of_little_work_are_cheap(gain: float, acceptance: float, total: int) -> None:
    assert np.mean([speed_up(seed, gain, total, acceptance) for seed in range(24)]) > 0.97


@pytest.mark.parametrize(("total", "least"), [(128, 1.25), (512, 1.5)])
def test_what_pays_is_found_in_little_work(total: int, least: float) -> None:
    assert np.mean([speed_up(seed, 1.6, total, predicted=1.3) for seed in range(24)]) > least


def steady(gate: Gate, num_rounds: int, draft_s: float, pace: Callable[[int], float] = lambda index: 1.0) -> list[str]:
    """Rounds without noise: one token plain, three drafted, on a machine that becomes slower or faster."""
    found = []
    for index in range(num_rounds):
        taken = gate.choose(ENDLESS, ways({PLAIN: 1.0, "plan": 1.2}))
        num_tokens, seconds = (1, 1.0) if taken.way == PLAIN else (3, draft_s)
        gate.observe(ENDLESS, taken, num_tokens, seconds * pace(index))
        found.append(taken.way)
    return found


def test_a_plan_that_pays_is_taken_and_one_that_does_not_is_left() -> None:
    assert set(steady(Gate(LATENCY), 100, 2.0)[-60:]) == {"plan"}
    found = steady(Gate(LATENCY), 9, 2.7)
    assert [one != other for one, other in itertools.pairwise(found)][:6] == [True] * 6, "rounds of a trial alternate"
    assert steady(Gate(LATENCY), 100, 4.0)[-60:].count("plan") < 6


@pytest.mark.parametrize(("draft_s", "best"), [(2.4, "plan"), (3.6, PLAIN)])
def test_a_machine_that_changes_its_pace_does_not_decide(draft_s: float, best: str) -> None:
    for slower in (0.6, 1.7):
        pace = [slower if index % 160 > 80 else 1.0 for index in range(400)]
        assert steady(Gate(LATENCY), 400, draft_s, pace.__getitem__)[100:].count(best) > 0.75 * 300


def test_ways_that_are_trusted_are_taken_at_their_prediction_until_rounds_show_otherwise() -> None:
    gate, faster = Gate(LATENCY, trusted=("lookup",)), ways({PLAIN: 1.0, "lookup": 2.0})
    assert gate.choose(ENDLESS, ways({PLAIN: 1.0, "lookup": 0.9})).way == PLAIN
    for _ in range(12):
        taken = gate.choose(ENDLESS, faster)
        assert taken.way == "lookup"
        gate.observe(ENDLESS, taken, 1, 0.5)
    for _ in range(12):
        gate.observe(ENDLESS, taken, 1, 2.0)
    assert gate.factor("lookup") < 0.5
    assert gate.choose(ENDLESS, faster).way == PLAIN


def test_a_trial_that_a_new_plan_ends_has_cost_what_it_lost() -> None:
    gate, rates = Gate(LATENCY), {PLAIN: 1.0, "plan": 1.2}
    steady(gate, 1, 1.0)
    taken = gate.choose(ENDLESS, ways(rates))
    assert taken.way == gate.trial == "plan"
    gate.observe(ENDLESS, taken, 1, 3.0)
    remaining_loss_s = gate.remaining_loss_s(rates)
    gate.renew("plan")
    assert gate.trial is None
    assert gate.remaining_loss_s(rates) == pytest.approx(remaining_loss_s)


def test_a_trial_with_shorter_drafts_is_judged_by_what_was_predicted_for_them() -> None:
    """Drafts of eight tokens are twice as fast as plain decoding. The trial can afford short ones only, which are
    slower, as predicted."""
    gate, lengths = Gate(LATENCY), []
    now, plan = replace(state(), num_outstanding_tokens=60), replace(PLAN, num_draft_tokens=8)
    for _ in range(40):
        taken = gate.choose(now, ways({PLAIN: 0.25, "plan": 0.5}, plan, shorter=lambda longest: 0.24))
        lengths.append(taken.plan.num_draft_tokens)
        num_tokens = 3 if taken.plan.drafts else 1
        gate.observe(now, taken, num_tokens, num_tokens / {0: 0.25, 8: 0.5}.get(lengths[-1], 0.24))
    assert 0 < min(length for length in lengths if length) < 8
    assert set(lengths[-10:]) == {8}


def test_the_status_says_why_rounds_do_not_draft() -> None:
    gate, rates = Gate(LATENCY), ways({PLAIN: 1.0, "plan": 1.2})
    assert gate.status(None) == "drafting is off (no plan is predicted to be faster)"
    gate.choose(ENDLESS, ways({PLAIN: 1.0}))
    assert gate.status("plan") == "drafting is off (plan not tried yet)"
    steady(gate, 1, 1.0)
    gate.choose(ENDLESS, rates)
    assert gate.status("plan") == "drafting is off (some rounds try the plan)"
    steady(gate, 60, 2.0)
    assert gate.status("plan") == "drafting is on (measured 1.50x plain decoding, predicted 1.20x)"
    steady(gate := Gate(LATENCY), 10, 4.0)
    assert gate.status("plan") == "drafting is off (measured 0.75x plain decoding, predicted 1.20x)"


class _Strategy(FixedPlan):
    """One plan; counts what it is asked, and can let its searches take time."""

    def __init__(self, plan: Plan = PLAN, search_s: float = 0.0) -> None:
        super().__init__(plan, capture=True)
        self.now = 0.0
        self.search_s = search_s
        self.num_searches = 0
        self.seen: list[Plan] = []
        self.got_its_own = True

    def take(self, plan: Plan) -> None:
        self.chosen = replace(self.chosen, plan=plan)

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self.seen.append(chosen.plan)
        self.got_its_own = self.got_its_own and (chosen is self.chosen or not chosen.plan.drafts)

    def search(self, *arguments: Any) -> None:
        self.num_searches += 1
        self.now += self.search_s


def _gated(strategy: _Strategy) -> Gated:
    return Gated(strategy, LATENCY, clock=lambda: strategy.now)


def _run(strategy: _Strategy, *, num_accepted: int, draft_s: float, num_rounds: int = 600) -> tuple[Gated, list[bool]]:
    """Plain rounds take a second. Returns which rounds drafted."""
    gated = _gated(strategy)
    drafted: list[bool] = []

    def seconds(plan: Plan) -> float:
        drafted.append(plan.drafts)
        return draft_s if plan.drafts else 1.0

    for _ in range(num_rounds):
        run_round(gated, ASKER, num_accepted=num_accepted, seconds=seconds)
    return gated, drafted


def test_the_time_of_searches_is_the_strategys() -> None:
    assert _run(_Strategy(search_s=0.0), num_accepted=2, draft_s=2.0)[1][-1]
    assert sum(_run(_Strategy(search_s=1.5), num_accepted=2, draft_s=2.0)[1]) < 60


def test_a_strategy_that_would_rather_not_draft_pays_for_finding_out() -> None:
    strategy = _Strategy(NO_PLAN)
    gated = _gated(strategy)
    strategy.take(PLAN)
    for _ in range(50):
        run_round(gated, ASKER, num_accepted=4)
    assert gated.choose(state()).plan.drafts
    strategy.take(NO_PLAN)
    strategy.search_s = 1.0
    for _ in range(200):
        run_round(gated, ASKER)
    assert strategy.num_searches < 200
    assert gated.choose(state()).plan is not strategy.chosen.plan


def test_while_plain_decoding_pays_the_strategy_searches_nothing() -> None:
    strategy = _Strategy()
    gated, drafted = _run(strategy, num_accepted=0, draft_s=3.0)
    assert strategy.got_its_own, "the very choice that it made, see `Strategy`"
    assert strategy.num_searches < 80
    assert not drafted[-1]
    assert not gated.choose(state()).capture
    assert len(strategy.seen) == 600, "it hears of every round"


def test_rounds_in_which_nobody_may_draft_say_nothing() -> None:
    """Sequences that are one token from their end."""
    gated = _gated(_Strategy())
    for _ in range(40):
        run_round(gated, ASKER, num_accepted=3, seconds=lambda plan: 2.0 if plan.drafts else 1.0)
    status = gated.status
    nothing = round_of(NO_PLAN)
    for _ in range(100):
        gated.observe(state(), gated.choose(state()), nothing, 1, 50.0)
    assert gated.status == status


def test_nothing_is_tried_in_rounds_that_are_not_observed() -> None:
    gated = _gated(_Strategy())
    for _ in range(40):
        plan = gated.choose(replace(state(), is_observed=False)).plan
        assert not plan.drafts
        run_round(gated, ASKER, num_accepted=0, seconds=lambda plan: 1.0)


@pytest.mark.parametrize(("row_s", "is_tried"), [(1.2, False), (0.1, True)])  # of a sublayer that takes 1 s for a row
def test_copies_that_could_not_pay_if_all_were_right_are_not_tried(row_s: float, is_tried: bool) -> None:
    gated = Gated(FixedPlan(lookup_plan(4, 10)), latency_model(2, row_s=row_s))
    drafted: list[bool] = []

    def seconds(plan: Plan) -> float:
        drafted.append(plan.drafts)
        return 1.0

    for _ in range(40):
        run_round(gated, ASKER, seconds=seconds)
    assert any(drafted) == is_tried
