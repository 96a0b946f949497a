"""The driver on CUDA, as far as a machine without a GPU can run it: against a double of CUDA's runtime."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any
from unittest.mock import MagicMock, call, create_autospec

import pytest
import torch

from rayspec.model.cuda import graphs
from rayspec.model.cuda.graphs import CudaDriver, NewNodes, SwitchedGraph


class Error(Enum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815


class Kind(Enum):
    cudaGraphNodeTypeKernel = 0  # noqa: N815
    cudaGraphNodeTypeMemcpy = 1  # noqa: N815
    cudaGraphNodeTypeMemset = 2  # noqa: N815
    cudaGraphNodeTypeHost = 3  # noqa: N815


@dataclass
class Runtime:
    """`cuda.bindings.runtime` of CUDA 13, with a graph under capture whose nodes come in any order."""

    nodes: list[int] = field(default_factory=list)
    kinds: dict[int, Kind] = field(default_factory=dict)
    switched: list[tuple[Any, int, int]] = field(default_factory=list)
    cudaError_t = Error  # noqa: N815
    cudaGraphNodeType = Kind  # noqa: N815

    def cudaStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return Error.cudaSuccess, "active", 7, "graph", [], [], 0

    def cudaGraphGetNodes(self, graph: str, numNodes: int = 0) -> tuple[Any, ...]:  # noqa: N802, N803
        assert graph == "graph"
        return Error.cudaSuccess, list(reversed(self.nodes))[:numNodes], numNodes or len(self.nodes)

    def cudaGraphNodeGetType(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return Error.cudaSuccess, self.kinds.get(node, Kind.cudaGraphNodeTypeKernel)

    def cudaGraphExec_t(self, init_value: int) -> tuple[str, int]:  # noqa: N802
        return "exec", init_value

    def cudaGraphNodeSetEnabled(self, handle: Any, node: int, is_on: int) -> tuple[Any, ...]:  # noqa: N802
        if node < 0:
            return (Error.cudaErrorInvalidValue,)
        self.switched.append((handle, node, is_on))
        return (Error.cudaSuccess,)


def test_new_nodes_are_those_that_were_not_there_before() -> None:
    api = Runtime()
    nodes = NewNodes(api)
    assert nodes.since_last(0) == []
    api.nodes = [5, 9]
    assert sorted(nodes.since_last(0)) == [5, 9]
    api.nodes += [2, 7, 8]
    assert sorted(nodes.since_last(0)) == [2, 7, 8]
    assert nodes.since_last(0) == []


def test_a_node_that_cannot_be_switched_is_refused() -> None:
    api = Runtime(nodes=[1, 2], kinds={2: Kind.cudaGraphNodeTypeHost})
    with pytest.raises(RuntimeError, match="cannot be switched off"):
        NewNodes(api).since_last(0)


def test_a_group_is_switched_node_by_node() -> None:
    api = Runtime()
    graph = SwitchedGraph(api, 3, [[1], [4, 6]], replay=lambda: None)
    graph.switch(1, False)
    graph.switch(1, True)
    assert api.switched == [(("exec", 3), node, is_on) for is_on in (0, 1) for node in (4, 6)]


def test_an_error_of_cuda_is_raised() -> None:
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        SwitchedGraph(Runtime(), 3, [[-1]], replay=lambda: None).switch(0, False)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[MagicMock]:
    """The graphs that are made. torch's calls have the arguments of this version; 100 bytes go at every look."""
    made: list[MagicMock] = []
    pools, free = count(), count(10_000, -100)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock(return_value=MagicMock(cuda_stream=0)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: nullcontext())
    specification = torch.cuda.CUDAGraph

    def new(keep_graph: bool = False) -> MagicMock:
        graph = create_autospec(specification, instance=True)
        graph.raw_cuda_graph_exec.return_value = 3
        graph.keep_graph = keep_graph
        made.append(graph)
        return graph

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    return made


def _calls(graph: MagicMock) -> list[str]:
    return [call[0] for call in graph.method_calls]


def test_one_group_is_a_graph_of_torch_s(recorded: list[MagicMock]) -> None:
    driver, ran = CudaDriver(torch.device("cuda")), MagicMock()
    driver.rehearse([ran, ran])
    graph = driver.capture([ran])
    graph.replay()
    assert ran.call_count == 3
    assert _calls(recorded[0]) == ["capture_begin", "capture_end", "replay"]
    assert recorded[0].capture_begin.call_args.kwargs == {"pool": (0, 0), "capture_error_mode": "thread_local"}
    assert driver.bytes_held() == 100
    driver.release([graph])
    assert driver.bytes_held() == 0


def test_groups_are_nodes_of_one_graph(recorded: list[MagicMock], monkeypatch: pytest.MonkeyPatch) -> None:
    api = Runtime()
    monkeypatch.setattr(graphs, "runtime", api)
    graph = CudaDriver(torch.device("cuda")).capture([lambda: api.nodes.append(1), lambda: api.nodes.extend([2, 5])])
    graph.switch(1, False)
    graph.replay()
    assert recorded[0].keep_graph
    assert _calls(recorded[0]) == ["capture_begin", "capture_end", "instantiate", "raw_cuda_graph_exec", "replay"]
    assert sorted(api.switched) == [(("exec", 3), 2, 0), (("exec", 3), 5, 0)]


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
        driver.capture([fails])
    driver.capture([lambda: None])
    assert [graph.capture_begin.call_args.kwargs["pool"] for graph in recorded] == [(0, 0), (0, 0)]
    assert driver.bytes_held() == 100
    ended.assert_called_once_with(1, (0, 0))
    assert released.call_args_list == ([] if torch_does_it else [call(1, (0, 0))])
