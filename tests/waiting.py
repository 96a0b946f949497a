"""Waiting for what another thread or process does."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

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
