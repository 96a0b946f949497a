"""Signals to this process."""

import os
import signal
import time

import pytest
import ray

from rayspec.batch.job import Drain


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_asks_and_the_second_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    asked = []
    drain = Drain(60.0)
    drain.on_request = lambda: asked.append(drain.requested)
    with pytest.raises(SystemExit) as exit_, drain.watching():
        assert not drain.requested
        terminate()
        assert asked == [True]
        terminate()
    assert (exit_.value.code, asked) == (143, [True])
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
def test_the_end_of_the_grace_period_ends(grace_s: float) -> None:
    started_s = time.monotonic()
    with pytest.raises(SystemExit) as exit_, Drain(grace_s).watching():
        terminate()
        time.sleep(120)
    assert exit_.value.code == 143
    assert grace_s <= time.monotonic() - started_s + 0.05 < 60


@pytest.mark.ray
def test_an_exit_while_ray_waits_keeps_its_code(ray_cluster: None) -> None:
    """Ray makes 1 of it."""
    endless = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    try:
        with pytest.raises(SystemExit) as exit_, Drain(0.2).watching():
            terminate()
            ray.get(endless)
    finally:
        ray.cancel(endless, force=True)  # noqa: TID251 - it never ends
    assert exit_.value.code == 143
