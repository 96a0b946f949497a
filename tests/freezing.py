"""Stopping a process so that it has stopped."""

from __future__ import annotations

import os
import signal
import time

from rayspec.pool.stopped import is_stopped_here

_PATIENCE_S = 30.0


def freeze(pid: int) -> None:
    """SIGSTOP returns before the threads of the process have stopped: on a busy machine one of them may still answer a
    message that was sent afterwards."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE_S
    while not is_stopped_here(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.001)
