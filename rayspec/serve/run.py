"""An endpoint on this machine, from its start until SIGTERM or Ctrl-C."""

from __future__ import annotations

import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
from ray import serve

from rayspec.command.terminal import exit_on_sigterm, say
from rayspec.demo import BUNDLED, local_path
from rayspec.machine import keep_loaded, ray_address, return_large_blocks, switch_threads_often
from rayspec.ray_session import ray_session
from rayspec.serve.access import ANY, ApiKeys, is_loopback
from rayspec.serve.app import bind_models, bind_runner, model_deployment, with_sizes
from rayspec.serve.batch_store import BatchStore
from rayspec.serve.front import http_server
from rayspec.serve.ingress import Ingress, build_app
from rayspec.serve.options import ServeOptions
from rayspec.types import ConfigError, RayspecError

_APP = "rayspec"
_RUNNER_APP = "rayspec-batches"
_CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
_QUIET = {"log_level": "CRITICAL", "enable_access_log": False}  # the watch logs the events that matter


class DeploymentError(RayspecError):
    """The endpoint could not be started."""

    kind = "deployment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address to listen at. port 0: any free port."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @contextmanager
    def bound(self) -> Iterator[socket.socket]:
        """Yield a socket that is bound to this address and does not listen yet. Raises ConfigError."""
        if not self.host.strip():  # the system would take all addresses
            raise ConfigError(f"option 'host' is {self.host!r}: name an address; 0.0.0.0 stands for all")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier connections may linger
            try:
                listener.bind((self.host, self.port))
            except (OSError, TypeError, UnicodeError) as error:  # the latter two for what no host name can have
                raise self._refusal(error) from None
            yield listener

    def listen(self, listener: socket.socket) -> None:
        """Listen on the socket of `bound`. Raises ConfigError if another process listens there meanwhile."""
        try:
            listener.listen(2048)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> ConfigError:
        if not isinstance(error, OSError):
            return ConfigError(f"option 'host' is {self.host!r}, which is no host name: name an address")
        if error.errno == errno.EADDRINUSE:
            return ConfigError(f"option 'port' is {self.port}, which is in use: choose another, or 0")
        return ConfigError(f"options 'host' and 'port' are {self.host!r} and {self.port}: {error.strerror or error}")


def run_endpoint(options: ServeOptions, address: Address, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then refuse new requests, give those under way the largest
    graceful_shutdown_timeout_s to finish, and leave nothing behind. announce: called with the URL when requests can
    come. Raises ConfigError, CheckpointError, DeploymentError."""
    with address.bound() as listener:
        bound = Address(host=address.host, port=listener.getsockname()[1])
        engines = [config.engine for config in options.llm_configs]
        engines = [engine for engine in engines if engine.lora_modules or engine.model not in BUNDLED]
        if engines and ray_address() is None:  # a cluster's nodes may have other files
            # They bring torch and transformers.
            from rayspec.model.sources import adapter_config, base_model  # noqa: PLC0415
            from rayspec.model.weights import load_config  # noqa: PLC0415

            for engine in engines:  # finds errors before Ray starts
                base, revision = base_model(engine.model) or (engine.model, None)  # of the folder of an adapter
                load_config(engine.replace(model=local_path(base), revision=engine.revision or revision))
                for folder in engine.lora_modules.values():
                    adapter_config(folder)
        for config in options.llm_configs:  # finds errors in their deployment_config
            model_deployment(config, replica_timeout_s=options.replica_timeout_s, name="Model", num_gpus=0)
        if options.batches is not None and ray_address() is None:
            _check_folder(options.batches)
        with ray_session(sum(config.num_cpus for config in options.llm_configs), say):
            if _CONTROLLER in ray.util.list_named_actors(all_namespaces=True):
                raise ConfigError("the cluster at RAY_ADDRESS runs Serve already: deploy to it with `serve deploy`")
            try:
                _serve(with_sizes(options), bound, listener, announce)
            finally:
                if ray_address() is not None:  # a private Ray ends with its Serve
                    serve.shutdown()  # type: ignore[no-untyped-call]


def _serve(options: ServeOptions, address: Address, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Start the models and serve until a signal. Raises ConfigError and DeploymentError."""
    models = [config.model_id for config in options.llm_configs]
    say(f"loading {', '.join(models)}; the first start measures this machine")
    names = [_APP if index == 0 else f"{_APP}-{index + 1}" for index in range(len(models))]
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    targets = [
        serve.RunTarget(target=model, name=name, route_prefix=None, logging_config=_QUIET)
        for name, model in zip(names, bind_models(options).values(), strict=True)
    ]
    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    try:
        handles = dict(zip(models, serve.run_many(targets), strict=True))
    except RuntimeError as error:
        made = [one for app in serve.status().applications.values() for one in app.deployments.values()]
        tracebacks = [one.message.rstrip() for one in made if one.status == "DEPLOY_FAILED"]
        causes = [re.sub(r"^[\w.]+: ", "", traceback.rpartition("\n")[2]) for traceback in tracebacks]
        raise DeploymentError(f"the endpoint could not be started: {'; '.join(causes) or error}") from error
    runner, batches = None, bind_runner(options, handles)
    if batches is not None:
        runner = serve.run(batches, name=_RUNNER_APP, route_prefix=None, logging_config=_QUIET)
        names.insert(0, _RUNNER_APP)
    keys, hosts = ApiKeys.of(options.api_keys), allowed_hosts(options, address)
    ingress = Ingress(options.replace(api_keys=()), handles, runner, keys=keys, hosts=hosts)
    address.listen(listener)
    timeouts = {"header_timeout_s": options.header_timeout_s, "write_timeout_s": options.body_timeout_s}
    keep_loaded()
    return_large_blocks()
    switch_threads_often()
    with http_server(build_app(ingress), listener, **timeouts) as server:
        exit_on_sigterm()
        with suppress(SystemExit, KeyboardInterrupt):
            _wait_until(lambda: not ingress.watch.known_problems, timeout_s=10.0)
            announce(address.url)
            server.join()
            raise DeploymentError("the endpoint's HTTP server has ended by itself: the log says why; start it again")
        ingress.entry.draining = True
        deployments = [options.ingress_deployment_config, *(one.deployment_config for one in options.llm_configs)]
        longest_s = max(one.graceful_shutdown_timeout_s for one in deployments)
        _wait_until(lambda: ingress.entry.num_under_way == 0, timeout_s=longest_s)
    for name in names:
        serve.delete(name)


def _check_folder(name: str) -> None:
    """Raise ConfigError for a folder of batches that cannot be written to."""
    try:
        lock = BatchStore.at(name).folder.join(".lock").lock()
    except BlockingIOError:  # another server runs batches there: those of this one wait
        return
    except OSError as error:
        problem = f"option 'batches' is {name!r}, which cannot be used ({error.strerror}): name another folder"
        raise ConfigError(problem) from None
    if lock is not None:
        lock.close()


def allowed_hosts(options: ServeOptions, address: Address) -> frozenset[str]:
    """Return the names by which clients may call an endpoint that listens at `address`, see `allowed_host`."""
    if options.allowed_hosts is not None:
        return frozenset(options.allowed_hosts)
    return frozenset() if is_loopback(address.host) else frozenset({ANY})


def _wait_until(reached: Callable[[], bool], *, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not reached() and time.monotonic() < end_s:
        time.sleep(0.05)
