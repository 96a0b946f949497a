from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rayspec import demo
from rayspec.choices import FULL, SKIP
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.decode.search import Found, FoundDraft, Knapsack
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.learning import ROUNDS_TO_REVIEW
from rayspec.strategies.knapspec import Auto, KnapSpec
from tests.demo_model import EOS, demo_parts, demo_prompts
from tests.engines import RowClock, complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import greedy
from tests.strategy_cases import Asker, latency_model, result
from tests.strategy_cases import state as batch_state

OWN = SpeculationOptions(strategy="knapspec")  # nothing is copied
SKIPS_ONE = Found([FoundDraft((FULL,) * 31 + (SKIP,), 0.9, 3, 0.9, 0.5)], 8, 0.25)


@pytest.fixture
def demo_latency() -> LatencyModel:
    """Made up, because a profile that was measured on a busy machine may promise no gain."""
    return latency_model(16, sublayer_s=1e-3, row_s=1e-5, round_s=1e-3)


def _knapspec(latency: LatencyModel, **options: Any) -> Auto:
    values: dict[str, Any] = {"optimise_share": 1.0, "num_search_tokens": 6}
    return Auto(SpeculationOptions(**(values | options)), latency, looks_up=False)


@pytest.mark.parametrize("verification", few_of(["coupled", "rejection"], ["coupled"]))
def test_on_the_demo_model_its_plans_draft_and_change_no_token(demo_latency: LatencyModel, verification: str) -> None:
    prompts = demo_prompts(2, 12)
    strategy = _knapspec(demo_latency, gate=False)
    engine = engine_with(
        demo_parts(), strategy, verification=verification, max_draft_tokens=16, eos=(EOS,), max_num_seqs=2
    )
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=120))
    expected = greedy(demo.model_path(), prompts, 120, eos=(EOS,))
    assert tokens_of(outputs) == expected
    assert engine.stats.num_draft_tokens > 20
    assert engine.stats.acceptance_rate is not None
    assert engine.stats.acceptance_rate > 0.5
    drafting = [record for record in engine.stats.plans if record.plan.drafts]
    assert drafting
    for record in drafting:
        assert 0 < record.plan.choices.count(SKIP) < 32
        assert record.predicted_tpt > record.plain_tpt > 0
        assert record.plan.source == "knapspec"
        assert record.reason
    used = [record for record in drafting if record.num_tokens]
    assert used
    assert all(record.measured_tpt is not None and record.observed_acceptance is not None for record in used)


def test_a_plan_that_only_looked_good_is_dropped(demo_latency: LatencyModel) -> None:
    """Predictions say that sublayers take all the time; in truth rows do, so no draft pays."""
    clock = RowClock()
    engine = engine_with(
        demo_parts(), _knapspec(demo_latency), max_draft_tokens=16, wrap=clock.count, clock=clock, speculation=OWN
    )
    output = complete(engine, demo_prompts(1, 10), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))[0]
    stats = engine.stats
    assert output.error is None
    assert any(record.plan.drafts for record in stats.plans)
    assert stats.num_draft_tokens > 0
    assert stats.num_plain_rounds > 0.5 * stats.num_rounds


def _with_copies(latency: LatencyModel) -> LatencyModel:
    copies = {f"{kind} int4": Curve(rows=(1, 4096), base_s=(2e-4, 2e-4)) for kind in ("attention", "mlp")}
    return replace(latency, curves={**latency.curves, **copies})


def test_quantised_copies_are_tried_before_a_search(demo_latency: LatencyModel) -> None:
    """Where they are measured to be cheap, and where the sublayer has one. A first search stays due."""
    strategy = KnapSpec(SpeculationOptions(), _with_copies(demo_latency))
    asker = Asker(lambda question: SKIPS_ONE)
    state = replace(batch_state(), num_outstanding_tokens=10, elapsed_s=0.0)
    record = strategy.search(state, asker)
    assert record is not None
    assert record.reason == "before a search: quantised copies"
    assert set(strategy.plan.choices) == {"int4"}
    later = replace(state, num_outstanding_tokens=100_000)
    for _ in range(40):
        strategy.observe(later, strategy.plan, result([8], [8]), 9, 1.0)
        strategy.search(later, asker)
    assert asker.asked


@pytest.mark.parametrize("is_unready", [False, True])
def test_the_time_of_passes_that_are_compiled_or_captured_does_not_count(
    is_unready: bool, demo_latency: LatencyModel
) -> None:
    """A draft of which the first rounds take ten times as long as predicted; all of it is accepted."""
    strategy = Auto(SpeculationOptions(), _with_copies(demo_latency))
    state = replace(batch_state(), num_outstanding_tokens=10_000)
    drafted = 0
    for _ in range(40):
        chosen = strategy.choose(state)
        number = chosen.plan.num_draft_tokens
        slow = 10 if drafted < 3 and number else 1
        drafted += number > 0
        done = msgspec.structs.replace(result([number], [number]), is_unready=is_unready and slow > 1)
        strategy.observe(state, chosen, done, 1 + number, slow * (1 + number) / chosen.rates[chosen.way])  # type: ignore[attr-defined]
        strategy.search(state, lambda question, sequence_id=None: None)
    assert (drafted > 20) == is_unready


