"""Signals to this process."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ray

from rayspec.batch.job import Drain


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_asks_and_goes_on() -> None:
    asked = []
    drain = Drain(60.0)
    with drain.watching(lambda: asked.append(drain.requested)):
        assert not drain.requested
        terminate()
        assert asked == [True]
    assert drain.requested


def test_the_second_signal_ends_at_once() -> None:
    asked = []
    drain = Drain(60.0)
    with pytest.raises(SystemExit) as exit_, drain.watching(lambda: asked.append(1)):
        terminate()
        terminate()
    assert (exit_.value.code, asked) == (143, [1])


def test_the_end_of_the_grace_period_ends() -> None:
    started_s = time.monotonic()
    with pytest.raises(SystemExit) as exit_, Drain(0.2).watching(lambda: None):
        terminate()
        time.sleep(30)
    assert exit_.value.code == 143
    assert 0.15 < time.monotonic() - started_s < 10


def test_without_a_grace_period_the_first_signal_ends_at_once() -> None:
    with pytest.raises(SystemExit) as exit_, Drain(0.0).watching(lambda: None):
        terminate()
    assert exit_.value.code == 143


def test_handlers_and_the_timer_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    with Drain(0.1).watching(lambda: None):
        terminate()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.ray
def test_an_exit_while_ray_waits_keeps_its_code(ray_cluster: None) -> None:
    """Ray makes 1 of it."""
    endless = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    try:
        with pytest.raises(SystemExit) as exit_, Drain(0.2).watching(lambda: None):
            terminate()
            ray.get(endless)
    finally:
        ray.cancel(endless, force=True)  # noqa: TID251 - it never ends
    assert exit_.value.code == 143


def test_an_exit_of_another_kind_is_left_alone() -> None:
    with pytest.raises(SystemExit) as exit_, Drain(0.2).watching(lambda: None):
        raise SystemExit(3)
    assert exit_.value.code == 3
