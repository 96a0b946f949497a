import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from rayspec.ops.doctor import machine
from rayspec.ops.doctor.machine import check_gpus

TOLD: dict[str, Any] = {"names": ["H100"] * 2, "torch": "2.13.0", "cuda": "12.8", "has_nccl": True}
ONE, TWO = "echo 'NVIDIA H100 80GB HBM3, 570.86.15'", "echo 'H100, 570.1'; echo 'H100, 570.1'"


def with_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """What the driver's own tool would say."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver here")
def test_without_a_driver_there_is_no_gpu() -> None:
    finding, num_usable = check_gpus()
    assert (finding.status, finding.found, num_usable) == ("skipped", "no GPU", 0)


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ("exit 0", "skipped", "no GPU"),
        ("echo 'driver/library version mismatch' >&2; exit 9", "problem", "driver/library version mismatch"),
        (ONE, "problem", "1 x NVIDIA H100 80GB HBM3, driver 570.86.15"),
    ],
)
def test_torch_is_asked_for_what_the_driver_has(
    script: str, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(tmp_path, monkeypatch, script)
    finding, num_usable = check_gpus()
    assert (finding.status, num_usable) == (status, 0)
    assert says in finding.found


@pytest.mark.parametrize(
    ("told", "status", "says", "num_usable"),
    [
        ({}, "ok", "2 x H100, driver 570.1, torch 2.13.0 for CUDA 12.8", 2),
        ({"names": []}, "problem", "none of them", 0),
        ({"names": [], "cuda": None}, "problem", "build for the CPU", 0),
        ({"names": ["H100"]}, "warning", "sees 1 of them", 1),
        ({"has_nccl": False}, "problem", "without NCCL", 2),
    ],
)
def test_what_torch_says_is_judged(
    told: dict[str, Any], status: str, says: str, num_usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(tmp_path, monkeypatch, TWO)
    monkeypatch.setattr(machine, "ask_torch", lambda *, hidden_too: TOLD | told)
    finding, found = check_gpus()
    assert (finding.status, found) == (status, num_usable)
    assert says in finding.found
    assert bool(finding.remedy) == (status != "ok")
