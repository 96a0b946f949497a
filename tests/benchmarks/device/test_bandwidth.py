from __future__ import annotations

import pytest
import torch

from benchmarks.device import bandwidth
from benchmarks.device.bandwidth import check_bandwidth, layer_matrices
from benchmarks.roofline import SHAPES
from benchmarks.shared import cache_bytes, fastest_seconds
from rayspec.bench.selfcheck.report import SelfcheckOptions


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_matrices_of_a_layer_are_all_its_parameters(shape: object) -> None:
    sizes = layer_matrices(shape).values()  # type: ignore[arg-type]
    expected = shape.attention_parameters + shape.mlp_parameters  # type: ignore[attr-defined]
    assert sum(rows * columns for rows, columns in sizes) == expected


def test_every_matrix_is_measured_with_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda device: 2**18)
    monkeypatch.setattr(bandwidth, "_MAX_BYTES", {"cpu": 2**17})
    monkeypatch.setattr(bandwidth, "_LEAST_BYTES", {"cpu": 2**20})
    outcome = check_bandwidth(SelfcheckOptions(device="cpu"))
    assert outcome.status == "passed"
    assert len(outcome.numbers["matrices"]) == 12
    for each in outcome.numbers["matrices"]:
        assert 0 < each["share"] < 1
        assert list(each["bytes_per_s"]) == [1, 2, 4, 8, 16]
        assert min(each["bytes_per_s"].values()) > 0


def test_works_take_turns_after_one_that_warms_up() -> None:
    calls: list[str] = []
    works = [lambda: calls.append("a"), lambda: calls.append("b")]
    assert min(fastest_seconds(works, torch.device("cpu"), num_repeats=2)) >= 0
    assert calls == ["a", "b"] * 3


def test_the_cache_of_this_machine() -> None:
    assert 2**18 <= cache_bytes(torch.device("cpu")) <= 2**31
