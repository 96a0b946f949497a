import pytest

from rayspec.config import SpeculationOptions
from rayspec.strategies.periodic import Tested
from rayspec.strategies.self_sd import DraftThreshold, SelfSD
from tests.strategies.test_every_strategy import require_known_tokens
from tests.strategy_cases import saved_plan, state


def _options(**options: object) -> SpeculationOptions:
    return SpeculationOptions(strategy="self-sd", warm_start="plans.json", **options)  # type: ignore[arg-type]


def _tested(num_accepted: int, num_drafted: int, reached_length: bool) -> Tested:
    return Tested(
        num_accepted=num_accepted, num_tested=num_drafted, num_drafted=num_drafted, reached_length=reached_length
    )


def test_the_threshold_step_by_step() -> None:
    """Each row: accepted, drafted, whether drafts reached their length; then what the published rule makes of it."""
    steps = [
        (8, 8, True, 0.5, 0.01),  # 0.5 x 0 + 0.5 x 1: below the target of 0.9, so it rises
        (8, 8, True, 0.75, 0.01),
        (8, 8, True, 0.875, 0.01),
        (8, 8, True, 0.9375, 0.0),  # enough, but the drafts could not have been longer
        (5, 5, False, 0.96875, -0.01),  # enough, and they could
        (1, 4, True, 0.609375, 0.01),
    ]
    threshold, value = DraftThreshold(0.6), 0.6
    for num_accepted, num_drafted, reached_length, matched, wanted in steps:
        threshold.observe(_tested(num_accepted, num_drafted, reached_length))
        value = 0.9 * value + 0.1 * (value + wanted)
        assert threshold._matched == pytest.approx(matched)
        assert threshold.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("saved", "option", "first"), [(0.33, 0.5, 0.5), (0.33, None, 0.33), (None, 0.5, 0.5), (None, None, 0.6)]
)
def test_the_first_threshold_is_of_options_or_saved_plans(
    saved: float | None, option: float | None, first: float
) -> None:
    strategy = SelfSD.of(saved_plan(threshold=saved), _options(draft_threshold=option))
    assert strategy.threshold.value == first


@pytest.mark.parametrize("num_stages", [1, 2])
def test_greedy_tokens_stay_the_same_and_the_threshold_outlives_requests(num_stages: int) -> None:
    strategy = SelfSD.of(saved_plan(skip=[3], threshold=0.05), _options())
    stats = require_known_tokens(strategy, num_stages).stats
    assert stats.num_accepted_tokens > 0
    assert [record.plan.choices for record in stats.plans] == [strategy.choose(state()).plan.choices]
    assert strategy.threshold.value != 0.05
