"""Threads that run torch's operators: their helpers on a CPU, their device on a GPU, and numbers for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Rows from which on a pass has work for all cores: chunks of prompts, and plan searches.
_MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class Threads:
    """Numbers of threads. few: for passes of few rows, such as decoding, where threads may wait for each other longer
    than they work. many: for the others."""

    few: int
    many: int

    @classmethod
    def of_all_passes(cls, number: int) -> Threads:
        return cls(few=number, many=number)

    def use(self, num_rows: int) -> None:
        """Set torch's number of threads for the next pass of this thread."""
        torch.set_num_threads(self.few if num_rows < _MANY_ROWS else self.many)


def asked_threads(option: int | None) -> int | None:
    """Return the number of threads that the option asks for, or else OMP_NUM_THREADS; None if neither does."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return option or (int(first) if first.isdigit() and int(first) > 0 else None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device, where Triton launches its kernels. Does nothing for a CPU.

    Without it, a thread launches on cuda:0, also for tensors of cuda:1.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def integers(values: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Return `values` as int64 on `device`, modulo 2**64. Copies from the host without waiting for the device."""
    if not isinstance(values, Tensor):
        try:
            values = torch.tensor(values, dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError):  # some value has more than 64 bits with its sign
            values = torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in values], dtype=torch.int64)
    return values.to(device, torch.int64, non_blocking=True)


def in_thread_of_its_own(work: Callable[[], T]) -> T:
    """Run the work in a new thread, and return its result or raise its error when the thread has ended.

    OpenMP keeps helpers for each thread that has run an operator, until that thread ends; with more helpers than cores,
    decoding takes up to 1.4 times as long. So other work, such as loading, runs in a thread that ends.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller
            result.set_exception(error)

    thread = threading.Thread(target=run, name="rayspec-load", daemon=True)  # Ctrl-C need not wait for its end
    thread.start()
    found = result.result()
    thread.join()
    return found
