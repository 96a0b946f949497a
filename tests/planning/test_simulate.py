from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from rayspec.choices import choices_of
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.simulate import Drafting, Simulated, SimulatedLoad, simulate
from tests.strategy_cases import verify_after_draft_s

NUM_LAYERS = 8
EXPECTED_TOKENS = 1 + 0.9 + 0.9**2 + 0.9**3  # of a draft of three tokens
CHOICES = choices_of([layer % 2 == 0 for layer in range(NUM_LAYERS) for _ in range(2)])


def latency(num_stages: int, **changes: Any) -> LatencyModel:
    """A millisecond of each kind of sublayer, an eighth of it for each row beyond the eighth."""
    curve = Curve(rows=(1, 8, 16), base_s=(1e-3, 1e-3, 2e-3))
    model = LatencyModel(
        sublayers=("attention", "mlp") * NUM_LAYERS,
        curves={"attention": replace(curve, kv_s=1e-7), "mlp": curve, "head": Curve(rows=(1, 64), base_s=(0.0, 0.0))},
        head="head",
        stages=tuple(layer * num_stages // NUM_LAYERS for layer in range(NUM_LAYERS) for _ in range(2)),
        transfer_s=(0.0,) * 2 * NUM_LAYERS,
    )
    return replace(model, **changes)


def endless(concurrency: int = 1, context: int = 1000) -> SimulatedLoad:
    return SimulatedLoad(prompt_tokens=context, output_tokens=None, concurrency=concurrency)


def decoded(model: LatencyModel, *, concurrency: int = 1, num_rounds: int = 60, **options: Any) -> Simulated:
    return simulate(model, endless(concurrency), num_tokens=num_rounds * concurrency, **options)


def drafting(length: int = 3, acceptance: float = 0.9) -> Drafting:
    return Drafting(choices=CHOICES, num_draft_tokens=length, acceptance=acceptance)


@pytest.mark.parametrize(("num_stages", "batch"), [(1, 3), (2, 1), (4, 3)])
def test_one_cohort_decodes_as_the_latency_model_says(num_stages: int, batch: int) -> None:
    model = latency(num_stages, hop_s=2e-3, round_s=5e-3)
    found = decoded(model, concurrency=batch)
    between = [model.decode_step_s(context=context, batch=batch) for context in (1000, 1060)]
    assert between[0] < found.round_s < between[1]
    assert found.tokens_per_s == pytest.approx(batch / found.round_s)
    assert found.num_tokens == batch * found.num_rounds


@pytest.mark.parametrize("num_stages", [1, 2])
def test_drafts_commit_as_many_tokens_and_take_as_long_as_the_formulas_say(num_stages: int) -> None:
    model = replace(latency(num_stages, hop_s=1e-3, round_s=1e-3), curves=latency(1).curves)
    found = decoded(model, num_rounds=4000, drafting=drafting())
    assert found.num_tokens / found.num_rounds == pytest.approx(EXPECTED_TOKENS, rel=0.02)
    step_s = model.draft_step_s(CHOICES, context=3000, batch=1)
    verify_s = verify_after_draft_s(model, rows=4, context=3000, batch=1, prefix=2)
    assert found.round_s == pytest.approx(3 * step_s + verify_s + 1e-3, rel=0.01)


def test_cohorts_fill_stages_and_no_more_than_that() -> None:
    model = latency(4)
    one = decoded(model).tokens_per_s
    rates = [decoded(model, concurrency=m, cohorts=m, num_rounds=300).tokens_per_s / one for m in (2, 4, 8)]
    assert rates == pytest.approx([2, 4, 4], rel=0.02)
    idle = [decoded(model, concurrency=m, cohorts=m, num_rounds=300).idle_shares for m in (1, 2, 8)]
    assert fmean(idle[0]) == pytest.approx(0.75, abs=0.01)
    assert fmean(idle[1]) == pytest.approx(0.5, abs=0.01)
    assert max(idle[2]) < 0.02


def test_the_slowest_stage_sets_the_pace_and_the_others_wait_for_it() -> None:
    stages = (0,) * 4 + (1,) * 12
    found = decoded(latency(1, stages=stages), concurrency=6, cohorts=6, num_rounds=300)
    slowest_s = sum(latency(1).sublayers_s(rows=1, context=1150, batch=1)[4:])
    assert found.tokens_per_s == pytest.approx(1 / slowest_s, rel=0.01)
    assert found.idle_shares == pytest.approx((2 / 3, 0), abs=0.02)


def test_the_engine_takes_one_result_at_a_time() -> None:
    model = latency(4, round_s=20e-3)
    assert decoded(model, concurrency=8, cohorts=8, num_rounds=200).tokens_per_s == pytest.approx(50, rel=0.02)


def test_each_stage_that_a_pass_visits_builds_its_batch_and_wakes_up() -> None:
    """With one stage neither counts twice: it has no hops, and the engine keeps its core busy."""
    for num_stages, extra_s in ((1, 1e-3), (4, 4 * 1e-3 + 4 * 2e-3)):
        model, plain = latency(num_stages, overhead_s=1e-3, wake_s=2e-3, hop_s=3e-3), latency(num_stages, hop_s=3e-3)
        assert decoded(model).round_s - decoded(plain).round_s == pytest.approx(extra_s, rel=0.01)


def test_a_stage_whose_sublayers_are_all_skipped_is_passed_over_but_for_the_ends() -> None:
    choices = choices_of([index >= 12 for index in range(2 * NUM_LAYERS)])  # of the last of four stages
    draft = Drafting(choices=choices, num_draft_tokens=1, acceptance=0.0)
    free = dict.fromkeys(("attention", "mlp", "head"), Curve(rows=(1, 64), base_s=(0.0, 0.0)))
    found = decoded(latency(4, hop_s=1e-3, curves=free), drafting=draft)
    assert found.round_s == pytest.approx((2 + 4) * 1e-3), "hops of the draft and of the verify"


def test_prompts_are_read_in_chunks_and_the_first_token_comes_after_the_last() -> None:
    model = latency(2, hop_s=1e-3)
    work = SimulatedLoad(prompt_tokens=50, output_tokens=1, concurrency=1, chunk_tokens=20)
    found = simulate(model, work, num_tokens=4)
    chunks_s = [model.verify_s(rows=rows, context=context, batch=1) for rows, context in ((20, 0), (20, 20), (10, 40))]
    assert found.first_token_s == pytest.approx([sum(chunks_s)] * 3)
    costly = replace(model, curves={name: replace(c, score_s=1e-6) for name, c in model.curves.items()})
    assert simulate(model, work, num_tokens=4, prefill=costly).first_token_s[0] > found.first_token_s[0]


def test_answers_that_end_make_room_for_the_next_request() -> None:
    model = latency(1)
    work = SimulatedLoad(prompt_tokens=64, output_tokens=20, concurrency=4, chunk_tokens=64)
    found = simulate(model, work, num_tokens=4 * 20 * 10)
    assert len(found.first_token_s) == pytest.approx(40, abs=4)
    shortest_s = model.verify_s(rows=64, context=0, batch=1)
    assert min(found.first_token_s) >= shortest_s * 0.999
    undisturbed = simulate(model, replace(work, output_tokens=None), num_tokens=800)
    assert found.tokens_per_s < undisturbed.tokens_per_s, "prompts take time, too"


def test_a_draft_is_no_longer_than_what_is_left_to_answer() -> None:
    model = latency(1)
    work = SimulatedLoad(prompt_tokens=1, output_tokens=3, concurrency=1)
    found = simulate(model, work, drafting=drafting(8, acceptance=1.0), num_tokens=300)
    assert found.num_tokens == 300
    assert found.num_tokens / found.num_rounds == pytest.approx(3, abs=0.03), "two in a round, one of the prompt"


def test_the_same_seed_is_the_same_run() -> None:
    work = SimulatedLoad(prompt_tokens=64, output_tokens=16, concurrency=6)
    runs = [simulate(latency(2), work, cohorts=3, drafting=drafting(), num_tokens=300, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
