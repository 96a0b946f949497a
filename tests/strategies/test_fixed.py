import pytest

from rayspec.choices import FULL, SKIP
from rayspec.config import SpeculationOptions
from rayspec.strategies.fixed import early_exit_plan
from rayspec.types import ConfigError


def test_the_draft_runs_both_sublayers_of_the_layers_before_the_exit() -> None:
    plan = early_exit_plan(SpeculationOptions(exit_layer=3, max_draft_tokens=5), 10)
    assert plan.choices == (FULL,) * 6 + (SKIP,) * 4
    assert (plan.num_draft_tokens, plan.prefix) == (5, 6)


@pytest.mark.parametrize(("num_layers", "expected"), [(32, 8), (4, 1), (2, 1)])
def test_the_exit_is_after_a_quarter_of_the_layers(num_layers: int, expected: int) -> None:
    assert early_exit_plan(SpeculationOptions(), 2 * num_layers).choices.count(FULL) == 2 * expected


@pytest.mark.parametrize("exit_layer", [5, 6])
def test_there_must_be_layers_after_the_exit(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match=f"'exit_layer' is {exit_layer}, the model has 5 layers: choose fewer"):
        early_exit_plan(SpeculationOptions(exit_layer=exit_layer), 10)


def test_a_model_of_one_layer_needs_another_strategy() -> None:
    with pytest.raises(ConfigError, match="1 layers: choose fewer, or another strategy"):
        early_exit_plan(SpeculationOptions(), 2)
