"""Memory and cores of this process, by made-up files of the kernel, and in real control groups if they can be made."""

import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rayspec import machine
from rayspec.errors import ConfigError
from rayspec.machine import (
    bytes_available,
    bytes_in_total,
    cpu_class,
    cpu_name,
    has_gpu,
    num_cores,
    take_long_turns,
    user_folder,
)

GIB = 2**30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"  # 64, 1 and 32 GiB
V1_UNLIMITED = "9223372036854771712"
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup ro"
# As in a container of Docker with cgroup v1: the mount shows the container's own group.
V1_MOUNTS = (
    "31 24 0:27 /docker/c0ffee /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    "32 24 0:28 /docker/c0ffee /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct"
)
V1_GROUPS = "5:memory:/docker/c0ffee\n4:cpu,cpuacct:/docker/c0ffee\n1:name=systemd:/docker/c0ffee\n0::/"


def _machine(root: Path, *, mounts: str, groups: str, files: Mapping[str, str]) -> Path:
    """Write what the kernel would show. files: below /sys/fs/cgroup."""
    content = {"proc/meminfo": MEMINFO, "proc/self/mountinfo": mounts, "proc/self/cgroup": groups}
    for name, text in {**content, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip())
    return root


@pytest.mark.parametrize(
    ("files", "available", "total", "cores"),
    [
        pytest.param({}, 32, 64, 8, id="no limits"),
        pytest.param({"memory.max": "max", "memory.current": "5", "cpu.max": "max 100000"}, 32, 64, 8, id="unlimited"),
        pytest.param(
            {
                "memory.max": str(8 * GIB),
                "memory.current": str(7 * GIB),
                "memory.stat": f"anon {2 * GIB}\nfile {5 * GIB}\ninactive_file {3 * GIB}\nactive_file {2 * GIB}",
                "cpu.max": "250000 100000",
            },
            *(6, 8, 2),
            id="page cache is free, and quotas are rounded down",
        ),
        pytest.param({"memory.max": str(8 * GIB), "memory.current": str(9 * GIB)}, 0, 8, 8, id="beyond the limit"),
        pytest.param(
            {"memory.max": "max", "memory.high": str(4 * GIB), "memory.current": "0"}, 4, 4, 8, id="throttled from"
        ),
        pytest.param({"cpu.max": "50000 100000"}, 32, 64, 1, id="half a core"),
    ],
)
def test_in_cgroup_v2(tmp_path: Path, files: Mapping[str, str], available: int, total: int, cores: int) -> None:
    root = _machine(tmp_path, mounts=V2_MOUNT, groups="0::/", files=files)
    assert bytes_available(root) == available * GIB
    assert bytes_in_total(root) == total * GIB
    assert num_cores(root, affinity=8) == cores
    assert num_cores(root, affinity=1) == 1


def test_memory_is_known_without_proc(tmp_path: Path) -> None:
    assert 0 < bytes_available(tmp_path) <= bytes_in_total(tmp_path)
    assert bytes_in_total(tmp_path) >= bytes_in_total()


def test_the_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    """As for a service of systemd, whose slice has limits too."""
    files = {
        "limited.slice/memory.max": str(10 * GIB),
        "limited.slice/memory.current": str(9 * GIB),
        "limited.slice/cpu.max": "800000 100000",
        "limited.slice/job.service/memory.max": str(4 * GIB),
        "limited.slice/job.service/memory.current": str(1 * GIB),
        "limited.slice/job.service/cpu.max": "300000 100000",
        "other.slice/memory.max": "1",
    }
    root = _machine(tmp_path, mounts=V2_MOUNT, groups="0::/limited.slice/job.service", files=files)
    assert (bytes_available(root), bytes_in_total(root)) == (1 * GIB, 4 * GIB)
    assert num_cores(root, affinity=64) == 3


@pytest.mark.parametrize("groups", ["0::/../../elsewhere", "0::/a/group/that/is/not/visible", ""])
def test_a_group_that_cannot_be_seen_counts_by_the_mount(tmp_path: Path, groups: str) -> None:
    files = {"memory.max": str(4 * GIB), "memory.current": str(GIB)}
    root = _machine(tmp_path, mounts=V2_MOUNT, groups=groups, files=files)
    assert bytes_available(root) == 3 * GIB


