"""A thread that runs jobs for callers, so that the engine's thread does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Delivery:
    """Runs jobs in order on a separate thread. Jobs must not raise."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="rayspec-delivery", daemon=True)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """End the thread after the jobs that are queued now."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
