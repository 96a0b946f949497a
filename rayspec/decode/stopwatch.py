"""Measure the seconds of work on the device that runs it.

A GPU runs asynchronously: the host queues work and continues. So a mark is put into the GPU's queue, and it is read at
the end of the work, when the host has waited for the tokens anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in some work. host_s: when the host reached it. event: a `torch.cuda.Event` that says when the device
    reaches it; None if the host itself does the work."""

    host_s: float
    event: Any = None


class Stopwatch:
    """Sets marks. record: puts an event into the device's queue; None if the host itself does the work."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, record: Callable[[], Any] | None = None) -> None:
        self._clock = clock
        self._record = record

    @classmethod
    def of(cls, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Self:
        def record() -> Any:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(clock, record if device.type == "cuda" else None)

    def mark(self) -> Mark:
        return Mark(self._clock(), self._record() if self._record is not None else None)


def seconds(first: Mark, last: Mark) -> float:
    """Return the seconds from when the device reached `first` to when it reached `last`; wait until it has."""
    if first.event is None or last.event is None:
        return last.host_s - first.host_s
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event)) / 1000


def queued_s(first: Mark, last: Mark) -> float:
    """Return how long the device was still busy with earlier work when the host set `first`. last: a mark that the
    device reached as soon as the host set it."""
    if first.event is None or last.event is None:
        return 0.0
    return max(0.0, last.host_s - first.host_s - seconds(first, last))
