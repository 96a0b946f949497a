import pytest

from rayspec.config import SpeculationOptions
from rayspec.decode.strategy import RoundPlan
from rayspec.strategies.self_sd import SelfSD
from rayspec.types import Plan, PlanRecord, no_draft
from tests.exhaustive import few_of
from tests.strategies.test_every_strategy import require_known_tokens
from tests.strategy_cases import result, saved_plan, state


def _options(**options: object) -> SpeculationOptions:
    return SpeculationOptions(strategy="self-sd", warm_start="plans.json", **options)  # type: ignore[arg-type]


def test_the_threshold_step_by_step() -> None:
    """Each row: accepted, drafted, whether drafts reached their length; then what the published rule makes of it."""
    steps = [
        (8, 8, True, 0.01),  # accepted shares so far: 0.5 x 0 + 0.5 x 1, below the target of 0.9, so it rises
        (8, 8, True, 0.01),  # 0.75
        (8, 8, True, 0.01),  # 0.875
        (8, 8, True, 0.0),  # 0.9375: enough, but the drafts could not have been longer
        (5, 5, False, -0.01),  # 0.96875: enough, and they could
        (1, 4, True, 0.01),  # 0.609375
    ]
    strategy, value = SelfSD(PlanRecord(plan=no_draft(8, "test"), reason=""), 0.6), 0.6
    for num_accepted, num_drafted, reached_length, wanted in steps:
        plan = Plan(choices=("skip",) * 8, num_draft_tokens=num_drafted if reached_length else 9, source="test")
        strategy.observe(state(), RoundPlan(plan=plan), result([num_drafted], [num_accepted]), num_accepted + 1, 1.0)
        value = 0.9 * value + 0.1 * (value + wanted)
        assert strategy.threshold == pytest.approx(value)


@pytest.mark.parametrize(
    ("saved", "option", "first"), [(0.33, 0.5, 0.5), (0.33, None, 0.33), (None, 0.5, 0.5), (None, None, 0.6)]
)
def test_the_first_threshold_is_of_options_or_saved_plans(
    saved: float | None, option: float | None, first: float
) -> None:
    strategy = SelfSD.of(saved_plan(threshold=saved), _options(draft_threshold=option))
    assert strategy.threshold == first


@pytest.mark.parametrize("num_stages", few_of([1, 2], [2]))
def test_greedy_tokens_stay_the_same_and_the_threshold_outlives_requests(num_stages: int) -> None:
    strategy = SelfSD.of(saved_plan(skip=[3], threshold=0.05), _options())
    stats = require_known_tokens(strategy, num_stages).stats
    assert stats.num_accepted_tokens > 0
    assert [record.plan.choices for record in stats.plans] == [strategy.choose(state()).plan.choices]
    assert strategy.threshold != 0.05
