from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.choices import FULL, SKIP, choices_of
from rayspec.planning.acceptance import best_choice, expected_tokens, shrink, tokens_per_time, worth_drafting
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.learning import Calibration, Correction, StopRule, expected_draft
from tests.exhaustive import few_of

NUM_SUBLAYERS = 8


def latency(rng: np.random.Generator, *, num_stages: int = 1) -> LatencyModel:
    curves = {
        kind: Curve(
            rows=(1, 4, 16),
            base_s=tuple(np.cumsum(rng.uniform(0.1, 1.0, 3)).tolist()),
            kv_s=float(rng.uniform(0, 1e-3)) if kind == "attention" else 0.0,
            score_s=float(rng.uniform(0, 1e-3)) if kind == "attention" else 0.0,
        )
        for kind in ("attention", "mlp", "head")
    }
    return LatencyModel(
        sublayers=("attention", "mlp") * (NUM_SUBLAYERS // 2),
        curves=curves,
        head="head",
        overhead_s=float(rng.uniform(0, 0.1)),
        round_s=float(rng.uniform(0, 0.5)),
        hop_s=float(rng.uniform(0, 0.5)),
        stages=tuple(k * num_stages // NUM_SUBLAYERS for k in range(NUM_SUBLAYERS)),
        transfer_s=tuple(rng.choice([0.0, 5.0], NUM_SUBLAYERS).tolist()),
    )


def test_expected_tokens() -> None:
    assert expected_tokens(1.0, 5) == 6
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(0.3, 0) == pytest.approx(1)
    for a in (0.1, 0.9, 1 - 1e-9, 1 - 1e-15):
        assert expected_tokens(a, 7) == pytest.approx(sum(a**k for k in range(8)))
    assert expected_tokens(np.asarray([[0.5], [0.9]]), np.arange(4)).shape == (2, 4)
    for a, g in ((-0.1, 1), (1.1, 1), (float("nan"), 1), (0.5, -1)):
        with pytest.raises(ValueError):
            expected_tokens(a, g)


def test_shrink() -> None:
    few, many = shrink(8, 8, 0.6), shrink(800, 800, 0.6)
    assert 0.6 < few < many < 1
    assert shrink(0, 0, 0.6) == pytest.approx(0.6)
    assert shrink(3, 3, 1.0) == 1
    with pytest.raises(ValueError):
        shrink(4, 3, 0.5)


def loop_choice(patterns, acceptance, model, context, batch, max_draft_tokens, reuse_prefix):  # type: ignore[no-untyped-def]
    plain_tpt = 1 / model.decode_step_s(context=context, batch=batch)
    best = (plain_tpt, None, 0)
    for index, choices in enumerate(patterns):
        if SKIP not in choices:
            continue
        prefix = choices.index(SKIP) if reuse_prefix else 0
        for length in range(1, max_draft_tokens + 1):
            seconds = length * model.draft_step_s(choices, context=context, batch=batch) + model.round_s
            seconds += model.verify_s(
                rows=batch * (length + 1), context=context, batch=batch, from_sublayer=prefix, leading_rows=batch
            )
            tpt = sum(acceptance[index] ** k for k in range(length + 1)) / seconds
            if tpt > best[0]:
                best = (tpt, index, length)
    return best if best[1] is not None else (plain_tpt, None, 0)


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), reuse=st.booleans(), num_stages=st.sampled_from([1, 4]))
def test_best_choice_equals_loops(seed: int, batch: int, reuse: bool, num_stages: int) -> None:
    rng = np.random.default_rng(seed)
    model = latency(rng, num_stages=num_stages)
    patterns = [(FULL,) * NUM_SUBLAYERS, *(choices_of((rng.random(NUM_SUBLAYERS) < 0.5).tolist()) for _ in range(5))]
    acceptance = [1.0, *rng.uniform(0.3, 1.0, 5)]
    choice = best_choice(patterns, acceptance, model, context=500, batch=batch, max_draft_tokens=6, reuse_prefix=reuse)
    tpt, candidate, length = loop_choice(patterns, acceptance, model, 500, batch, 6, reuse)
    assert (choice.candidate, choice.num_draft_tokens) == (candidate, length)
    assert choice.tpt == pytest.approx(tpt)
    assert choice.predicted_gain >= 1


