"""Ray for the lifetime of a job or a model: the cluster at RAY_ADDRESS, or a private one on this machine."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.exceptions import RayError

from rayspec.machine import num_cores, ray_address
from rayspec.types import ConfigError, RayspecError

_MIN_LOCAL_CPUS = 4  # a reservation count, not cores: reading, clients and engine must all fit a small machine
_CONNECT_S = 10.0
_LOSS_SIGNAL = signal.SIGURG  # ignored by default; SIGINT is ignored by background processes of a shell
_WATCHED = {"gcs_server": "control process (gcs_server)", "raylet": "process for this node (raylet)"}

# Sessions that share the Ray that one of them has started. A garbage collection may end one in any thread, also in one
# that holds the lock.
_lock, _num_sessions = threading.RLock(), 0


class ClusterStartError(RayspecError):
    """Ray could not start on this machine."""

    kind = "cluster_start"


class ClusterLostError(RayspecError):
    """The private cluster of a session has lost one of its processes and cannot go on."""

    kind = "cluster_lost"


@contextmanager
def ray_session(num_cpus: float = 0, say: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Attach to RAY_ADDRESS if it is set; otherwise start Ray here. The last of the sessions that share it stops it.

    num_cpus: CPUs that shards reserve (`ParallelOptions.num_cpus`). A private cluster has them, and one more: a
    reservation that can never be met would wait for `start_timeout_s`. say: gets a line before a start or connection.

    A private cluster gets a token of its own, so that nobody else on the machine can use it and no token is left in the
    home folder. Ray reads the token once, so it stays in this process's environment.
    SIGTERM and Ctrl-C take effect after Ray has started. The earlier handlers are then in force; Ray's handler for
    SIGTERM only if there was none. In the main thread, the loss of a private cluster raises ClusterLostError. Raises
    ConfigError if there is no Ray at RAY_ADDRESS, and ClusterStartError if Ray cannot start here.
    """
    global _num_sessions  # noqa: PLW0603 - a process has one Ray
    with ExitStack() as session:
        with _lock:
            is_running = ray.is_initialized()
            if not is_running or _num_sessions:  # else it is somebody else's
                _num_sessions += 1
                session.callback(_leave)
            if not is_running:
                address = ray_address()
                say("starting Ray on this machine" if address is None else f"connecting to Ray at {address}")
                with _signals_wait(starts=address is None):
                    _start(num_cpus)
        if not is_running:
            session.enter_context(_watching(say))
        yield


def _leave() -> None:
    global _num_sessions  # noqa: PLW0603
    with _lock:
        _num_sessions -= 1
        if _num_sessions:
            return
        orphans = _orphans()
        ray.shutdown()
        for process in orphans:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _start(num_cpus: float) -> None:
    if (address := ray_address()) is not None:
        try:
            require_listener(address)
            ray.init(logging_level=logging.WARNING)
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and Ray cannot be used there ({error}): correct it, or unset it to start "
                "Ray on this machine"
            ) from error
        return
    if folder := os.environ.get("RAY_TMPDIR"):  # Ray's processes have other current folders
        os.environ["RAY_TMPDIR"] = os.path.abspath(folder)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
    # Ray's default of 15 leaves its workers, and so our engines, 2 % of a core that another program wants, too.
    os.environ.setdefault("RAY_worker_niceness", "0")
    num_local = max(_MIN_LOCAL_CPUS, num_cores(), math.ceil(num_cpus) + 1)
    try:
        with _own_groups():
            ray.init(address="local", num_cpus=num_local, include_dashboard=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises this very class if its processes are too slow
        raise ClusterStartError(
            f"Ray could not start on this machine ({error}): remove the cause, or try again when the machine has less "
            "to do"
        ) from error


def require_listener(address: str) -> None:
    """Raise OSError if nobody listens at HOST:PORT or ray://HOST:PORT, where Ray would wait long, or for ever. Other
    addresses pass."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        if host not in ("127.0.0.1", "localhost"):
            raise
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # as Ray reads the address
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def refuse_client() -> None:
    """Raise ConfigError where Ray is or would be reached through Ray's client (ray://)."""
    address = ray_address() or ""
    would_be = address.startswith("ray://")
    if ray.util.client.ray.is_connected() if ray.is_initialized() else would_be:  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"Ray's client (ray://, RAY_ADDRESS is {address!r}) cannot stream results: use 'auto' or HOST:PORT on a "
            "node of the cluster, or `ray job submit`"
        )


