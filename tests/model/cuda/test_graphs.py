"""The driver on CUDA, as far as a machine without a GPU can run it: against a double of CUDA's runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from rayspec.model.cuda.graphs import NewNodes, SwitchedGraph


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
