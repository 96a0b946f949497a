"""Whether the thread that runs a model is stuck, as another thread of its process judges it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LEAST_S = 60.0
_MARGIN = 20.0
_UNPREDICTED_S = 1200.0
_IDLE_SHARE = 0.01
_LONGEST_LOOK_S = 2.5  # if the judge looks later than that, the whole process was not running
_DECAY = 0.5

CpuClock = Callable[[], float]


def cpu_clock_of_this_thread() -> CpuClock:
    """Return a clock of the CPU seconds of the calling thread, which any thread may read. Where the system has no such
    clock, return a clock of all seconds."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """expected_s: None if nothing is known about its duration. cpu: of the thread that runs it."""

    started_s: float
    expected_s: float | None
    cpu: CpuClock


class Progress:
    """The tasks of one thread, mostly forward passes, and a judgement whether the present task is stuck.

    A task is stuck if it has lasted at least 60 s (`least_s`) and 20 times as long as expected. A busy machine is no
    reason: only seconds count in which the thread has used CPU time for this task, or the latest seconds in which it
    has used none. A task without an expectation (the first of its kind, a plan search, a measurement) is stuck after 20
    minutes without any CPU time. The expectation comes from earlier tasks of the same kind.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], CpuClock] = cpu_clock_of_this_thread,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._longest_s: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._task: _Task | None = None
        self._worked_s = 0.0
        self._watched: _Task | None = None
        self._began_cpu_s = self._cpu_s = self._idle_s = 0.0
        self._looked_s = clock()

    @contextmanager
    def of(self, kind: str, size: int | None = None) -> Iterator[None]:
        """Run a task on this thread. size: its amount of work, for the expectation; None: it has no expectation."""
        expected_s = None if size is None else self._expected_s(kind, size)
        self._task = task = _Task(self._clock(), expected_s, self._cpu_clock())
        try:
            yield
        finally:
            self._task = None
            took_s = self._clock() - task.started_s
            self._worked_s += took_s
            if size is not None:
                longest_s = self._longest_s[kind]
                longest_s[_step(size)] = max(took_s, _DECAY * longest_s.get(_step(size), 0.0))

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    @property
    def worked_s(self) -> float:
        """Seconds of all tasks so far. Any thread may read it."""
        task = self._task
        return self._worked_s + (self._clock() - task.started_s if task is not None else 0.0)

    def problem(self, least_s: float = LEAST_S) -> str | None:
        """Return why the present task is stuck; None if it is not. Only one thread may call it, every second or two."""
        now_s, task = self._clock(), self._task
        passed_s = min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        if task is None:
            return None
        cpu_s = task.cpu()
        if task is not self._watched:
            self._watched, self._began_cpu_s, self._cpu_s, self._idle_s = task, cpu_s, cpu_s, 0.0
            passed_s = 0.0
        is_idle = cpu_s - self._cpu_s <= _IDLE_SHARE * passed_s
        self._idle_s = self._idle_s + passed_s if is_idle else 0.0
        self._cpu_s = cpu_s
        lasted_s = now_s - task.started_s
        if task.expected_s is None:
            if self._idle_s < max(least_s, _UNPREDICTED_S):
                return None
            return (
                f"has not finished a task for {lasted_s:.0f} s, and used no CPU time for the last {self._idle_s:.0f} s"
            )
        if max(self._idle_s, cpu_s - self._began_cpu_s) < max(least_s, _MARGIN * task.expected_s):
            return None
        return (
            f"has not finished a pass for {lasted_s:.0f} s, and the pass was expected to take {task.expected_s:.2g} s"
        )

    def _expected_s(self, kind: str, size: int) -> float | None:
        """Return the smallest bound that the longest earlier tasks give: a task of half the size takes no longer, and
        a task of twice the size takes twice as long at most."""
        return min(
            (seconds * max(1.0, size / 2**step) for step, seconds in self._longest_s[kind].items()), default=None
        )


def _step(size: int) -> int:
    """Return the class of similar sizes, by powers of two."""
    return max(size, 1).bit_length() - 1
