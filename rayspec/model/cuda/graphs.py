"""Captures launches on a GPU with torch's CUDA graphs, and switches their nodes with CUDA's runtime API.

`rayspec.model.graphs` decides what to capture. This module imports without CUDA. **It has not run on a GPU yet.**
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from rayspec.model.graphs import CapturedGraph, Work

try:
    from cuda.bindings import runtime
except ImportError:
    runtime = None

_SWITCHED_NODES = ("cudaGraphNodeTypeKernel", "cudaGraphNodeTypeMemcpy", "cudaGraphNodeTypeMemset")


def can_switch_nodes() -> bool:
    """Return whether the bindings of CUDA's runtime are installed and torch gives access to its raw graphs."""
    return runtime is not None and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")


class CudaDriver:
    """A `GraphDriver` for CUDA. Graphs of several groups need `can_switch_nodes()`.

    All captures and rehearsals use one side stream, so libraries allocate its workspace in a rehearsal, not in a
    capture. Other threads can use the device during a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes: dict[CapturedGraph, int] = {}
        self._broken: list[torch.cuda.CUDAGraph] = []

    def rehearse(self, works: Sequence[Work]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for work in works:
                work()
        current.wait_stream(self._stream)

    def capture(self, groups: Sequence[Work]) -> CapturedGraph:
        torch.cuda.synchronize(self._device)
        bytes_free = torch.cuda.mem_get_info(self._device)[0]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            graph = self._whole(groups[0]) if len(groups) == 1 else self._grouped(groups)
        self._num_bytes[graph] = max(0, bytes_free - torch.cuda.mem_get_info(self._device)[0])
        return graph

    def release(self, graphs: Collection[CapturedGraph]) -> None:
        torch.cuda.synchronize(self._device)
        for graph in graphs:
            del self._num_bytes[graph]

    def bytes_held(self) -> int:
        """Return how much captures have lowered the device's free memory. Other users of the device distort it."""
        return sum(self._num_bytes.values())

    def _whole(self, work: Work) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        self._record(graph, work)
        return _WholeGraph(graph)

    def _grouped(self, groups: Sequence[Work]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        nodes = NewNodes(runtime)
        found: list[list[Any]] = []

        def work() -> None:
            for group in groups:
                group()
                found.append(nodes.since_last(self._stream.cuda_stream))

        self._record(graph, work)
        graph.instantiate()
        return SwitchedGraph(runtime, graph.raw_cuda_graph_exec(), found, replay=graph.replay)

    def _record(self, graph: torch.cuda.CUDAGraph, work: Work) -> None:
        """Capture `work` in `graph`. After a failure, the graph is kept alive, since torch may still refer to it."""
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # it says only that there was an error before
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            self._broken.append(graph)
            self._end_allocation()
            raise

    def _end_allocation(self) -> None:
        """Take torch's allocator out of capture mode after a failed capture. Otherwise it never frees cached memory
        again, and `torch.cuda.empty_cache` fails. Newer versions of torch do this themselves: then this call raises."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)


class _WholeGraph:
    """A captured graph of one group, which is always on."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def switch(self, group: int, is_on: bool) -> None:
        assert is_on, "a graph of one group is replayed or not"

    def replay(self) -> None:
        self._graph.replay()


class NewNodes:
    """Finds the nodes that the graph under capture has gained since the last call. api: `cuda.bindings.runtime`."""

    def __init__(self, api: Any) -> None:
        self._api = api
        # CUDA 12's unversioned function fails if kernels overlap with their successors (programmatic dependent launch).
        self._capture_info = getattr(api, "cudaStreamGetCaptureInfo_v3", None) or api.cudaStreamGetCaptureInfo
        self._known: set[int] = set()

    def since_last(self, stream: int) -> list[Any]:
        """Return the new nodes. stream: handle of the capturing stream. Raises RuntimeError if one has no switch."""
        graph = _checked(self._api, self._capture_info(stream))[2]
        _, number = _checked(self._api, self._api.cudaGraphGetNodes(graph))
        nodes, number = _checked(self._api, self._api.cudaGraphGetNodes(graph, number)) if number else ([], 0)
        new = [node for node in nodes[:number] if int(node) not in self._known]
        self._known.update(map(int, new))
        kinds = [getattr(self._api.cudaGraphNodeType, name) for name in _SWITCHED_NODES]
        for node in new:
            (kind,) = _checked(self._api, self._api.cudaGraphNodeGetType(node))
            if kind not in kinds:
                raise RuntimeError(f"a node of type {kind} cannot be switched off")
        return new


class SwitchedGraph:
    """A captured graph whose groups of nodes can be switched. api: `cuda.bindings.runtime`. handle: the executable
    graph that `replay` launches."""

    def __init__(self, api: Any, handle: int, groups: Sequence[Sequence[Any]], replay: Callable[[], None]) -> None:
        self._api = api
        self._handle = api.cudaGraphExec_t(init_value=handle)
        self._groups = groups
        self.replay = replay

    def switch(self, group: int, is_on: bool) -> None:
        """Switch a group on or off for later replays. Replays that are under way do not change."""
        for node in self._groups[group]:
            _checked(self._api, self._api.cudaGraphNodeSetEnabled(self._handle, node, int(is_on)))


def _checked(api: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the answer without its status code. Raises RuntimeError if the status is an error."""
    error, *values = answer
    if error != api.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA error {error}")
    return tuple(values)
