from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayspec.bench.selfcheck.models import RANDOM_FAMILIES, Way, random_model, split
from rayspec.bench.selfcheck.parity import Difference, differences, prepare_model, prepare_parts
from rayspec.model.attention import Rows
from rayspec.model.sublayers import Body

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
@pytest.mark.parametrize(("way", "is_static"), [("fused", False), ("operators", False), ("operators", True)])
def test_bodies_compute_what_the_modules_do(family: str, way: Way, is_static: bool) -> None:
    reference = prepare_model(family, "modules", torch.float32, CPU, is_static=False)
    found = differences(
        reference, prepare_model(family, way, torch.float32, CPU, is_static=is_static), model=family, way=way
    )
    assert [one.rows for one in found] == ["chunk", "later chunk", "single rows", "chain", "tree"]
    assert all(one.largest < 1e-4 for one in found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_body_is_found(dtype: torch.dtype, error: float) -> None:
    reference = prepare_model("llama", "modules", dtype, CPU, is_static=False)
    parts = split(random_model("llama", dtype, CPU), "operators")
    *others, last = parts.sublayers
    assert last.body is not None
    wrong = replace(parts, sublayers=(*others, replace(last, body=_scaled(last.body, error))))
    found = differences(reference, prepare_parts(wrong, is_static=True), model="llama", way="operators")
    assert not any(one.is_small for one in found), found


def test_nan_is_not_small() -> None:
    one = Difference(model="", dtype="", way="", rows="", largest=float("nan"), tolerance=1.0)
    assert not one.is_small


def _scaled(body: Body, error: float) -> Body:
    """Of the first half of the states, so that the final norm does not undo it."""

    def run(hidden: Tensor, rows: Rows) -> Tensor:
        out = body(hidden, rows)
        out[..., : out.shape[-1] // 2] *= 1 + 2 * error
        return out

    return run
