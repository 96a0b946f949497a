"""LayerSkip: the draft leaves the model at a fixed layer, with a fixed number of tokens (Elhoushi et al., 2024).

There is nothing to choose while it runs, so the selector is `FixedPlan`. What the paper's verify reuses of the draft,
states and keys of all layers before the exit, is what every plan's prefix is here. Its own models were trained to be
left early; others are accepted less.
"""

from __future__ import annotations

from rayspec.choices import choices_of
from rayspec.config import LayerSkipOptions
from rayspec.types import ConfigError, Plan


def early_exit_plan(options: LayerSkipOptions, num_sublayers: int) -> Plan:
    """Both sublayers of each layer before the exit, and none after it. Raises ConfigError: no such layer."""
    num_layers = num_sublayers // 2
    exit_layer = max(1, num_layers // 4) if options.exit_layer is None else options.exit_layer
    if exit_layer >= num_layers:
        raise ConfigError(
            f"option 'exit_layer' is {exit_layer}, the model has {num_layers} layers: choose 1 to {num_layers - 1}"
        )
    choices = choices_of([index < 2 * exit_layer for index in range(num_sublayers)])
    return Plan(choices=choices, num_draft_tokens=options.num_draft_tokens, source="layerskip")
