"""The trial of the GPU kernels, with a device that fails in the ways of real ones."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from rayspec.config import EngineConfig
from rayspec.decode.loading import has_kernels
from rayspec.errors import ConfigError
from rayspec.model.cuda import operations, reference
from rayspec.model.cuda.operations import has_operators

GPU = torch.device("cuda:1")


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of compute capability 9.0, whose tensors are on the CPU and whose kernels are the reference."""
    operations._works.cache_clear()
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, where, *rest: self if where == GPU else to(self, where, *rest))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _kernel_that(monkeypatch, reference.rms_norm)
    yield
    operations._works.cache_clear()


def _kernel_that(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setattr(operations, "rms_norm", kernel)


def _raising(error: Exception) -> Any:
    def kernel(*args: object) -> None:
        raise error

    return kernel


def test_a_device_that_computes_right_has_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert has_operators(GPU)
    assert has_kernels(EngineConfig(model="m"), GPU)
    assert not has_kernels(EngineConfig(model="m", cuda_kernels="off"), GPU)
    assert not has_operators(torch.device("cpu"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (_raising(RuntimeError("Failed to find C compiler. Please specify via CC")), "RuntimeError: Failed to find C"),
        (_raising(OutOfResources(81920, 65536, "shared memory")), "OutOfResources: .*81920"),
        (lambda rows, *args: rows + 1, "wrong"),
    ],
)
def test_a_kernel_that_fails_is_one_warning(
    kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _kernel_that(monkeypatch, kernel)
    with caplog.at_level(logging.WARNING):
        assert [has_operators(GPU) for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert record.message.startswith("cuda:1 runs without the GPU kernels: ")
    assert re.search(reason, record.message)
    assert "cuda_kernels='off'" in record.message


def test_an_old_gpu_does_not_get_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_operators(GPU)
    assert "need compute capability 8.0, this GPU has 7.5" in caplog.text


def test_memory_that_runs_out_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _kernel_that(monkeypatch, _raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        has_operators(GPU)


def test_graphs_need_the_kernels() -> None:
    with pytest.raises(ConfigError, match=r"'cuda_graphs' .* does not work with option 'cuda_kernels' 'off'"):
        EngineConfig(model="m", cuda_graphs="on", cuda_kernels="off")
    with pytest.raises(ConfigError, match="'cuda_graphs' 'plans' is gone: use on"):
        EngineConfig(model="m", cuda_graphs="plans")
