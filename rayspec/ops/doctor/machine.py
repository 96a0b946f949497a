"""Checks of this machine, without torch and ray. Arguments of a check replace the values that it would measure."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rayspec.machine import bytes_available, bytes_in_total, cpu_class, cpu_name, num_cores
from rayspec.ops.doctor.findings import Finding, ok, problem, warning

_GIB = 2**30
_PACKAGE = "rayspec"
_SHARED = "/dev/shm"  # noqa: S108 - looked at only
_SHOWN_PACKAGES = ("rayspec", "torch", "transformers", "ray")
# Ray takes 30 % of the memory for its object store, and falls back to the disk where /dev/shm is smaller.
_STORE_SHARE = 0.3
# At 95 % Ray puts no more objects on a disk.
_FULL, _NEARLY_FULL = 0.95, 0.9
# The path of a socket may have 107 characters, of which Ray's own part takes about 70.
_LONGEST_RAY_FOLDER = 35
_LEAST_MEMORY = 2 * _GIB
_FEW_FILES, _ENOUGH_FILES = 1024, 65536
# Programs that listen at these ports by default.
PORTS = {6379: "Ray's head", 8265: "Ray's dashboard", 10001: "Ray's client server", 8000: "rayspec serve"}
_CONNECT_TIMEOUT_S = 0.2


def check_python(version: str | None = None) -> Finding:
    """Check the Python version against the requirement of the installed package."""
    found = version or platform.python_version()
    wanted = metadata.metadata(_PACKAGE)["Requires-Python"] or ""
    if found in SpecifierSet(wanted):
        return ok("python", found)
    return problem("python", f"{found}, which is not {wanted}", f"install Python {wanted} and rayspec with it")


def check_packages(requirements: Iterable[str] | None = None) -> Finding:
    """Check that all requirements of rayspec are installed in suitable versions."""
    lacking = []
    for text in requirements if requirements is not None else metadata.requires(_PACKAGE) or ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            version = installed_version(wanted.name)
            if version is None:
                lacking.append(f"{wanted.name} is missing")
            elif not wanted.specifier.contains(version, prereleases=True):
                lacking.append(f"{wanted.name} is {version}, not {wanted.specifier}")
    if lacking:
        return problem("packages", "; ".join(lacking), f"pip install --upgrade {_PACKAGE}, with its constraints.txt")
    return ok(
        "packages", ", ".join(f"{name} {installed_version(name) or 'is not installed'}" for name in _SHOWN_PACKAGES)
    )


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_cpu() -> Finding:
    """Name the processor, the cores that this process may use, and its instructions for matrix products."""
    return ok("CPU", f"{cpu_name()}, {num_cores()} cores, {cpu_class()}")


def check_memory(bytes_free: int | None = None) -> Finding:
    free = bytes_available() if bytes_free is None else bytes_free
    found = f"{free / _GIB:.1f} GiB free"
    if free >= _LEAST_MEMORY:
        return ok("memory", found)
    return warning("memory", found, "end what else runs here, or give the container more: Ray alone takes about 1 GiB")


def check_shared_memory(num_bytes: int | None = None, memory: int | None = None) -> Finding:
    """Check that Ray's object store fits /dev/shm."""
    size = shutil.disk_usage(_SHARED).total if num_bytes is None else num_bytes
    store = int(_STORE_SHARE * (bytes_in_total() if memory is None else memory))
    found = f"{_SHARED} has {size / _GIB:.1f} GiB"
    if size >= store:
        return ok("shared memory", found)
    return warning(
        "shared memory",
        f"{found}, and Ray's object store wants {store / _GIB:.1f} and would use the disk",
        f"docker run --shm-size; in Kubernetes, an emptyDir with medium: Memory at {_SHARED}; or ray start "
        "--object-store-memory",
    )


def check_ray_folder(folder: str | None = None) -> Finding:
    """Check the folder where Ray keeps sockets, logs and objects that do not fit the memory."""
    place = folder or ray_folder()
    return judge_ray_folder(place, used_share(place), writable=os.access(_existing(place), os.W_OK))


def ray_folder() -> str:
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()


def judge_ray_folder(folder: str, used: float, *, writable: bool = True) -> Finding:
    """Judge Ray's folder by its path and its disk. used: used share of the disk."""
    found = f"{folder}, whose disk is {used:.0%} full"
    if not writable:
        return problem("Ray's folder", f"{folder}, which cannot be written", "RAY_TMPDIR with a folder that can be")
    if len(folder) > _LONGEST_RAY_FOLDER:
        remedy = f"RAY_TMPDIR with a path of at most {_LONGEST_RAY_FOLDER} characters: those of sockets are limited"
        return problem("Ray's folder", f"{found}; the path has {len(folder)} characters", remedy)
    remedy = "free some space, or set RAY_TMPDIR to a folder on another disk"
    if used >= _FULL:
        return problem("Ray's folder", found, f"{remedy}: Ray puts no objects there any more")
    if used >= _NEARLY_FULL:
        return warning("Ray's folder", found, f"{remedy}: at {_FULL:.0%} Ray puts no objects there any more")
    return ok("Ray's folder", found)


def used_share(folder: str) -> float:
    """Return the used share of the disk of a folder. A missing folder stands for its nearest existing parent."""
    usage = shutil.disk_usage(_existing(folder))
    return 1 - usage.free / usage.total


def _existing(folder: str) -> Path:
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


def check_open_files(limit: int | None = None) -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    found = f"{soft} at once"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else found)
    remedy = f"ulimit -n {_ENOUGH_FILES}, before Ray is started"
    if soft < _FEW_FILES:
        return problem("open files", found, f"{remedy}: Ray cannot run with so few")
    return warning("open files", found, f"{remedy}: large clusters need more")


def check_ports(ports: Mapping[int, str] | None = None) -> Finding:
    """Check that nothing listens yet at the default ports."""
    taken = [f"{port} ({name})" for port, name in (PORTS if ports is None else ports).items() if answers(port)]
    if not taken:
        return ok("ports", "all free that are used by default")
    remedy = "all is well if these are your own Ray and endpoint; otherwise end what listens there, or choose others"
    return warning("ports", f"taken: {', '.join(taken)}", remedy)


def answers(port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(_CONNECT_TIMEOUT_S)
        return caller.connect_ex(("127.0.0.1", port)) == 0


def machine_findings() -> Sequence[Finding]:
    return [
        check_python(),
        check_packages(),
        check_cpu(),
        check_memory(),
        check_shared_memory(),
        check_ray_folder(),
        check_open_files(),
        check_ports(),
    ]
