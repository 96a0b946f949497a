from concurrent.futures import Future

from rayspec.pipeline.recovery import Pulse, Restarts, Status


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Process:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.num_asked = 0

    def ask(self, method: str) -> Future[Status]:
        assert method == "status"
        self.num_asked += 1
        self.asked: Future[Status] = Future()
        return self.asked

    def answer(self, problem: str = "") -> None:
        self.asked.set_result(Status(problem, 0.0, 0))


def deaths_after(seconds: int, clock: Clock, pulse: Pulse, **processes: Process) -> dict[str, str]:
    """Somebody looks every second."""
    found = pulse.deaths(processes)
    for _ in range(seconds):
        clock.now += 1
        found = pulse.deaths(processes)
    return found


def test_who_is_silent_for_too_long_is_dead_and_a_new_one_of_that_name_is_not() -> None:
    clock, a, b = Clock(), Process(), Process()
    pulse = Pulse(10.0, clock)
    assert deaths_after(9, clock, pulse, a=a, b=b) == {}
    b.answer()
    assert deaths_after(2, clock, pulse, a=a, b=b) == {"a": "a has not been heard of for 11.0 s"}
    assert (a.num_asked, b.num_asked) == (1, 2)
    assert deaths_after(8, clock, pulse, a=Process(), b=b) == {}
    assert list(deaths_after(1, clock, pulse, b=b)) == ["b"]


def test_while_nobody_looked_nobody_died() -> None:
    """A machine that was suspended, with all processes on it."""
    clock, a, b = Clock(), Process(), Process()
    pulse = Pulse(10.0, clock)
    assert deaths_after(5, clock, pulse, a=a, b=b) == {}
    clock.now += 3600
    assert deaths_after(0, clock, pulse, a=a, b=b) == {}
    a.answer()
    assert deaths_after(2, clock, pulse, a=a, b=b) == {}
    assert list(deaths_after(1, clock, pulse, a=a, b=b)) == ["b"]  # 5 s, of the long while 2.5 s, and 3 s


def test_who_says_that_it_is_stuck_is_dead_and_who_has_ended_is_not_asked_again() -> None:
    clock, a, b = Clock(), Process(), Process()
    pulse = Pulse(10.0, clock)
    assert deaths_after(1, clock, pulse, a=a, b=b) == {}
    a.answer("is stuck")
    b.asked.set_exception(RuntimeError("ended"))
    assert deaths_after(0, clock, pulse, a=a, b=b) == {"a": "a is stuck"}
    a.answer()
    assert deaths_after(1, clock, pulse, a=a, b=b) == {}
    assert pulse.statuses == {"a": Status("", 0.0, 0)}


def test_restarts_are_bounded_and_further_apart_each_time_until_there_is_progress() -> None:
    restarts = Restarts(4)
    for _ in range(2):
        assert [restarts.next_delay_s() for _ in range(6)] == [0.0, 0.2, 0.4, 0.8, None, None]
        restarts.renew()
    assert Restarts(0).next_delay_s() is None
    many = Restarts(2000)
    assert max(many.next_delay_s() or 0.0 for _ in range(2000)) == 30.0


def test_restarts_outside_the_window_do_not_count() -> None:
    clock = Clock()
    restarts = Restarts(2, window_s=600.0, clock=clock)
    assert [restarts.next_delay_s() for _ in range(3)] == [0.0, 0.2, None]
    clock.now += 601
    assert restarts.next_delay_s() == 0.0
    for _ in range(3):  # the one before the last is outside each time
        clock.now += 301
        assert restarts.next_delay_s() == 0.2
