from __future__ import annotations

from dataclasses import replace

import pytest

from rayspec.choices import FULL, SKIP, Choices
from rayspec.planning.latency import Curve, LatencyModel
from rayspec.planning.pass_costs import PassCost, PassCosts

CURVES = {
    "attention": Curve(rows=(1, 8, 16), base_s=(2.0, 2.0, 3.0), kv_s=0.001, score_s=0.0001),
    "mlp": Curve(rows=(1, 8, 16), base_s=(5.0, 6.0, 9.0)),
    "head": Curve(rows=(1, 4), base_s=(0.5, 0.7)),
}
THREE_STAGES = LatencyModel(
    sublayers=("attention", "mlp") * 3,
    curves=CURVES,
    head="head",
    overhead_s=0.25,
    stages=(0, 0, 1, 1, 2, 2),
    transfer_s=(0, 0, 0, 3.0, 0, 0),
)
ALL = (FULL,) * 6


def seconds(cost: PassCost, context: float) -> float:
    return sum(base_s + slope_s * context for base_s, slope_s in zip(cost.base_s, cost.slope_s, strict=True))


@pytest.mark.parametrize("context", [0, 100, 5000])
@pytest.mark.parametrize("choices", [ALL, (FULL, FULL, SKIP, SKIP, FULL, SKIP), (SKIP, SKIP, FULL, SKIP, SKIP, SKIP)])
def test_on_one_stage_passes_take_what_the_latency_model_says(choices: Choices, context: int) -> None:
    model = replace(THREE_STAGES, stages=(0,) * 6)
    costs = PassCosts(model)
    drafted = costs.draft(choices, rows=4)
    assert seconds(drafted, context) == pytest.approx(model.draft_step_s(choices, context=context, batch=4))
    verified = costs.verify(rows=12, batch=4, prefix=3)
    expected = model.verify_s(rows=12, context=context, batch=4, from_sublayer=3, leading_rows=4)
    assert seconds(verified, context) == pytest.approx(expected)
    plain = costs.verify(rows=4, batch=4)
    assert seconds(plain, context) == pytest.approx(model.decode_step_s(context=context, batch=4))


def test_every_stage_that_is_visited_has_the_overhead_and_the_last_the_head() -> None:
    cost = PassCosts(THREE_STAGES).verify(rows=1, batch=1)
    assert cost.stages == (0, 1, 2)
    assert cost.base_s == pytest.approx((7.25, 10.25, 7.75))
    assert cost.slope_s == pytest.approx((0.0011,) * 3)
    sampled = PassCosts(THREE_STAGES).prefill(rows=16, batch=1, num_sampled=0)
    assert sampled.base_s == pytest.approx((12.25, 15.25, 12.25)), "no head for a prompt that goes on"


def test_a_stage_with_nothing_kept_is_passed_over_but_for_the_first_and_the_last() -> None:
    costs = PassCosts(THREE_STAGES)
    assert costs.draft((FULL, FULL, SKIP, SKIP, FULL, FULL), rows=1).stages == (0, 2)
    nothing = costs.draft((SKIP, SKIP, SKIP, FULL, SKIP, SKIP), rows=1)
    assert nothing.stages == (0, 1, 2)
    assert nothing.base_s == pytest.approx((0.25, 8.25, 0.75))


def test_a_shape_is_worked_out_once() -> None:
    costs = PassCosts(THREE_STAGES)
    assert costs.draft(ALL, rows=2) is costs.draft(ALL, rows=2)
    assert costs.draft(ALL, rows=2) is not costs.draft((*ALL[:5], SKIP), rows=2)
    assert costs.verify(rows=2, batch=2) is not costs.verify(rows=2, batch=1)
    assert costs.verify(rows=2, batch=2) is not costs.prefill(rows=2, batch=2, num_sampled=0)


def test_stages_must_be_numbered_in_order() -> None:
    with pytest.raises(ValueError, match="numbered 0, 1"):
        PassCosts(replace(THREE_STAGES, stages=(0, 0, 2, 2, 3, 3)))
