"""What is done for callers beside the engine's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Delivery:
    """Does jobs in their order, on a thread of its own. Jobs must not raise."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="rayspec-delivery", daemon=True)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """The thread ends after the jobs that it has."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
