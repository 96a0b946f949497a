"""What tests of plans share: models without weights, each built once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


@pytest.fixture(scope="session", autouse=True)
def meta_models() -> Iterator[None]:
    """Models on the meta device are kept by their config: a plan builds the same one for each tensor-parallel degree.
    Nobody changes such a model."""
    build: Any = AutoModelForCausalLM.from_config
    kept: dict[str, Any] = {}

    def from_config(config: PretrainedConfig, **options: Any) -> Any:
        if torch.get_default_device().type != "meta":
            return build(config, **options)
        key = f"{type(config).__name__} {config.to_json_string(use_diff=False)} {options}"
        if key not in kept:
            kept[key] = build(config, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_config", staticmethod(from_config))
        yield
