"""The check must find what a captured graph would get wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.device.models import Prepared, prepare, random_model, split
from benchmarks.device.static_launches import MAX_KERNELS_A_LAYER, PAIRS, check_static_launches, compare
from benchmarks.shared import DeviceOptions
from rayspec.model.attention import Rows
from rayspec.model.sublayers import Body

CPU = torch.device("cpu")


def prepared(wrap: object = None, *, is_static: bool = True) -> Prepared:
    """wrap: makes another body of the first sublayer's."""
    parts = split(random_model("llama", torch.float32, CPU), "operators")
    if wrap is not None:
        first, *others = parts.sublayers
        parts = replace(parts, sublayers=(replace(first, body=wrap(first.body)), *others))  # type: ignore[operator]
    return prepare(parts, is_static=is_static)


def test_passes_in_static_buffers_launch_the_same() -> None:
    outcome = check_static_launches(DeviceOptions(device="cpu"))
    assert outcome.status == "passed", outcome.found
    kernels = {one["kernels_a_layer"] for one in outcome.numbers if one["model"] == "llama"}
    assert max(kernels) <= MAX_KERNELS_A_LAYER
    assert len(outcome.numbers) == 3 * len(PAIRS)


def by_number_of_rows(body: Body) -> Body:
    """A number that depends on the contexts, read without torch's knowledge."""

    def run(hidden: Tensor, rows: Rows) -> Tensor:
        return body(hidden, rows).mul_(1 + 1e-9 * rows.contexts.numpy()[0])  # type: ignore[attr-defined]

    return run


def test_a_step_that_depends_on_data_is_found() -> None:
    found = compare(prepared(by_number_of_rows), PAIRS[0], model="llama")
    assert found.difference is not None
    assert not found.is_good
