"""Memory, cores, processor and Ray of this process, on Linux. Limits of control groups (containers) count.

root: the folder that stands for `/`, where the kernel's files are read.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import secrets
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from rayspec.errors import ConfigError

_ROOT = Path("/")
# Numbers of the calls sched_setattr and sched_getattr. Their argument: size, policy, flags, nice, priority, runtime,
# deadline and period. Policies with shares of a core. The longest turn that the kernel allows, in nanoseconds.
_SCHEDULING = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
_MMAP_THRESHOLD = -3  # of mallopt
_FAIR, _LONGEST_TURN_NS = (0, 3), 100_000_000
_PAGES = {"MemTotal": "PHYS", "MemAvailable": "AVPHYS"}
# Memory that the kernel takes back when somebody needs it, by version of control groups.
_RECLAIMABLE = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


def import_path() -> str:
    """Return PYTHONPATH for a process with another working directory. It finds the modules that this one finds, but
    none that lie in the working directory (`""`) only, where a user may have a json.py."""
    return os.pathsep.join([*map(os.path.abspath, filter(None, sys.path)), str(Path(__file__).parents[1])])


def keep_loaded() -> None:
    """Leave what is loaded now out of later garbage collections: a full one would stop all threads for 0.2 s. For a
    process that keeps it until its end."""
    gc.collect()
    gc.freeze()


def switch_threads_often() -> None:
    """Let a thread wait 0.5 ms for another's Python code, in place of 5. An event loop and an engine wait at each of
    their many steps while other threads parse and tokenize."""
    sys.setswitchinterval(0.0005)


def return_large_blocks() -> None:
    """Have glibc give blocks of 1 MiB or more back to the system as soon as they are freed. By default it keeps them,
    of up to 32 MiB each, once one was freed. Not for a process that computes: new memory is slow at first."""
    with suppress(OSError, AttributeError):  # another system or C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**20)


def ray_address() -> str | None:
    """Return the address of the cluster that RAY_ADDRESS names; None if Ray is to start on this machine."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def bytes_available(root: Path = _ROOT) -> int:
    """Return the bytes that can still be allocated: what the machine has, or what a control group of this process
    leaves if that is less. Page cache counts as free, because the kernel gives it up."""
    left = [limit - used for limit, used in _memory_limits(root)]
    return max(0, min([_meminfo(root)["MemAvailable"], *left]))


def bytes_in_total(root: Path = _ROOT) -> int:
    """Return the machine's memory, or the limit of a control group of this process if that is less."""
    return min([_meminfo(root)["MemTotal"], *(limit for limit, _ in _memory_limits(root))])


def num_cores(root: Path = _ROOT, *, affinity: int | None = None) -> int:
    """Return how many threads can run at once: the cores that this process may run on, or the CPU quota of its control
    groups if that is less, rounded down, at least 1. affinity: stands for the number of these cores."""
    limits: list[float] = [affinity or len(os.sched_getaffinity(0))]
    for group, version in _groups(root, "cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [number for name in files for number in _integers(group / name)]
        quota, period = numbers if len(numbers) == 2 else (None, None)
        if quota is not None and quota > 0 and period:
            limits.append(quota / period)
    return max(1, int(min(limits)))


def take_long_turns() -> None:
    """Ask for long turns of this thread on a busy core: caches are cold at the start of each, so decoding makes more
    tokens in a second of the core with fewer turns. The thread's share of the core stays as it is. Threads that it
    starts have long turns, too. Kernels before Linux 6.12 take no notice."""
    if (numbers := _SCHEDULING.get(platform.machine())) is None:
        return
    set_attributes, get_attributes = numbers
    call = ctypes.CDLL(None).syscall
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_attributes, 0, found, _ATTRIBUTES.size, 0) == 0:
        size, policy, flags, nice, *_ = _ATTRIBUTES.unpack(found.raw)
        if policy in _FAIR:
            wanted = _ATTRIBUTES.pack(size, policy, flags, nice, 0, _LONGEST_TURN_NS, 0, 0)
            call(set_attributes, 0, ctypes.create_string_buffer(wanted), 0)