@pytest.mark.parametrize(
    ("limit", "quota", "available", "total", "cores"),
    [(V1_UNLIMITED, "-1", 32, 64, 16), (str(6 * GIB), "450000", 5, 6, 4)],
)
def test_in_cgroup_v1(tmp_path: Path, limit: str, quota: str, available: int, total: int, cores: int) -> None:
    files = {
        "memory/memory.limit_in_bytes": limit,
        "memory/memory.usage_in_bytes": str(4 * GIB),
        "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}\ntotal_active_file {1 * GIB}",
        "cpu,cpuacct/cpu.cfs_quota_us": quota,
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    root = _machine(tmp_path, mounts=V1_MOUNTS, groups=V1_GROUPS, files=files)
    assert (bytes_available(root), bytes_in_total(root)) == (available * GIB, total * GIB)
    assert num_cores(root, affinity=16) == cores


@pytest.mark.parametrize(
    ("cpuinfo", "name", "kind"),
    [
        ("model name\t: Xeon A\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "Xeon A", "AMX"),
        ("model name\t: EPYC B\nflags\t\t: fpu avx2 avx512f avx512_bf16", "EPYC B", "AVX-512 BF16"),
        ("Features\t: fp asimd bf16 i8mm\nCPU part\t: 0xd40", "0xd40", "Arm BF16"),
        ("Features\t: fp asimd\nCPU part\t: 0xd0c", "0xd0c", "other"),
    ],
)
def test_processors(tmp_path: Path, cpuinfo: str, name: str, kind: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n\nprocessor\t: 1\nBogoMIPS\t: 1\n")
    assert (cpu_name(tmp_path), cpu_class(tmp_path)) == (name, kind)


def test_a_thread_with_long_turns_keeps_its_priority() -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12) or not Path("/proc/self/sched").exists():
        pytest.skip("the kernel takes no notice, or does not tell")
    found: list[object] = []

    def run() -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, 5)
        take_long_turns()
        lines = Path(f"/proc/self/task/{own}/sched").read_text(encoding="utf-8").splitlines()
        found.extend(int(line.split(":")[1]) for line in lines if line.startswith("se.slice"))
        found.append(os.getpriority(os.PRIO_PROCESS, own))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [100_000_000, 5]


@pytest.mark.parametrize(
    ("device", "torch", "variable", "has"),
    [
        ("nvidia0", "2.13.0", "OTHER", True),
        ("nvidia0", "2.13.0", "CUDA_VISIBLE_DEVICES", False),
        ("kfd", "2.13.0+rocm7.0", "OTHER", True),
        ("kfd", "2.13.0+rocm7.0", "HIP_VISIBLE_DEVICES", False),
        ("kfd", "2.13.0+cpu", "OTHER", False),
        ("null", None, "OTHER", False),
    ],
)
def test_gpus_of_both_makers_are_seen_unless_they_are_hidden(
    device: str, torch: str | None, variable: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    monkeypatch.setattr(machine, "installed_version", lambda _: torch)
    for name in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(variable, "-1")
    assert has_gpu(tmp_path) == has


_FREES_LARGE_BLOCKS = """
import platform, sys
from rayspec.machine import return_large_blocks
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if platform.libc_ver()[0] == "glibc":
    return_large_blocks()
    bytes(b"x" * 2**23)
    before, large, small = resident(), [], []
    for _ in range(20):
        large.append(b"x" * 2**22)
        small.append(b"x" * 2**16)
    del large
    sys.exit(resident() - before > 2**24)
"""


def test_large_blocks_go_back_to_the_system_when_they_are_freed() -> None:
    assert subprocess.run([sys.executable, "-c", _FREES_LARGE_BLOCKS], check=False).returncode == 0


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container that runs as any user id."""

    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # ignored, by its standard
    with pytest.raises(ConfigError, match=r"user \d+ has no home folder: set HOME or XDG_CACHE_HOME to a folder"):
        user_folder(None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder(None) == tmp_path / "rayspec"
