"""Seconds of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20}
_DEFAULT_CACHE_BYTES = 64 * 2**20


def median_seconds(work: Callable[[], object], device: torch.device, *, num_repeats: int) -> float:
    """After one run that warms up. What the work leaves to a GPU is waited for."""
    return median([seconds(work, device) for _ in range(1 + num_repeats)][1:])


def seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def cache_bytes(device: torch.device) -> int:
    """Of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
    return max(
        (int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS), default=_DEFAULT_CACHE_BYTES
    )


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
