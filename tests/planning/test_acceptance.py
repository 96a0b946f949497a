import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.choices import FULL, SKIP, choices_of
from rayspec.planning.acceptance import DraftRates, DraftWhileWorth, estimated_acceptance
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.learning import (
    USUAL_CONFIDENCE,
    Calibration,
    CalibrationCurve,
    Correction,
    StopRule,
    expected_draft,
)
from tests.exhaustive import few_of
from tests.strategy_cases import verify_after_draft_s

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


def loop_choice(patterns, acceptance, model, context, batch, max_draft_tokens, reuse_prefix):  # type: ignore[no-untyped-def]
    plain_tpt = 1 / model.decode_step_s(context=context, batch=batch)
    best = (plain_tpt, None, 0)
    for index, choices in enumerate(patterns):
        if SKIP not in choices:
            continue
        prefix = choices.index(SKIP) if reuse_prefix else 0
        for length in range(1, max_draft_tokens + 1):
            seconds = length * model.draft_step_s(choices, context=context, batch=batch) + model.round_s
            seconds += verify_after_draft_s(
                model, rows=batch * (length + 1), context=context, batch=batch, prefix=prefix
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
    rates = DraftRates(latency=model, context=500, batch=batch, max_draft_tokens=6, reuse_prefix=reuse)
    choice = rates.best_choice(patterns, acceptance)
    tpt, candidate, length = loop_choice(patterns, acceptance, model, 500, batch, 6, reuse)
    assert (choice.candidate, choice.num_draft_tokens) == (candidate, length)
    assert choice.tpt == pytest.approx(tpt)
    assert choice.tpt >= choice.plain_tpt


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
    num_drafted, num_accepted = expected_draft([acceptance], length, rule)
    verify_s = [model.verify_s(rows=batch * (count + 1), context=500, batch=batch) for count in range(length + 1)]
    rates = DraftRates(
        latency=model, context=500, batch=batch, max_draft_tokens=length, stop_rule=rule, reuse_prefix=False
    )
    rate = rates.tokens_per_time([choices], [acceptance])[0, -1]
    others_s = np.interp(num_drafted[0, -1], range(length + 1), verify_s) + model.round_s
    assert (1 + num_accepted[0, -1]) / rate - others_s == pytest.approx(seconds / 4000, rel=0.05)
    assert batch * (1 + num_accepted[0, -1]) == pytest.approx(num_tokens / 4000, rel=0.03)


def test_no_draft_where_none_pays_or_none_is_left() -> None:
    model = latency(np.random.default_rng(0))
    half = (FULL, SKIP) * (NUM_SUBLAYERS // 2)
    every = (FULL,) * NUM_SUBLAYERS
    for patterns, acceptance in (([], []), ([every], [1.0]), ([half, every], [0.0, 1.0])):
        rates = DraftRates(latency=model, context=10, batch=1, max_draft_tokens=8)
        choice = rates.best_choice(patterns, acceptance)
        assert choice.candidate is None
        assert choice.num_draft_tokens == 0
        assert choice.tpt == choice.plain_tpt == pytest.approx(1 / model.decode_step_s(context=10, batch=1))


def worth(acceptance: float, survival: list[float], *, rate: float, step_s: float, row_s: float) -> list[bool]:
    """Of drafts of one token each, whose confidence is their acceptance."""
    curve = CalibrationCurve(confidence=(0.0, 1.0), excess=(0.0, 0.0))
    rule = DraftWhileWorth(curve=curve, usual=acceptance, rate=rate, step_s=step_s, row_s=row_s)
    return rule([[one] for one in survival])


def test_a_step_takes_place_where_its_sequences_together_pay_for_it() -> None:
    assert worth(0.9, [0.9], rate=1.0, step_s=0.7, row_s=0.1) == [True]
    assert worth(0.9, [0.9], rate=1.0, step_s=0.8, row_s=0.1) == [False]
    # Two pay for the step; the third not even for its row.
    assert worth(0.9, [0.9, 0.5, 0.05], rate=1.0, step_s=0.9, row_s=0.1) == [True, True, False]
    assert not any(worth(0.9, [0.5, 0.05], rate=1.0, step_s=0.9, row_s=0.1))


@given(a=st.floats(0.3, 0.98), step_s=st.floats(0.05, 0.9))
def test_drafting_while_it_is_worth_it_finds_the_best_fixed_length(a: float, step_s: float) -> None:
    """With one acceptance for all, stopping at the best rate is the best length of the grid search."""
    lengths = np.arange(0, 200)
    rates = np.cumsum(a**lengths) / (lengths * (step_s + 0.01) + 1)
    length = 0
    while length < 199 and worth(a, [a**length], rate=float(rates.max()), step_s=step_s, row_s=0.01)[0]:
        length += 1
    assert rates[length] == pytest.approx(rates.max(), rel=1e-6)


def test_correction_learns_the_offset_and_applies_it_to_others() -> None:
    correction = Correction()
    assert correction.apply([0.3, 0.9]) == pytest.approx([0.3, 0.9])
    few = Correction()
    few.observe(0.9, num_accepted=0, num_tested=1)
    assert few.apply(0.9) > 0.79, "it hardly believes a single token"
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


def test_calibration_learns_soon_that_a_draft_is_right_where_it_is_not_sure() -> None:
    calibration = Calibration()
    calibration.observe(np.full(40, 0.7), np.ones(40))
    assert calibration.curve(0.7).acceptance([0.3, 0.5, 0.7, 0.95]).min() > 0.7


def test_a_draft_that_is_expected_to_be_right_is_trusted_from_the_start() -> None:
    at_first = Calibration().curve(0.95)
    assert at_first.acceptance([0.3, 0.7]).tolist() == pytest.approx([0.77, 0.95], abs=0.03)
    assert Calibration().curve(USUAL_CONFIDENCE).acceptance([0.3, 0.7]).tolist() == pytest.approx([0.3, 0.7])


def test_calibration_learns_a_crooked_draft() -> None:
    calibration = Calibration()
    grid = np.linspace(0, 1, 21)
    assert calibration.curve(USUAL_CONFIDENCE).acceptance(grid) == pytest.approx(grid)
    rng = np.random.default_rng(0)
    for _ in range(400):
        confidence = 1 - rng.random(64) ** 2
        calibration.observe(confidence, rng.random(64) < confidence**2)
    curve = calibration.curve(0.5)
    learned = curve.acceptance(grid[4:])
    assert np.abs(learned - grid[4:] ** 2).max() < 0.1
    assert ((curve.acceptance(grid) >= 0) & (curve.acceptance(grid) <= 1)).all()


def test_a_draft_whose_numbers_overflow_is_bad_and_no_other() -> None:
    """In 16 bits: of a draft whose states are NaN, and of a single token without a confidence."""
    assert estimated_acceptance(math.nan, 0, 8) == estimated_acceptance(0.0, 0, 8)
    calibration = Calibration()
    calibration.observe([math.nan, 0.9], [False, True])
    assert calibration.curve(0.9).acceptance([0.3, 0.9, 1.0]).min() > 0
