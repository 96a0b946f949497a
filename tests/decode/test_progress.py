"""Which threads are stuck: fake clocks for the limits, real threads for what the clocks of the system say."""

import threading
import time
from collections.abc import Callable

import pytest

from rayspec.decode.stages import Progress, cpu_clock_of_this_thread


class Lab:
    """A progress whose clocks are set by hand."""

    def __init__(self) -> None:
        self.now_s = self.cpu_s = 0.0
        self.progress = Progress(lambda: self.now_s, lambda: lambda: self.cpu_s)

    def pass_of(self, seconds: float, *, kind: str = "round", size: int = 1) -> None:
        with self.progress.of(kind, size):
            self.now_s += seconds

    def watched(self, seconds: float, cpu_share: float, *, every_s: float = 1.0) -> str | None:
        """What the judge finds at last."""
        found = None
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.cpu_s += cpu_share * every_s
            found = self.progress.problem()
        return found


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.mark.parametrize("cpu_share", [0.0, 1.0], ids=["deadlocked", "spinning"])
def test_a_pass_is_stuck_after_a_minute_and_twenty_times_its_expectation(lab: Lab, cpu_share: float) -> None:
    lab.pass_of(0.4)
    with lab.progress.of("round", 1):
        assert lab.watched(58, cpu_share) is None
        found = lab.watched(4, cpu_share)
    assert found == "has not finished a pass for 62 s, and the pass was expected to take 0.4 s"
    lab.pass_of(10, kind="prefill")
    with lab.progress.of("prefill", 1):
        assert lab.watched(198, cpu_share) is None
        assert lab.watched(4, cpu_share) is not None


def test_a_busy_machine_makes_nobody_stuck(lab: Lab) -> None:
    """The thread gets a twentieth of a core: the pass takes twenty minutes, and is at work all the while."""
    lab.pass_of(0.4)
    with lab.progress.of("round", 1):
        assert lab.watched(1190, 0.05) is None
        assert lab.watched(20, 0.05) is not None, "a minute of CPU time is enough for a pass of 0.4 s"


def test_the_first_of_a_kind_and_a_search_may_take_as_long_as_they_work(lab: Lab) -> None:
    for kind, size in (("round", 1), ("search", None), ("search", None)):
        with lab.progress.of(kind, size):
            assert lab.watched(5000, 0.1) is None
            assert lab.watched(1190, 0.0) is None
            found = lab.watched(20, 0.0)
        assert found is not None
        assert "used no CPU time for the last" in found


def test_a_thread_that_spins_for_hours_in_one_task_is_stuck(lab: Lab) -> None:
    """As one that waits for a GPU that never answers."""
    with lab.progress.of("measure", None):
        assert lab.watched(7000, 1.0) is None
        found = lab.watched(300, 1.0)
    assert found is not None
    assert "of CPU time" in found


def test_a_process_that_was_stopped_and_goes_on_is_not_stuck(lab: Lab) -> None:
    lab.pass_of(0.4)
    with lab.progress.of("round", 1):
        assert lab.watched(3600, 0.0, every_s=3600.0) is None
        assert lab.watched(50, 0.0) is None


def test_worked_seconds(lab: Lab) -> None:
    lab.pass_of(3)
    with pytest.raises(ValueError, match="over"), lab.progress.of("round", 1):
        lab.now_s += 2
        assert lab.progress.worked_s == 5
        raise ValueError("over")
    assert lab.progress.worked_s == 5


def test_the_clock_of_a_thread_counts_its_own_cpu_seconds() -> None:
    clocks: list[Callable[[], float]] = []
    may_end, spun = threading.Event(), threading.Event()

    def spin() -> None:
        clocks.append(cpu_clock_of_this_thread())
        while clocks[0]() < 0.1:
            pass
        spun.set()
        may_end.wait(30)

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    assert spun.wait(30)
    before = clocks[0]()
    time.sleep(0.1)
    assert 0.1 <= before <= clocks[0]() < before + 0.05, "it waits, and works no more"
    may_end.set()
