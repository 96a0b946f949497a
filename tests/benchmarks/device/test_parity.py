"""What the comparisons of logits must find, on a driver that stands in for a GPU's graphs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.device.models import RANDOM_FAMILIES, Way, prepare, prepare_model, random_model, split
from benchmarks.device.parity import Difference, logit_differences, replay_differences
from rayspec.model.attention import Rows
from rayspec.model.graphs import CapturedGraph, Work
from rayspec.model.sublayers import Body
from tests.graph_driver import RecordingDriver

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
@pytest.mark.parametrize(("way", "is_static"), [("fused", False), ("operators", True)])
def test_fused_layers_compute_what_the_modules_do(family: str, way: Way, is_static: bool) -> None:
    reference = prepare_model(family, "modules", torch.float32, CPU, is_static=False)
    other = prepare_model(family, way, torch.float32, CPU, is_static=is_static)
    found = logit_differences(reference, other, what=family)
    assert [one.rows for one in found] == ["chunk", "later chunk", "single rows", "chain", "tree"]
    assert all(one.largest < 1e-4 for one in found), found


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_layer_is_found(dtype: torch.dtype, error: float) -> None:
    reference = prepare_model("llama", "modules", dtype, CPU, is_static=False)
    parts = split(random_model("llama", dtype, CPU), "operators")
    *others, last = parts.sublayers
    assert last.body is not None
    wrong = replace(parts, sublayers=(*others, replace(last, body=_scaled(last.body, error))))
    found = logit_differences(reference, prepare(wrong, is_static=True), what="llama")
    assert not any(one.is_small for one in found), found


def _scaled(body: Body, error: float) -> Body:
    """Of the first half of the states, so that the final norm does not undo it."""

    def run(hidden: Tensor, rows: Rows) -> Tensor:
        out = body(hidden, rows)
        out[..., : out.shape[-1] // 2] *= 1 + 2 * error
        return out

    return run


class _Mixed(RecordingDriver):
    """A graph of it is replayed in place of another."""

    def capture(self, work: Work) -> CapturedGraph:
        graph = super().capture(work)
        return self.graphs[-2] if len(self.graphs) == 5 else graph


def replayed(driver: RecordingDriver) -> list[Difference]:
    return list(replay_differences("llama", torch.float32, CPU, driver_of=lambda _: driver))


@pytest.mark.exhaustive
def test_replays_have_the_bits_of_eager_passes() -> None:
    found = replayed(RecordingDriver())
    assert len(found) == 3 * 3, "three kinds of passes by three plans"
    assert {one.largest for one in found} == {0.0}
    assert all(one.is_small for one in found)


@pytest.mark.exhaustive
def test_a_part_that_cannot_be_captured_and_a_wrong_graph_are_found() -> None:
    assert not all(one.is_small for one in replayed(RecordingDriver(refuses=lambda number: number == 5)))
    assert not all(one.is_small for one in replayed(_Mixed()))
