"""Ray for the length of a job or a model: the cluster we are told of, or a private one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import ray

_MIN_LOCAL_CPUS = 4  # a reservation count, not cores: reading, clients and engine must all fit a small machine


@contextmanager
def ray_session() -> Iterator[None]:
    """Attach to RAY_ADDRESS where it is set; otherwise start Ray here and stop it in the end.

    A private cluster gets a token of its own, so that nobody else on the machine can use it and none is left in the
    home folder. Ray reads the token once, so it stays in this process's environment.
    """
    if ray.is_initialized():
        yield
        return
    try:
        if "RAY_ADDRESS" in os.environ:
            ray.init(logging_level=logging.WARNING)
        else:
            _start_private()
        yield
    finally:
        ray.shutdown()


def _start_private() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    ray.init(
        address="local",
        num_cpus=max(_MIN_LOCAL_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
