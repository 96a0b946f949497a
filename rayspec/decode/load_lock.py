"""A file lock for what must not run at the same time on this machine: measurements, and loads beside a measurement."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from typing_extensions import Self

_POLL_S = 0.05


class LoadLock:
    """Loads share the lock, and a measurement has it alone. Processes that save their profiles in the same folder use
    the same lock. The lock file lies in the machine's own temporary folder, because `folder` may be shared by machines.

    Every wait has a limit, because a process may be stopped while it has the lock. Without a file, nobody waits.
    """

    def __init__(self, folder: Path) -> None:
        name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        self._path = Path(tempfile.gettempdir()) / f"rayspec-{os.getuid()}-{name}.lock"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # of another user, or in a folder that cannot be written
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._path, flags, 0o600), "r+b")
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
        deadline = time.monotonic() + timeout_s
        while not self._locks_now(kind):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _locks_now(self, kind: int) -> bool:
        try:
            if self._file is not None:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
