from __future__ import annotations

from rayspec.pipeline.recovery import Pulse, Restarts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def dead(pulse: Pulse) -> list[str]:
    return list(pulse.deaths())


def dead_after(seconds: int, clock: Clock, pulse: Pulse) -> list[str]:
    """Who is, when somebody has looked every second."""
    found = dead(pulse)
    for _ in range(seconds):
        clock.now += 1
        found = dead(pulse)
    return found


def test_who_is_silent_for_too_long_is_dead() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.watch(["a", "b"])
    assert dead_after(9, clock, pulse) == []
    pulse.hear("b")
    assert dead_after(2, clock, pulse) == ["a"]
    assert pulse.deaths() == {"a": "a has not been heard of for 11.0 s"}
    assert dead_after(9, clock, pulse) == ["a", "b"]


def test_while_nobody_looked_nobody_died() -> None:
    """A machine that was suspended, with all processes on it."""
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.watch(["a", "b"])
    assert dead_after(5, clock, pulse) == []
    clock.now += 3600
    assert dead(pulse) == []
    pulse.hear("a")
    assert dead_after(2, clock, pulse) == []
    assert dead_after(1, clock, pulse) == ["b"]  # 5 s, of the long while 2.5 s, and 3 s


def test_who_was_heard_of_since_the_last_look_is_not_heard_of_in_the_future() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.watch(["a"])
    clock.now += 100
    pulse.hear("a")
    assert dead(pulse) == []
    assert dead_after(10, clock, pulse) == []
    assert dead_after(1, clock, pulse) == ["a"]


def test_only_who_is_watched_is_missed_and_watching_starts_anew() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.watch(["a"])
    assert dead_after(10, clock, pulse) == []
    pulse.hear("stranger", "is stuck")
    pulse.watch(["b"])
    assert dead_after(10, clock, pulse) == []
    assert dead_after(1, clock, pulse) == ["b"]


def test_who_says_that_it_is_stuck_is_dead() -> None:
    clock = Clock()
    pulse = Pulse(10.0, clock)
    pulse.watch(["a", "b"])
    pulse.hear("a", "is stuck")
    pulse.hear("b")
    assert pulse.deaths() == {"a": "a is stuck"}
    pulse.hear("a")
    assert dead(pulse) == []
    pulse.hear("a", "is stuck")
    pulse.watch(["a", "b"])
    assert dead(pulse) == []


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
