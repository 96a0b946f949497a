from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayspec.bench.selfcheck import kernels
from rayspec.bench.selfcheck.kernels import check_kernels, kernel_differences
from rayspec.bench.selfcheck.options import SelfcheckOptions
from rayspec.model.cuda import operations

CPU = torch.device("cpu")


def test_there_are_no_kernels_on_a_cpu() -> None:
    outcome = check_kernels(SelfcheckOptions(device="cpu"))
    assert outcome.status == "not here"
    assert "cpu" in outcome.found


@pytest.mark.parametrize("dtype", kernels.TOLERANCES)
def test_a_device_agrees_with_itself(dtype: torch.dtype) -> None:
    found = kernel_differences(dtype, CPU)
    assert len(found) == 12
    assert {one.largest for one in found} == {0.0}


def test_a_kernel_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gated, calls = operations.gated, []

    def wrong_the_second_time(packed: Tensor, activation: str) -> Tensor:
        calls.append(activation)
        return gated(packed, activation) * (1.0 if len(calls) % 2 else 1.01)

    monkeypatch.setattr(operations, "gated", wrong_the_second_time)
    assert [one.operator for one in kernel_differences(torch.float32, CPU) if not one.is_small] == [
        "gated, silu",
        "gated, gelu_tanh",
    ]
