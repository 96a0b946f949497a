"""Ray for the length of a job: the cluster we are told of, or a private one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import ray.data

_MIN_LOCAL_CPUS = 4  # a reservation count, not cores: reading, clients and engine must all fit a small machine
_PRIVATE_ENVIRONMENT = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED")


@contextmanager
def ray_session() -> Iterator[None]:
    """Attach to RAY_ADDRESS where it is set; otherwise start Ray here and stop it in the end.

    A private cluster gets a token of its own, so that nobody else on the machine can use it and none is left in the
    home folder. The environment is put back as it was.
    """
    if ray.is_initialized():
        yield
        return
    private = "RAY_ADDRESS" not in os.environ
    saved = {name: os.environ.get(name) for name in _PRIVATE_ENVIRONMENT}
    try:
        _start_private() if private else ray.init(logging_level=logging.WARNING)
        _quieten()
        yield
    finally:
        ray.shutdown()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_private() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    ray.init(
        address="local",
        num_cpus=max(_MIN_LOCAL_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        logging_level=logging.ERROR,
    )


def _quieten() -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