def test_no_budget_means_no_search(demo_latency: LatencyModel) -> None:
    strategy = _knapspec(demo_latency, optimise_share=0.0)
    engine = engine_with(demo_parts(), strategy, max_draft_tokens=16, speculation=OWN)
    complete(engine, demo_prompts(1, 8), SamplingParams(temperature=0, max_tokens=40))
    assert engine.stats.plans == []
    assert engine.stats.num_draft_tokens == 0
    assert engine.stats.optimise_s == 0


def _with_transfers(transfer_s: float) -> LatencyModel:
    """Of the 32 sublayers, twelve are fetched. 128 rows take ten times as long as one."""
    latency = latency_model(16, sublayer_s=1e-3, row_s=7e-5)
    return replace(latency, transfer_s=tuple(transfer_s * (8 <= index < 20) for index in range(32)))


@pytest.mark.parametrize(
    ("num_tokens", "transfer_s", "search_s", "max_states"),
    [
        (30, 0.0, 0.0, []),  # too little to save
        (120, 0.0, 0.0, [8]),  # by the latency model, 16 states of 8 tokens take 316 ms, and 8 states 173 ms
        (256, 0.0, 0.0, [16]),
        (30, 0.02, 0.0, [16]),  # weights on disk: much to save
        (256, 0.0, 0.1, []),  # on a GPU: the device would take 0.3 s, the host takes 32 times 0.1 s
    ],
)
def test_the_first_search_costs_little_of_what_it_may_save(
    num_tokens: int, transfer_s: float, search_s: float, max_states: list[int]
) -> None:
    state = replace(batch_state(), num_outstanding_tokens=num_tokens, elapsed_s=0.0)
    strategy = KnapSpec(SpeculationOptions(), replace(_with_transfers(transfer_s), search_s=search_s))
    asker = Asker(lambda question: SKIPS_ONE)
    for _ in range(3 * ROUNDS_TO_REVIEW):
        strategy.search(state, asker)
    asked = [(one.num_tokens, one.max_states) for one in asker.asked if isinstance(one, Knapsack)]
    assert asked == [(8, number) for number in max_states]


@pytest.mark.parametrize("slowness", [1.0, 10.0])
def test_a_first_search_is_as_slow_as_rounds_are(slowness: float) -> None:
    """On a busy machine it comes after as many rounds as on a quiet one, not when the same seconds have passed."""
    strategy, latency = KnapSpec(SpeculationOptions(), _with_transfers(0.0)), _with_transfers(0.0)
    asker = Asker(lambda question: SKIPS_ONE)
    state, num_rounds = replace(batch_state(), num_outstanding_tokens=10, elapsed_s=0.0), 0
    while not asker.asked:
        seconds = slowness * latency.decode_step_s(context=state.context, batch=1)
        state = replace(state, elapsed_s=state.elapsed_s + seconds)
        strategy.observe(state, strategy.plan, result([0], [0]), 1, seconds)
        strategy.search(state, asker)
        num_rounds += 1
    assert 250 < num_rounds < 300


def test_the_next_search_waits_until_its_share_of_the_time_allows_what_the_last_one_took() -> None:
    """The latency model predicts 0.3 seconds, but on this device a search takes 3. Ten tokens take 0.32 seconds."""
    strategy = KnapSpec(SpeculationOptions(), _with_transfers(0.0))
    asker = Asker(lambda question: Found([FoundDraft((SKIP,) * 32, 0.1, 0, None, 0.5)], 8, 3.0))
    asked_at_s: list[float] = []
    for index in range(4000):
        elapsed_s, searched_s = 0.32 * index, 3.0 * len(asker.asked)
        state = replace(batch_state(), num_outstanding_tokens=400, elapsed_s=elapsed_s, searched_s=searched_s)
        strategy.observe(state, strategy.plan, result([0], [0]), 10, 0.32)
        strategy.search(state, asker)
        asked_at_s += [elapsed_s] * (len(asker.asked) - len(asked_at_s))
    assert len(asked_at_s) > 1
    assert all(3.0 * number <= 0.02 * (when_s + 13) for number, when_s in enumerate(asked_at_s[1:], start=2))


def test_searches_that_find_no_plan_take_less_and_less_of_the_time() -> None:
    """A step takes 32 ms and a search a second; no draft ever agrees with the target."""
    strategy, spent_s, captured = KnapSpec(SpeculationOptions(), _with_transfers(0.0)), [0.0], 0
    asker = Asker(lambda question: Found([FoundDraft((SKIP,) * 32, 0.1, 0, None, 0.5)], 8, 1.0))
    for index in range(20_000):
        searched_s = float(len(asker.asked))
        state = replace(batch_state(), num_outstanding_tokens=200, elapsed_s=0.032 * index, searched_s=searched_s)
        captured += strategy.wants_captures
        strategy.observe(state, strategy.plan, result([0], [0]), 1, 0.032)
        strategy.search(state, asker)
        spent_s.append(float(len(asker.asked)))
    assert (spent_s[2000], spent_s[-1]) == (1.0, 3.0), "of 640 seconds; 2 % are 13"
    assert captured == len(asker.asked)