@pytest.mark.parametrize("batch", few_of([1, 2, 8], [1, 2]))
def test_the_longest_draft_of_a_batch_sets_the_number_of_steps(batch: int) -> None:
    model, rng = latency(np.random.default_rng(0)), np.random.default_rng(1)
    choices, acceptance, length = (FULL, SKIP) * (NUM_SUBLAYERS // 2), 0.8, 12
    rule = StopRule(detects=0.7, misfires=0.1)
    seconds, num_tokens = 0.0, 0
    for _ in range(4000):
        drafting, sound = np.ones(batch, bool), np.ones(batch, bool)
        num_tokens += batch
        for _step in range(length):
            if not drafting.any():
                break
            seconds += model.draft_step_s(choices, context=500, batch=int(drafting.sum()))
            sound &= rng.random(batch) < acceptance
            num_tokens += int((sound & drafting).sum())
            drafting &= rng.random(batch) >= np.where(sound, rule.misfires, rule.detects)
    expected = expected_draft([acceptance], length, rule)
    verify_s = [model.verify_s(rows=batch * (count + 1), context=500, batch=batch) for count in range(length + 1)]
    rate = tokens_per_time(
        [choices], [acceptance], model, context=500, batch=batch, max_draft_tokens=length, stop_rule=rule,
        reuse_prefix=False,
    )[0, -1]  # fmt: skip
    others_s = np.interp(expected.num_drafted[0, -1], range(length + 1), verify_s) + model.round_s
    assert (1 + expected.num_accepted[0, -1]) / rate - others_s == pytest.approx(seconds / 4000, rel=0.05)
    assert batch * (1 + expected.num_accepted[0, -1]) == pytest.approx(num_tokens / 4000, rel=0.03)


def test_no_draft_where_none_pays_or_none_is_left() -> None:
    model = latency(np.random.default_rng(0))
    half = (FULL, SKIP) * (NUM_SUBLAYERS // 2)
    every = (FULL,) * NUM_SUBLAYERS
    for patterns, acceptance in (([], []), ([every], [1.0]), ([half, every], [0.0, 1.0])):
        choice = best_choice(patterns, acceptance, model, context=10, batch=1, max_draft_tokens=8)
        assert choice.candidate is None
        assert choice.num_draft_tokens == 0
        assert choice.tpt == choice.plain_tpt == pytest.approx(1 / model.decode_step_s(context=10, batch=1))


def test_worth_drafting() -> None:
    assert worth_drafting(0.9, 0.9, rate=1.0, step_s=0.7, row_s=0.1).tolist() == [True]
    assert worth_drafting(0.9, 0.9, rate=1.0, step_s=0.8, row_s=0.1).tolist() == [False]
    together = worth_drafting([0.9, 0.5, 0.05], 0.9, rate=1.0, step_s=0.9, row_s=0.1)
    assert together.tolist() == [True, True, False]  # two pay for the step; the third not even for its row
    assert not worth_drafting([0.5, 0.05], 0.9, rate=1.0, step_s=0.9, row_s=0.1).any()


@given(a=st.floats(0.3, 0.98), step_s=st.floats(0.05, 0.9))
def test_worth_drafting_finds_the_best_fixed_length(a: float, step_s: float) -> None:
    """With one acceptance for all, stopping at the best rate is the best length of the grid search."""
    lengths = np.arange(0, 200)
    rates = expected_tokens(a, lengths) / (lengths * (step_s + 0.01) + 1)
    length = 0
    while length < 199 and worth_drafting(a**length, a, rate=float(rates.max()), step_s=step_s, row_s=0.01)[0]:
        length += 1
    assert rates[length] == pytest.approx(rates.max(), rel=1e-6)


def test_correction_learns_the_offset_and_applies_it_to_others() -> None:
    correction = Correction()
    assert correction.apply([0.3, 0.9]) == pytest.approx([0.3, 0.9])
    rng = np.random.default_rng(0)
    for _ in range(500):
        correction.observe(0.9, num_accepted=int(rng.binomial(8, 0.7)), num_tested=8)
    assert correction.apply(0.9) == pytest.approx(0.7, abs=0.05)
    corrected = correction.apply([0.0, 0.5, 0.8, 0.95, 1.0])
    assert (np.diff(corrected) > 0).all()
    assert corrected[0] == 0
    assert corrected[-1] == 1
    for _ in range(500):
        correction.observe(0.9, num_accepted=int(rng.binomial(8, 0.9)), num_tested=8)
    assert correction.apply(0.9) == pytest.approx(0.9, abs=0.04)


def test_correction_hardly_believes_a_few_tokens() -> None:
    correction = Correction()
    correction.observe(0.9, num_accepted=0, num_tested=1)
    assert correction.apply(0.9) > 0.79
    with pytest.raises(ValueError):
        correction.observe(0.9, num_accepted=2, num_tested=1)


def test_calibration_learns_a_crooked_draft() -> None:
    calibration = Calibration()
    grid = np.linspace(0, 1, 21)
    assert calibration.curve.acceptance(grid) == pytest.approx(grid)
    rng = np.random.default_rng(0)
    for _ in range(400):
        confidence = 1 - rng.random(64) ** 2
        calibration.observe(confidence, rng.random(64) < confidence**2)
    learned = calibration.curve.acceptance(grid[4:])
    assert np.abs(learned - grid[4:] ** 2).max() < 0.1
    assert calibration.curve.acceptance(np.zeros((2, 3))).shape == (2, 3)
    assert ((calibration.curve.acceptance(grid) >= 0) & (calibration.curve.acceptance(grid) <= 1)).all()
    with pytest.raises(ValueError):
        calibration.observe([0.5, 1.5], [True, True])
