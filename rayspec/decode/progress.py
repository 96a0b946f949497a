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
    """Return a clock of this thread's CPU seconds for any thread; of all seconds where the system has none."""
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

    A task is stuck if it has lasted `least_s` and 20 times as long as expected from earlier tasks of its kind. A busy
    machine is no reason: only seconds count in which the thread has used CPU time for this task, or the latest seconds
    in which it has used none. A task without an expectation (the first of its kind, a plan search, a measurement) is
    stuck after 20 minutes without any CPU time.
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
        # The smallest bound that the longest earlier tasks give, by powers of two of their sizes: a task of half the
        # size takes no longer, and a task of twice the size twice as long at most.
        longest_s, step = self._longest_s[kind], max(size or 0, 1).bit_length() - 1
        bounds = (seconds * max(1.0, (size or 0) / 2**at) for at, seconds in longest_s.items())
        expected_s = None if size is None else min(bounds, default=None)
        self._task = task = _Task(self._clock(), expected_s, self._cpu_clock())
        try:
            yield
        finally:
            self._task = None
            took_s = self._clock() - task.started_s
            self._worked_s += took_s
            if size is not None:
                longest_s[step] = max(took_s, _DECAY * longest_s.get(step, 0.0))

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
            why = f"used no CPU time for the last {self._idle_s:.0f} s"
            return f"has not finished a task for {lasted_s:.0f} s, and {why}"
        if max(self._idle_s, cpu_s - self._began_cpu_s) < max(least_s, _MARGIN * task.expected_s):
            return None
        why = f"the pass was expected to take {task.expected_s:.2g} s"
        return f"has not finished a pass for {lasted_s:.0f} s, and {why}"
