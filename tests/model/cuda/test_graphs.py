"""The driver on CUDA, as far as a machine without a GPU can run it: with doubles of torch's graphs."""

from contextlib import nullcontext
from itertools import count
from unittest.mock import MagicMock, call, create_autospec

import pytest
import torch

from rayspec.model.cuda.graphs import CudaDriver


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[MagicMock]:
    """The graphs that are made. torch's calls have the arguments of this version; 100 bytes go at every look."""
    made: list[MagicMock] = []
    pools, free = count(), count(10_000, -100)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock(return_value=MagicMock(cuda_stream=0)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: nullcontext())
    specification = torch.cuda.CUDAGraph

    def new() -> MagicMock:
        made.append(create_autospec(specification, instance=True))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    return made


def test_work_is_captured_by_torch_and_counted_in_bytes(recorded: list[MagicMock]) -> None:
    driver, ran = CudaDriver(torch.device("cuda")), MagicMock()
    driver.rehearse(ran)
    graph = driver.capture(ran)
    graph.replay()
    assert ran.call_count == 2
    assert [call[0] for call in recorded[0].method_calls] == ["capture_begin", "capture_end", "replay"]
    assert recorded[0].capture_begin.call_args.kwargs == {"pool": (0, 0), "capture_error_mode": "thread_local"}
    assert driver.bytes_held() == 100
    driver.release([graph])
    assert driver.bytes_held() == 0


@pytest.mark.parametrize("torch_does_it", [False, True])
def test_a_failed_capture_gives_the_allocator_back(
    recorded: list[MagicMock], monkeypatch: pytest.MonkeyPatch, torch_does_it: bool
) -> None:
    ended = MagicMock(side_effect=RuntimeError("not currently recording") if torch_does_it else None)
    released = MagicMock()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", released, raising=False)
    driver = CudaDriver(torch.device("cuda:1"))

    def fails() -> None:
        recorded[0].capture_end.side_effect = RuntimeError("a previous error")
        raise RuntimeError("the host must not wait")

    with pytest.raises(RuntimeError, match="the host must not wait"):
        driver.capture(fails)
    driver.capture(lambda: None)
    assert [graph.capture_begin.call_args.kwargs["pool"] for graph in recorded] == [(0, 0), (0, 1)]
    assert driver.bytes_held() == 100
    ended.assert_called_once_with(1, (0, 0))
    assert released.call_args_list == ([] if torch_does_it else [call(1, (0, 0))])


def test_graphs_share_a_pool_as_long_as_one_is_alive(recorded: list[MagicMock]) -> None:
    """torch's allocator frees a pool whose graphs are gone, and an assertion in it fails if a capture uses the pool."""
    driver = CudaDriver(torch.device("cuda"))
    first, second = (driver.capture(lambda: None) for _ in range(2))
    driver.release([first])
    third = driver.capture(lambda: None)
    driver.release([second, third])
    driver.capture(lambda: None)
    pools = [graph.capture_begin.call_args.kwargs["pool"] for graph in recorded]
    assert pools == [(0, 0), (0, 0), (0, 0), (0, 1)]


def test_memory_that_another_process_takes_is_not_the_graphs(
    recorded: list[MagicMock], monkeypatch: pytest.MonkeyPatch
) -> None:
    free, reserved = iter([10**10, 10**10 - 2**30]), iter([1000, 1200])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    driver = CudaDriver(torch.device("cuda"))
    driver.capture(lambda: None)
    assert driver.bytes_held() == 200 + 2**26
