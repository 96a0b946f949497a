from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from rayspec.choices import FULL, SKIP, Choices
from rayspec.planning.event_pipeline import EventPipeline, PassCost, PassCosts, Work
from rayspec.planning.latency import Curve, LatencyModel


@dataclass
class Watched:
    """A pipeline, and when what was submitted landed, by name."""

    pipeline: EventPipeline
    landed: dict[str, float] = field(default_factory=dict)

    def submit(self, name: str, *passes: PassCost, context: float = 0, patience_s: float = 0) -> None:
        def note(now: float) -> None:
            self.landed[name] = now

        self.pipeline.submit(Work(passes=passes, context=context, when_done=note, patience_s=patience_s))

    def run_until(self, count: int) -> dict[str, float]:
        while len(self.landed) < count:
            self.pipeline.step()
        return self.landed


def watched(num_stages: int, *, hop_s: float = 0.0, round_s: float = 0.0, wake_s: float = 0.0) -> Watched:
    return Watched(EventPipeline(num_stages, hop_s=hop_s, round_s=round_s, wake_s=wake_s))


def cost(*seconds: float, stages: tuple[int, ...] | None = None, slope_s: float = 0.0) -> PassCost:
    return PassCost(
        stages=stages or tuple(range(len(seconds))), base_s=seconds, slope_s=tuple(slope_s for _ in seconds)
    )


def test_a_pass_takes_its_stages_the_hops_between_them_the_way_back_and_the_engine() -> None:
    run = watched(3, hop_s=0.1, round_s=0.5)
    run.submit("round", cost(1.0, 2.0, 4.0))
    assert run.run_until(1)["round"] == pytest.approx(1 + 2 + 4 + 3 * 0.1 + 0.5)
    assert run.pipeline.busy_s == pytest.approx((1.0, 2.0, 4.0))


def test_every_pass_of_a_round_comes_back_to_the_first_stage() -> None:
    run = watched(3, hop_s=0.1)
    run.submit("round", cost(1.0, 4.0, stages=(0, 2)), cost(1.0, 2.0, 4.0))
    assert run.run_until(1)["round"] == pytest.approx((5 + 2 * 0.1) + (7 + 3 * 0.1)), "a stage left out costs no hop"


def test_seconds_grow_with_the_context() -> None:
    run = watched(2)
    run.submit("round", cost(1.0, 1.0, slope_s=0.25), context=8)
    assert run.run_until(1)["round"] == pytest.approx(2 + 2 * 8 * 0.25)


def test_a_single_stage_hops_nowhere() -> None:
    run = watched(1, hop_s=9.0)
    run.submit("round", cost(1.0), cost(2.0))
    assert run.run_until(1)["round"] == pytest.approx(3.0)


def test_a_stage_that_was_idle_begins_slowly_and_one_that_was_not_does_not() -> None:
    run = watched(2, wake_s=0.5)
    run.submit("a", cost(2.0, 2.0))
    run.submit("b", cost(2.0, 2.0))
    assert run.run_until(2) == pytest.approx({"a": 4.5, "b": 6.5}), "the second stage was idle before the first only"
    run.submit("c", cost(2.0, 2.0))
    assert run.run_until(3)["c"] == pytest.approx(6.5 + 2.5 + 2.5)
    assert run.pipeline.busy_s == pytest.approx((6.5, 7.0))
    single = watched(1, wake_s=0.5)
    single.submit("a", cost(2.0))
    single.run_until(1)
    single.submit("b", cost(2.0))
    assert single.run_until(2)["b"] == pytest.approx(4.0)


def test_stages_work_at_the_same_time_each_on_one_thing() -> None:
    run = watched(2)
    for name in "abc":
        run.submit(name, cost(1.0, 2.0))
    assert run.run_until(3) == pytest.approx({"a": 3.0, "b": 5.0, "c": 7.0})


def test_what_is_due_first_is_done_first_and_nothing_waits_for_ever() -> None:
    run = watched(1)
    run.submit("under way", cost(1.0))
    run.submit("prefill", cost(1.0), patience_s=0.5)
    run.submit("round", cost(1.0))
    assert run.run_until(3) == pytest.approx({"under way": 1.0, "round": 2.0, "prefill": 3.0})
    later = watched(1)
    later.submit("under way", cost(1.0), cost(1.0))  # its second pass comes back when the prefill is long due
    later.submit("prefill", cost(1.0), patience_s=0.5)
    assert later.run_until(2) == pytest.approx({"prefill": 2.0, "under way": 3.0})


def test_the_engine_takes_one_result_at_a_time() -> None:
    run = watched(2, round_s=5.0)
    run.submit("a", cost(1.0, 1.0))
    run.submit("b", cost(1.0, 1.0))
    assert run.run_until(2) == pytest.approx({"a": 7.0, "b": 12.0})


def test_nothing_under_way_has_no_next_event() -> None:
    with pytest.raises(IndexError):
        watched(2).pipeline.step()


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
    drafted = costs.of(rows=4, batch=4, choices=choices)
    assert seconds(drafted, context) == pytest.approx(model.draft_step_s(choices, context=context, batch=4))
    verified = costs.of(rows=12, batch=4, prefix=3)
    expected = model.verify_s(rows=12, context=context, batch=4, from_sublayer=3, leading_rows=4)
    assert seconds(verified, context) == pytest.approx(expected)
    plain = costs.of(rows=4, batch=4)
    assert seconds(plain, context) == pytest.approx(model.decode_step_s(context=context, batch=4))


def test_every_stage_that_is_visited_has_the_overhead_and_the_last_the_head() -> None:
    cost = PassCosts(THREE_STAGES).of(rows=1, batch=1)
    assert cost.stages == (0, 1, 2)
    assert cost.base_s == pytest.approx((7.25, 10.25, 7.75))
    assert cost.slope_s == pytest.approx((0.0011,) * 3)
    sampled = PassCosts(THREE_STAGES).of(rows=16, batch=1, head_rows=0)
    assert sampled.base_s == pytest.approx((12.25, 15.25, 12.25)), "no head for a prompt that goes on"


def test_a_stage_with_nothing_kept_is_passed_over_but_for_the_first_and_the_last() -> None:
    costs = PassCosts(THREE_STAGES)
    assert costs.of(rows=1, batch=1, choices=(FULL, FULL, SKIP, SKIP, FULL, FULL)).stages == (0, 2)
    nothing = costs.of(rows=1, batch=1, choices=(SKIP, SKIP, SKIP, FULL, SKIP, SKIP))
    assert nothing.stages == (0, 1, 2)
    assert nothing.base_s == pytest.approx((0.25, 8.25, 0.75))


def test_a_shape_is_worked_out_once() -> None:
    costs = PassCosts(THREE_STAGES)
    assert costs.of(rows=2, batch=2, choices=ALL) is costs.of(rows=2, batch=2, choices=ALL)
    assert costs.of(rows=2, batch=2, choices=ALL) is not costs.of(rows=2, batch=2, choices=(*ALL[:5], SKIP))
    assert costs.of(rows=2, batch=2) is not costs.of(rows=2, batch=1)
    assert costs.of(rows=2, batch=2) is not costs.of(rows=2, batch=2, head_rows=0)


def test_stages_must_be_numbered_in_order() -> None:
    with pytest.raises(ValueError, match="numbered 0, 1"):
        PassCosts(replace(THREE_STAGES, stages=(0, 0, 2, 2, 3, 3)))
