"""Memory, cores and processor that this process may use on Linux. Limits of control groups (containers) count.

root: the folder that stands for `/`, where the kernel's files are read.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Memory that the kernel takes back when somebody needs it, by version of control groups.
_RECLAIMABLE = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


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
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([affinity or len(os.sched_getaffinity(0)), *quotas])))


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


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group's folder. version: of control groups, 1 or 2."""

    folder: Path
    version: int

    def integers(self, name: str) -> list[int | None]:
        """Return the words of a file as integers, None for `max`; an empty list if there is no such file."""
        with suppress(OSError):
            return [None if word == "max" else int(word) for word in (self.folder / name).read_text().split()]
        return []

    def integer(self, name: str) -> int | None:
        return next(iter(self.integers(name)), None)


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """Yield the control groups of this process that limit what `controller` manages: its own and all above it."""
    own = {
        "" if number == "0" else name: path
        for number, controllers, path in (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
        for name in controllers.split(",")
    }
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, (kind, _, options, *_) = _mount(line)
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in options.split(",")):
            continue
        path = own.get("" if kind == "cgroup2" else controller, "/")
        # In a container, the mount may be the very group whose path the kernel names from the host's root.
        within = path.removeprefix(fields[3].rstrip("/")) if f"{path}/".startswith(f"{fields[3].rstrip('/')}/") else ""
        top = root / fields[4].lstrip("/")
        folder = top / within.strip("/") if ".." not in within else top
        for each in (folder, *folder.parents):
            yield _Group(each, 2 if kind == "cgroup2" else 1)
            if each == top:
                break


def _mount(line: str) -> tuple[Sequence[str], str, Sequence[str]]:
    before, separator, after = line.partition(" - ")
    return before.split(" "), separator, after.split(" ")


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each control group with a limit. Reclaimable memory does not count as used."""
    for group in _groups(root, "memory"):
        names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := group.integer(name)) is not None]
        used = group.integer("memory.current" if group.version == 2 else "memory.usage_in_bytes")
        if limits and used is not None:
            stat = dict(line.split(" ", 1) for line in _lines(group.folder / "memory.stat"))
            reclaimable = sum(int(stat.get(name, 0)) for name in _RECLAIMABLE[group.version])
            yield min(limits), max(0, used - reclaimable)


def _cpu_quota(group: _Group) -> float | None:
    """Return the cores that a control group may use; None without a limit."""
    if group.version == 2:
        quota, period = (group.integers("cpu.max") or [None, None])[:2]
    else:
        quota, period = group.integer("cpu.cfs_quota_us"), group.integer("cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _meminfo(root: Path) -> dict[str, int]:
    lines = _lines(root / "proc/meminfo")
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _cpuinfo(root: Path, name: str) -> str:
    """Return an entry of the first core, "" if there is none."""
    entries = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    return next((value.strip() for key, _, value in entries if key.strip() == name), "")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel; none if it does not exist."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
