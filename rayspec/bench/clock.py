"""What a piece of work costs: time on the wall, of the CPU, of the GPU, and time spent waiting for a core."""

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
    """What `work` gives, and what it cost. device: where it runs; what it has left to do on a GPU is waited for."""
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
    """That the threads which this process has now have been waiting for a core so far (Linux' scheduler statistics)."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in _TASKS.iterdir()) / 1e9
    except (OSError, IndexError):
        return None


class _Events:
    """The GPU's clock, from when nothing is left to do to when nothing is left again."""

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
    """A thread that has ended takes its seconds along."""
    return max(0.0, now - before) if now is not None and before is not None else None
