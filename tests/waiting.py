"""Waiting for what another thread, process or job does."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rayspec.pool.stopped import is_stopped_here


def wait_until(
    reached: Callable[[], bool], timeout_s: float = 240.0, *, process: subprocess.Popen[Any] | None = None
) -> float:
    """Return the seconds that it took. process: must not end meanwhile."""
    start_s = time.monotonic()
    while not reached():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() - start_s < timeout_s
        time.sleep(0.02)
    return time.monotonic() - start_s


def freeze(pid: int) -> None:
    """SIGSTOP returns before the threads of the process have stopped: on a busy machine one of them may still answer a
    message that was sent afterwards."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped_here(pid))


@contextmanager
def all_cpus() -> Iterator[None]:
    """Reserve all CPUs of a cluster of one node, as the engines of other jobs do."""
    group = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])  # type: ignore[no-untyped-call]
    try:
        assert group.wait(60)
        yield
    finally:
        remove_placement_group(group)
