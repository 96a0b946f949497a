"""Threads that run torch's operators: their helpers on a CPU, their device on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device, where Triton launches its kernels. Does nothing for a CPU.

    Without it, a thread launches on cuda:0, also for tensors of cuda:1.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def in_thread_of_its_own(work: Callable[[], T]) -> T:
    """Run the work in a new thread, and return its result or raise its error when the thread has ended.

    OpenMP keeps helpers for each thread that has run an operator, until that thread ends. If a process has more of them
    than cores, helpers sleep between operators, and decoding takes up to 1.4 times as long. So only the thread that
    decodes may keep helpers: whatever else runs operators, such as loading, runs in a thread that ends.
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
