from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from rayspec.ops.doctor.machine import Gpus, check_gpus, inspect_gpus

TWO = Gpus(names=("H100", "H100"), driver="570.1", num_usable=2, torch="2.13.0", cuda="12.8", has_nccl=True)


def with_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """What the driver's own tool would say."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver here")
def test_without_a_driver_there_is_no_gpu() -> None:
    found = inspect_gpus()
    assert found == Gpus()
    assert check_gpus(found).status == "skipped"
    assert "no GPU" in check_gpus(found).found


def test_torch_is_asked_for_what_the_driver_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(tmp_path, monkeypatch, "echo 'NVIDIA H100 80GB HBM3, 570.86.15'")
    found = inspect_gpus()
    assert (found.names, found.driver) == (("NVIDIA H100 80GB HBM3",), "570.86.15")
    assert found.torch.startswith("2.")
    assert not found.error
    finding = check_gpus(found)
    assert finding.status == "problem"
    assert "build for CUDA" in finding.remedy or "update the driver" in finding.remedy


def test_a_driver_that_does_not_answer_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(tmp_path, monkeypatch, "echo 'driver/library version mismatch' >&2; exit 9")
    finding = check_gpus(inspect_gpus())
    assert finding.status == "problem"
    assert "driver/library version mismatch" in finding.found


def test_a_driver_without_a_gpu_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(tmp_path, monkeypatch, "exit 0")
    assert check_gpus(inspect_gpus()).status == "skipped"


@pytest.mark.parametrize(
    ("gpus", "status", "says"),
    [
        (TWO, "ok", "2 x H100, driver 570.1, torch 2.13.0 for CUDA 12.8"),
        (Gpus(names=("H100",), driver="1", num_usable=0, torch="2", cuda="12.8"), "problem", "none of them"),
        (Gpus(names=("H100",), driver="1", num_usable=0, torch="2+cpu"), "problem", "build for the CPU"),
        (Gpus(names=("A", "B"), driver="1", num_usable=1, torch="2", cuda="12"), "warning", "sees 1 of them"),
        (Gpus(names=("A",), driver="1", error="torch: gone"), "problem", "torch: gone"),
        (replace(TWO, has_nccl=False), "problem", "without NCCL"),
    ],
)
def test_what_is_seen_is_judged(gpus: Gpus, status: str, says: str) -> None:
    finding = check_gpus(gpus)
    assert finding.status == status
    assert says in finding.found
    assert bool(finding.remedy) == (status != "ok")
