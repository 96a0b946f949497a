"""An endpoint on this machine, from its start until it is told to end."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rayspec.model.weights import load_config
from rayspec.pipeline.session import ray_session
from rayspec.service.serve.app import bind
from rayspec.service.serve.options import ServeOptions
from rayspec.service.terminal import exit_on_sigterm
from rayspec.types import ConfigError, RayspecError

_APP = "rayspec"
_RAY_ADDRESS = "RAY_ADDRESS"
_POLL_S, _ANSWER_S = 0.1, 5.0
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


class DeploymentError(RayspecError):
    """The endpoint could not be started."""

    kind = "deployment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen. port 0: one that is free."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def checked(self) -> Address:
        """With a port that can be had. Serve itself would share one that another Serve has. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(f"option 'port' is {self.port}, which is in use: choose another, or 0") from None
                raise ConfigError(
                    f"options 'host' and 'port' are {self.host!r} and {self.port}: {error.strerror or error}"
                ) from None
            return Address(host=self.host, port=probe.getsockname()[1])


def run_endpoint(options: ServeOptions, address: Address, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; then refuse what comes, finish what is under way, as far as the largest
    graceful_shutdown_timeout_s allows, and leave nothing behind.

    announce: called with the URL when requests can come. Raises ConfigError, CheckpointError,
    DeploymentError.
    """
    address = address.checked()
    if _RAY_ADDRESS not in os.environ:
        _check_models(options)
    with ray_session():
        _check_free()
        try:
            ingress = _start(options, address)
            exit_on_sigterm()
            announce(address.url)
            with suppress(SystemExit, KeyboardInterrupt):
                threading.Event().wait()
            _drain(ingress, timeout_s=max(one.graceful_shutdown_timeout_s for one in options.deployments))
            serve.delete(_APP)
        finally:
            if _RAY_ADDRESS in os.environ:  # a private Ray ends with its Serve
                serve.shutdown()  # type: ignore[no-untyped-call]


def _check_models(options: ServeOptions) -> None:
    """Before anything is started; a cluster's nodes may have other files than this one. Raises CheckpointError."""
    for config in options.llm_configs:
        engine = config.engine
        if engine.model != "demo":
            load_config(engine)


def _start(options: ServeOptions, address: Address) -> DeploymentHandle[Any]:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    application = bind(options)
    serve.start(http_options={"host": address.host, "port": address.port}, logging_config=_QUIET)
    try:
        return serve.run(application, name=_APP, logging_config=_QUIET)
    except RuntimeError as error:
        raise DeploymentError(f"the endpoint could not be started: {error}") from error


def _drain(ingress: DeploymentHandle[Any], *, timeout_s: float) -> None:
    """Serve by itself would answer 404 from the first moment on."""
    end_s = time.monotonic() + timeout_s
    with suppress(RayServeException, RayError, TimeoutError):  # no ingress, no requests under way
        while time.monotonic() < end_s and sum(ingress.broadcast("drain").results(timeout_s=_ANSWER_S)):
            time.sleep(_POLL_S)


def _check_free() -> None:
    """Raises ConfigError when the cluster has a Serve that is not ours to end."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    raise ConfigError("the cluster at RAY_ADDRESS runs Serve already: deploy to it with `serve deploy`")
