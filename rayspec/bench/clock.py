"""Measure the cost of a function: wall time, CPU time, GPU time, and time spent waiting for a CPU core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from rayspec.bench.result import Cost

T = TypeVar("T")

_TASKS = Path("/proc/self/task")


def measured(work: Callable[[], T], device: torch.device) -> tuple[T, Cost]:
    """Run `work` and return its result and its cost. On a GPU `device`, wait until all its launches are done."""
    events = _Events(device) if device.type == "cuda" else None
    waited, cpu, wall = waited_seconds(), time.process_time(), time.perf_counter()
    given = work()
    gpu_s = events.seconds() if events is not None else None
    cost = Cost(
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        waited_s=_less(waited_seconds(), waited),
        gpu_s=gpu_s,
    )
    return given, cost


def waited_seconds() -> float | None:
    """Return the seconds that the current threads have waited for a core (Linux schedstat); None if unknown."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in _TASKS.iterdir()) / 1e9
    except (OSError, IndexError):
        return None


class _Events:
    """A timer on the GPU's clock. It starts on an idle GPU and stops when the GPU is idle again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        self._first.record(torch.cuda.current_stream(device))

    def seconds(self) -> float:
        self._last.record(torch.cuda.current_stream(self._device))
        torch.cuda.synchronize(self._device)
        return float(self._first.elapsed_time(self._last)) / 1000


def _less(now: float | None, before: float | None) -> float | None:
    """Return the difference, at least 0: the later sum lacks the threads that have ended since."""
    return max(0.0, now - before) if now is not None and before is not None else None