def waited_for_core_s() -> float:
    """Return how many seconds this thread has waited for a core since it began; 0.0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def user_folder(folder: str | None) -> Path:
    """Return the folder of measurements and of fetched models, by default in the user's cache. A relative
    XDG_CACHE_HOME is ignored, by its standard. Raises ConfigError for a user without a home."""
    if folder:
        return Path(folder)
    if os.path.isabs(cache := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(cache) / "rayspec"
    try:
        return Path.home() / ".cache" / "rayspec"
    except RuntimeError as error:
        raise ConfigError(f"user {os.getuid()} has no home folder: set HOME or XDG_CACHE_HOME to a folder") from error


def write_at_once(path: Path, content: bytes) -> None:
    """Write the file in one step, and make its folder, so that no process reads a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")  # pods have equal process ids
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def boot_id(root: Path = _ROOT) -> str:
    """Return what identifies this machine until it is started again. Its containers have the same."""
    return next(iter(_lines(root / "proc/sys/kernel/random/boot_id")), platform.node())


def cpu_name(root: Path = _ROOT) -> str:
    """Return the processor's model, or its architecture if Linux does not name the model."""
    return _cpuinfo(root, "model name") or _cpuinfo(root, "CPU part") or platform.machine()


def cpu_class(root: Path = _ROOT) -> str:
    """Return the instructions for matrix products that the processor has: "AMX", "AVX-512 BF16", "AVX-512", "AVX2",
    "Arm BF16" or "other"."""
    flags = set((_cpuinfo(root, "flags") or _cpuinfo(root, "Features")).split())
    classes = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in (classes | {"bf16": "Arm BF16"}).items() if flag in flags), "other")


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of each control group of this process that limits what `controller` manages."""
    own = {
        "" if number == "0" else name: path
        for number, controllers, path in (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
        for name in controllers.split(",")
    }
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, _, options, *_) = before.split(" "), after.split(" ")
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in options.split(",")):
            continue
        path = own.get("" if kind == "cgroup2" else controller, "/")
        # In a container, the mount may be the very group whose path the kernel names from the host's root.
        within = path.removeprefix(fields[3].rstrip("/")) if f"{path}/".startswith(f"{fields[3].rstrip('/')}/") else ""
        top = root / fields[4].lstrip("/")
        folder = top / within.strip("/") if ".." not in within else top
        for each in (folder, *folder.parents):
            yield each, 2 if kind == "cgroup2" else 1
            if each == top:
                break


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each control group with a limit. Reclaimable memory does not count as used."""
    for group, version in _groups(root, "memory"):
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names for limit in _integers(group / name) if limit is not None]
        used = _integers(group / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limits and used:
            stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
            reclaimable = sum(int(stat.get(name, 0)) for name in _RECLAIMABLE[version])
            yield min(limits), max(0, (used[0] or 0) - reclaimable)


def _integers(path: Path) -> list[int | None]:
    """Return the words of a file as integers, None for `max`; an empty list if there is no such file."""
    return [None if word == "max" else int(word) for line in _lines(path) for word in line.split()]


def _meminfo(root: Path) -> dict[str, int]:
    sizes = {name: os.sysconf(f"SC_{pages}_PAGES") * os.sysconf("SC_PAGE_SIZE") for name, pages in _PAGES.items()}
    lines = _lines(root / "proc/meminfo")  # none in a sandbox without /proc
    return sizes | {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _cpuinfo(root: Path, name: str) -> str:
    """Return an entry of the first core, "" if there is none."""
    entries = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    return next((value.strip() for key, _, value in entries if key.strip() == name), "")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if it does not exist."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def has_gpu(root: Path = _ROOT) -> bool:
    """Return whether the driver shows this process a GPU of NVIDIA, or one of AMD that torch is built for. Loads no
    library."""
    is_hidden = any(os.environ.get(f"{name}_VISIBLE_DEVICES") in ("", "-1") for name in ("CUDA", "HIP", "ROCR"))
    is_amd = (root / "dev/kfd").exists() and "rocm" in (installed_version("torch") or "")
    return not is_hidden and (is_amd or any((root / "dev").glob("nvidia[0-9]*")))


def installed_version(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