@contextmanager
def _own_groups() -> Iterator[None]:
    """Put each process that Ray starts meanwhile into a process group of its own. A signal to the group of this one, as
    of `kill %1`, would end them first; this process would then wait a minute for them. They end with this process in
    any case, by the function that is replaced here."""
    end_with_parent: Callable[[], None] = ray_utils.set_kill_on_parent_death_linux

    def end_with_parent_in_group() -> None:
        os.setpgid(0, 0)
        end_with_parent()

    ray_utils.set_kill_on_parent_death_linux = end_with_parent_in_group
    try:
        yield
    finally:
        ray_utils.set_kill_on_parent_death_linux = end_with_parent


def forget_reserved_threads() -> None:
    """In an actor, remove OMP_NUM_THREADS from the environment if Ray has set it: to the CPUs that the actor reserves,
    which are no limit of its engine."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")):
        os.environ.pop("OMP_NUM_THREADS", None)


@contextmanager
def _signals_wait(*, starts: bool = True) -> Iterator[None]:
    """Delay SIGTERM and SIGINT to the end of a block that starts Ray, where an exception would leave processes. If it
    only connects to a Ray, they end this process: an address that does not answer is waited for outside of Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if waiting:
            os._exit(128 + number)
        waiting.append(number)

    heeded = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    handler = note if starts else signal.SIG_DFL
    before = {number: signal.signal(number, handler) or signal.SIG_DFL for number in heeded}
    of_ray: list[Callable[[int, FrameType | None], Any]] = []  # its handler for SIGTERM, instead of installing it
    install, ray_utils.set_sigterm_handler = ray_utils.set_sigterm_handler, of_ray.append
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = install
        for number, earlier in before.items():
            signal.signal(number, earlier)
    if before.get(signal.SIGTERM) is signal.SIG_DFL and of_ray:
        signal.signal(signal.SIGTERM, of_ray[-1])
    if signal.SIGTERM in waiting:
        raise SystemExit(128 + signal.SIGTERM)
    if waiting:
        raise KeyboardInterrupt


@contextmanager
def _watching(say: Callable[[str], object]) -> Iterator[None]:
    """During a block that uses a private cluster, raise ClusterLostError soon after one of its processes has ended.
    Without a raylet, Ray ends this process at the next use of its object store, so `say` gets the line before."""
    watched = {name: process for kind, name in _WATCHED.items() if (process := _own_process(kind)) is not None}
    if not watched or threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped, lost = threading.Event(), list[str]()

    def watch() -> None:
        while not stopped.wait(0.1):
            lost.extend(name for name, process in watched.items() if process.poll() is not None)
            if lost:
                if lost[0] == _WATCHED["raylet"]:
                    say(_loss_of(lost[0]))
                signal.pthread_kill(threading.main_thread().ident or 0, _LOSS_SIGNAL)
                return

    before = signal.signal(_LOSS_SIGNAL, signal.default_int_handler) or signal.SIG_DFL
    threading.Thread(target=watch, name="rayspec-cluster-watch", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        with suppress(ValueError):  # a garbage collection may end a session in another thread
            signal.signal(_LOSS_SIGNAL, before)
        if lost:  # any other error of the block is a consequence
            raise ClusterLostError(_loss_of(lost[0]))


def _loss_of(process: str) -> str:
    return (
        f"Ray's {process} has ended; was it killed, or out of memory? What is written so far is kept, and the same "
        "command, without --overwrite, goes on from there"
    )


def _own_process(kind: str) -> Any:
    """Return a process of the private cluster that this process has started; None in a cluster of others."""
    node = ray_worker._global_node
    started = node.all_processes.get(kind) if node is not None else None
    return started[0].process if started else None


def _orphans() -> list[int]:
    """Return processes that Ray's shutdown would leave: without a control process, a raylet's children outlive it."""
    control, raylet = _own_process("gcs_server"), _own_process("raylet")
    if control is None or raylet is None or control.poll() is None:
        return []
    with suppress(FileNotFoundError):
        threads = Path(f"/proc/{raylet.pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []
