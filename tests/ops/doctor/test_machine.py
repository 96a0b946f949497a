from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayspec.config import EngineConfig
from rayspec.model import weights
from rayspec.ops.commands import examine
from rayspec.ops.doctor.machine import (
    Finding,
    check_memory,
    check_open_files,
    check_packages,
    check_ray_folder,
    check_shared_memory,
)
from tests.families import checkpoint

GIB = 2**30


def test_this_machine_can_run_its_own_tests() -> None:
    found = examine(quick=True)[:6]
    assert {finding.status for finding in found} <= {"ok", "warning"}
    assert [finding.name for finding in found] == [
        *("packages", "CPU", "memory", "shared memory", "Ray's folder", "open files")
    ]
    assert all(finding.remedy for finding in found if finding.status == "warning")


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (check_memory(3 * GIB), "ok", "3.0 GiB"),
        (check_memory(GIB), "warning", "1.0 GiB"),
        (check_shared_memory(10 * GIB, 30 * GIB), "ok", "10.0 GiB"),
        (check_shared_memory(64 * 2**20, 30 * GIB), "warning", "wants 9.0"),
        (check_ray_folder("/tmp", used=0.5), "ok", "50%"),
        (check_ray_folder("/tmp", used=0.92), "warning", "92%"),
        (check_ray_folder("/tmp", used=0.96), "problem", "96%"),
        (check_ray_folder("/tmp", used=0.1, writable=False), "problem", "cannot be written"),
        (check_ray_folder("/home/" + "x" * 60, used=0.1), "problem", "66 characters"),
        (check_open_files(256), "problem", "256"),
        (check_open_files(4096), "warning", "4096"),
        (check_open_files(65536), "ok", "65536"),
        (check_open_files(-1), "ok", "no limit"),
    ],
)
def test_what_is_found_is_judged(finding: Finding, status: str, says: str) -> None:
    assert finding.status == status
    assert says in finding.found + finding.remedy
    assert bool(finding.remedy) == (status in ("warning", "problem"))


def test_packages_are_held_against_what_is_required() -> None:
    assert check_packages(["numpy>=1", "nowhere>=1; extra == 'dev'"]).status == "ok"
    lacking = check_packages(["numpy>=1000", "no-such-package-here", "pydantic>=2"])
    assert lacking.status == "problem"
    assert "numpy is" in lacking.found
    assert "not >=1000" in lacking.found
    assert "no-such-package-here is missing" in lacking.found
    assert "pydantic" not in lacking.found


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    found, above = (check_ray_folder(str(folder)).found for folder in (tmp_path / "a" / "b", tmp_path))
    assert found.split("disk is")[1][:3] == above.split("disk is")[1][:3]


@pytest.mark.parametrize(("gain", "dtype"), [(0.7, torch.bfloat16), (3.3, torch.float32)])
def test_the_dtype_is_the_one_that_auto_takes(gain: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the measurement that decides, whatever instructions the processor has."""
    monkeypatch.setattr(weights, "gain_of_float32", lambda _: gain)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16)
    assert weights.in_fast_dtype(model, EngineConfig(model="m", device="cpu")).dtype == dtype
    (found,) = [finding.found for finding in examine() if finding.name == "dtype on the CPU"]
    assert f"float32 is {gain} times as fast" in found
    assert ("takes float32" in found) == (dtype == torch.float32)
    assert not any("dtype" in finding.name for finding in examine(quick=True)), "it measures nothing"
