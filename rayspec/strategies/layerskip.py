"""LayerSkip: the draft exits the model at a fixed layer, and has a fixed number of tokens (Elhoushi et al., 2024).

The plan never changes, so the selector is `FixedPlan`. The paper's verify reuses the draft's states and keys of all
layers before the exit; here, this is the prefix of every plan. The paper's models were trained for early exit; with
other models, fewer draft tokens are accepted.
"""

from __future__ import annotations

from rayspec.choices import choices_of
from rayspec.config import LayerSkipOptions
from rayspec.types import ConfigError, Plan


def early_exit_plan(options: LayerSkipOptions, num_sublayers: int) -> Plan:
    """Return the plan that runs all layers before the exit layer in full, and skips the others. Raises ConfigError if
    the model has no such layer."""
    num_layers = num_sublayers // 2
    exit_layer = max(1, num_layers // 4) if options.exit_layer is None else options.exit_layer
    if exit_layer >= num_layers:
        raise ConfigError(
            f"option 'exit_layer' is {exit_layer}, the model has {num_layers} layers: choose 1 to {num_layers - 1}"
        )
    choices = choices_of([index < 2 * exit_layer for index in range(num_sublayers)])
    return Plan(choices=choices, num_draft_tokens=options.num_draft_tokens, source="layerskip")
