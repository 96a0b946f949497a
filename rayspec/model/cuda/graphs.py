"""Captures launches on a GPU with torch's CUDA graphs.

`rayspec.model.graphs` decides what to capture. This module imports without CUDA.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch

from rayspec.model.graphs import CapturedGraph, Work

# A graph takes at most so much outside torch's memory: what falls beyond it belongs to another process.
_MOST_DRIVER_BYTES = 2**26


class CudaDriver:
    """A `GraphDriver` for CUDA. Captures and rehearsals use one side stream, so libraries allocate its workspace in a
    rehearsal. Other threads can use the device during a capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of all graphs that are alive
        self._num_bytes: dict[CapturedGraph, int] = {}
        self._broken: list[torch.cuda.CUDAGraph] = []

    def rehearse(self, work: Work) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def capture(self, work: Work) -> CapturedGraph:
        """Record the launches. After a failure, the graph is kept alive, since torch may still refer to it."""
        torch.cuda.synchronize(self._device)
        if not self._num_bytes:  # torch frees a pool without graphs, and refuses captures into it
            self._pool = torch.cuda.graph_pool_handle()
        bytes_free, bytes_reserved = self._free_and_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
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
        free, reserved = self._free_and_reserved()
        most = reserved - bytes_reserved + _MOST_DRIVER_BYTES
        self._num_bytes[graph] = max(0, min(bytes_free - free, most))
        return graph

    def release(self, graphs: Collection[CapturedGraph]) -> None:
        torch.cuda.synchronize(self._device)
        for graph in graphs:
            del self._num_bytes[graph]

    def bytes_held(self) -> int:
        """Return how much captures have lowered the device's free memory."""
        return sum(self._num_bytes.values())

    def _free_and_reserved(self) -> tuple[int, int]:
        """Return the free memory of the device, and the bytes that torch has for this process."""
        return torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)

    def _end_allocation(self) -> None:
        """Take torch's allocator out of capture mode after a failed capture. Otherwise it never frees cached memory
        again, and `torch.cuda.empty_cache` fails. Newer versions of torch do this themselves: then this call raises."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
