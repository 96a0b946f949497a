from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rayspec.bench.clock import measured, waited_seconds

CPU = torch.device("cpu")


def busy(cpu_s: float) -> str:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass
    return "done"


def test_work_is_given_back_with_its_time() -> None:
    given, cost = measured(lambda: busy(0.2), CPU)
    assert given == "done"
    assert 0.2 <= cost.cpu_s < 0.4
    assert cost.wall_s > 0.19
    assert cost.gpu_s is None


def test_sleep_is_no_cpu_time() -> None:
    _, cost = measured(lambda: time.sleep(0.2), CPU)
    assert cost.wall_s >= 0.2
    assert cost.cpu_s < 0.1


@contextmanager
def two_on_one_core() -> Iterator[None]:
    """This thread shares its core with another process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


@pytest.mark.skipif(waited_seconds() is None, reason="the system does not say how long threads wait for a core")
def test_waiting_for_a_core_is_seen() -> None:
    with two_on_one_core():
        _, cost = measured(lambda: busy(0.5), CPU)
    assert cost.quiet_share is not None
    assert 0 < cost.quiet_share < 0.8
