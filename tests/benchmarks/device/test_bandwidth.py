from __future__ import annotations

import pytest

from benchmarks.device.bandwidth import layer_matrices
from benchmarks.roofline import SHAPES


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_matrices_of_a_layer_are_all_its_parameters(shape: object) -> None:
    sizes = layer_matrices(shape).values()  # type: ignore[arg-type]
    expected = shape.attention_parameters + shape.mlp_parameters  # type: ignore[attr-defined]
    assert sum(rows * columns for rows, columns in sizes) == expected
