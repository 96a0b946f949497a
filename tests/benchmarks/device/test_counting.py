from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.device.counting import meta_layer
from benchmarks.device.launches import Launch
from benchmarks.device.models import PassShape, prepare, random_model, split
from benchmarks.device.predictions import predictions_page
from benchmarks.device.static_launches import launches_of
from benchmarks.roofline import SHAPES, ModelShape
from rayspec.choices import choices_of

ROOT = Path(__file__).parent.parent.parent.parent
LLAMA = SHAPES["Llama-3.1-8B"]


@pytest.mark.parametrize(("family", "name", "num_kv_heads"), [("llama", "Llama", 2), ("qwen3", "Qwen3", 1)])
def test_bodies_without_numbers_launch_what_those_of_fuse_do(family: str, name: str, num_kv_heads: int) -> None:
    shape = ModelShape(
        name=name, num_layers=1, hidden_size=64, mlp_size=96, num_heads=4, num_kv_heads=num_kv_heads, head_dim=16,
        vocab_size=199, tied=True,
    )  # fmt: skip
    fused = prepare(split(random_model(family, torch.bfloat16, torch.device("cpu")), "operators"), is_static=True)
    by_hand = prepare(meta_layer(shape, torch.device("cpu")), is_static=True)
    state = PassShape(name="", contexts=(5, 9), num_rows=(1, 1))
    first_layer = choices_of([index < 2 for index in range(8)])
    streams = launches_of(fused, state, first_layer), launches_of(by_hand, state)
    described = [[(launch.name, _shapes(launch)) for launch in each] for each in streams]
    assert described[0] == described[1]


def test_the_page_of_predictions_is_what_the_module_prints() -> None:
    page = (ROOT / "docs" / "gpu_predictions.md").read_text(encoding="utf-8")
    assert page == predictions_page(), "print it again: python -m benchmarks.device.predictions"
    assert "No GPU has run this" in page


def _shapes(launch: Launch) -> list[object]:
    """Of its tensors. Places and numbers are of the model."""
    return [argument[0] for argument in launch.arguments if isinstance(argument, tuple)]
