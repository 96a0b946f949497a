"""Stopping a process so that it has stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_PATIENCE_S = 30.0


def freeze(pid: int) -> None:
    """SIGSTOP returns before the threads of the process have stopped: on a busy machine one of them may still answer a
    message that was sent afterwards."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _PATIENCE_S
    while not _is_frozen(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.001)


def _is_frozen(pid: int) -> bool:
    """Whether every thread has stopped, or has ended."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)
