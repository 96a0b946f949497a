from __future__ import annotations

import subprocess
import sys
import time

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


_TWO_ON_ONE_CORE = """
import os, subprocess, sys
from tests.bench.test_clock import CPU, busy, measured
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    print(measured(lambda: busy(0.5), CPU)[1].quiet_share)
finally:
    other.kill()
    other.wait()
"""


@pytest.mark.skipif(waited_seconds() is None, reason="the system does not say how long threads wait for a core")
def test_waiting_for_a_core_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", _TWO_ON_ONE_CORE], check=True, capture_output=True, text=True)
    assert 0 < float(done.stdout) < 0.8
