"""A file lock for what must not run at the same time on this machine: measurements, and loads beside a measurement."""

from __future__ import annotations

import fcntl
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from typing_extensions import Self

from rayspec.machine import boot_id

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SILENT_S = 5.0  # of waiting, until a line says so


class LoadLock:
    """Loads share the lock, and a measurement has it alone. It is a file in the folder of the profiles, for all
    processes of this machine that use the folder, in containers too. Each machine has a file of its own.

    Every wait has a limit, because a process may be stopped while it has the lock. Where there can be no such file,
    nobody waits.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"loading-{boot_id()[:13]}.lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # the folder cannot be written
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def share(self, timeout_s: float = 30.0) -> bool:
        """Wait until nobody measures, and keep others from measuring. Return False after the timeout."""
        return self._locked(fcntl.LOCK_SH, timeout_s)

    def take(self, timeout_s: float = 60.0) -> bool:
        """Wait until nobody else loads or measures, and keep all others waiting. A shared lock is given up first.
        Return False after the timeout."""
        return self._locked(fcntl.LOCK_EX, timeout_s)

    def _locked(self, kind: int, timeout_s: float) -> bool:
        began, is_told = time.monotonic(), False
        while self._file is not None:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - began
            except OSError:  # a file system without locks
                break
            if waited_s > timeout_s:
                return False
            if waited_s > _SILENT_S and not is_told:
                is_told = True
                logger.warning(
                    "waiting up to %.0f s for other processes that load or measure a model (they lock %s)",
                    timeout_s,
                    self._path,
                )
            time.sleep(_POLL_S)
        return True
