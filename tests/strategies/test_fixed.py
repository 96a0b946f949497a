from __future__ import annotations

import pytest

from rayspec.choices import FULL, SKIP
from rayspec.config import SpeculationOptions
from rayspec.strategies.fixed import FixedPlan, early_exit_plan
from rayspec.types import ConfigError
from tests.engines import complete, engine_with
from tests.families import checkpoint, parts_of, ragged_prompts
from tests.strategy_cases import state


def test_the_draft_runs_both_sublayers_of_the_layers_before_the_exit() -> None:
    plan = early_exit_plan(SpeculationOptions(exit_layer=3, max_draft_tokens=5), 10)
    assert plan.choices == (FULL,) * 6 + (SKIP,) * 4
    assert (plan.num_draft_tokens, plan.prefix) == (5, 6)


@pytest.mark.parametrize(("num_layers", "expected"), [(32, 8), (4, 1), (2, 1)])
def test_the_exit_is_after_a_quarter_of_the_layers(num_layers: int, expected: int) -> None:
    assert early_exit_plan(SpeculationOptions(), 2 * num_layers).choices.count(FULL) == 2 * expected


@pytest.mark.parametrize("exit_layer", [5, 6])
def test_there_must_be_layers_after_the_exit(exit_layer: int) -> None:
    with pytest.raises(ConfigError, match=f"'exit_layer' is {exit_layer}, the model has 5 layers: choose 1 to 4"):
        early_exit_plan(SpeculationOptions(exit_layer=exit_layer), 10)


def test_every_draft_has_the_same_length_however_unsure() -> None:
    plan = early_exit_plan(SpeculationOptions(exit_layer=1, max_draft_tokens=4), 8)
    assert FixedPlan(plan).choose(state()).keep_drafting is None
    engine = engine_with(parts_of(checkpoint("llama")), FixedPlan(plan))
    output = complete(engine, ragged_prompts([20]))[0]
    at_the_end = 4 + 3 + 2 + 1  # fewer can be drafted where fewer are wanted
    assert 0 <= 4 * output.metrics.num_rounds - output.metrics.num_draft_tokens <= at_the_end
