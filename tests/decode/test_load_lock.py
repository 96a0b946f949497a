"""Who waits for whom, among processes that load and measure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rayspec.decode.profile import LoadLock

SOON_S = 0.1


def test_loads_run_side_by_side_and_a_measurement_alone(tmp_path: Path) -> None:
    with LoadLock(tmp_path) as first, LoadLock(tmp_path) as second, LoadLock(tmp_path) as third:
        assert first.share(SOON_S)
        assert second.share(SOON_S)
        assert not first.take(SOON_S), "the second still loads"
        assert second.take(SOON_S), "whoever waits to measure loads no more"
        assert not third.share(SOON_S)
        assert not first.take(SOON_S)
    with LoadLock(tmp_path) as first, LoadLock(tmp_path / "elsewhere") as second:
        assert first.take(SOON_S)
        assert second.take(SOON_S)


def test_a_process_that_is_stopped_or_killed_does_not_block_others_for_ever(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rayspec.decode.profile import LoadLock\n"
        f"with LoadLock(Path({str(tmp_path)!r})) as lock: print(lock.take(5.0), flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        os.kill(other.pid, signal.SIGSTOP)
        with LoadLock(tmp_path) as lock:
            began = time.monotonic()
            assert not lock.take(0.3)
            assert time.monotonic() - began < 5.0
            other.kill()
            assert lock.take(10.0)
    finally:
        other.kill()
        other.wait()


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with LoadLock(tmp_path / "file") as lock, LoadLock(tmp_path / "file") as other:
        assert lock.take(SOON_S)
        assert other.share(SOON_S)
