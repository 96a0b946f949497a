"""`python -m benchmarks.device` on this machine, and the page of what is predicted for others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.device import bandwidth, step_times
from benchmarks.device.__main__ import app
from benchmarks.device.decoding import time_choices, time_shape, time_wide
from benchmarks.device.kernels import kernel_differences
from benchmarks.device.predictions import predictions_page
from benchmarks.device.run import CHECKS
from benchmarks.roofline import ModelShape
from benchmarks.shared import DeviceOptions
from rayspec.model.cuda import operations

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive
def test_everything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and multiplied is smaller than caches, so that speeds mean nothing."""
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda device: 2**20)
    monkeypatch.setattr(bandwidth, "_LEAST_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(bandwidth, "_MAX_BYTES_QUICK", 2**20)
    monkeypatch.setattr(bandwidth, "_NUM_REPEATS", 1)
    monkeypatch.setattr(step_times, "_WIDER_QUICK", 2)
    arguments = ["checks", "--device", "cpu", "--num-threads", "1", "--quick", "--json", str(tmp_path / "d.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    status = {check["name"]: check["status"] for check in saved["checks"]}
    absent = ("kernels against plain torch", "captured against eager")
    assert status == dict.fromkeys(CHECKS, "passed") | dict.fromkeys(absent, "not here"), "a CPU has neither"
    assert all(f"## {name}: " in result.stdout for name in CHECKS)


CPU = torch.device("cpu")
ON_CPU = DeviceOptions(device="cpu", dtype="float32", num_threads=1)
TINY = ModelShape(
    name="tiny", num_layers=2, hidden_size=64, mlp_size=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=999
)


@pytest.mark.exhaustive
def test_decoding_in_a_shape_is_timed() -> None:
    found = time_shape(ON_CPU, TINY, [(2, 64)], num_steps=3, generate=True)
    for cell in found.numbers["cells"]:
        assert 0 < cell["floor_ms"] < cell["fastest_ms"] <= cell["step_ms"] <= cell["slowest_ms"]
        assert cell["generate_ms"] > 0


@pytest.mark.exhaustive
def test_choices_are_measured_and_their_gain_is_predicted() -> None:
    found = time_choices(ON_CPU, replace(TINY, head_dim=32), num_layers=1, context=128).numbers
    assert set(found["costs"]) >= {"full", "int8", "window", "int8+window"}
    assert found["costs"]["full"] == 1.0
    assert all(gains[0.8] < gains[0.9] < gains[0.95] for gains in found["gains"].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("offload", [0.0, 0.5])
def test_strategies_are_compared_on_the_widened_model(offload: float) -> None:
    found = time_wide(ON_CPU, 2, ["int4"], context=80, num_prompts=1, max_tokens=48, offload=offload)
    assert found.numbers["same_texts"] == {"ar": 4, "int4": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_agrees_with_itself(dtype: torch.dtype) -> None:
    found = kernel_differences(dtype, CPU)
    assert len(found) == 16
    assert {one.largest for one in found} == {0.0}


def test_a_kernel_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gated, calls = operations.gated, []

    def wrong_the_second_time(packed: Tensor, activation: str) -> Tensor:
        calls.append(activation)
        return gated(packed, activation) * (1.0 if len(calls) % 2 else 1.01)

    monkeypatch.setattr(operations, "gated", wrong_the_second_time)
    wrong = [one.what for one in kernel_differences(torch.float32, CPU) if not one.is_small]
    assert wrong == ["gated, silu, float32", "gated, gelu_tanh, float32"]


def test_the_page_of_predictions_is_what_the_module_prints() -> None:
    page = (ROOT / "docs" / "gpu_predictions.md").read_text(encoding="utf-8")
    assert page == predictions_page(), "print it again: python -m benchmarks.device.predictions"
    assert "Nothing here is measured" in page
