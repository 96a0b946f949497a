"""Which data type `dtype: auto` takes on a CPU."""

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rayspec.config import EngineConfig
from rayspec.machine import cpu_class
from rayspec.model import weights
from rayspec.model.weights import gain_of_float32, in_fast_dtype
from tests.families import checkpoint


def _model(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=dtype)
    return model


def _config(**options: Any) -> EngineConfig:
    return EngineConfig(model=checkpoint("llama"), device="cpu", **options)


def _gain(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "gain_of_float32", lambda dtype: gain)


def test_processors_without_instructions_for_bfloat16_are_faster_in_float32() -> None:
    """Those with them are not always slower in float32, so that the measurement decides, and not their names."""
    before = torch.get_num_threads()
    gain = gain_of_float32(torch.bfloat16)
    assert torch.get_num_threads() == before
    assert gain > (weights.CLEARLY_FASTER if cpu_class() == "AVX2" else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_slow_type_becomes_float32_with_the_same_values_if_it_fits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _gain(3.3, monkeypatch)
    model = _model(dtype)
    values = copy.deepcopy(model.state_dict())
    with caplog.at_level(logging.WARNING):
        converted = in_fast_dtype(model, _config())
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.float32}
    assert converted.config.dtype == torch.float32
    assert all(torch.equal(value, values[name].float()) for name, value in converted.state_dict().items())
    monkeypatch.setattr(weights, "bytes_available", lambda: 1000)
    assert in_fast_dtype(_model(dtype), _config()).dtype == dtype
    assert "3.3 times as fast in float32" in caplog.messages[0]
    assert "memory is too small" in caplog.messages[1]


@pytest.mark.parametrize(
    ("gain", "options", "dtype"),
    [
        (1.2, {}, torch.bfloat16),
        (3.0, {"dtype": "bfloat16"}, torch.bfloat16),
        (3.0, {"offload": {"to": "cpu"}}, torch.bfloat16),
        (3.0, {}, torch.float32),
    ],
)
def test_other_models_stay_as_they_are(
    gain: float,
    options: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _gain(gain, monkeypatch)
    model = _model(dtype)
    assert in_fast_dtype(model, _config(**options)).dtype == dtype
    assert not caplog.messages


def test_a_gpu_without_bfloat16_gets_float16(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(weights, "resolve_device", lambda name: torch.device("cuda:0"))
    capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert in_fast_dtype(_model(), _config(dtype="bfloat16")).dtype == torch.bfloat16
    converted = in_fast_dtype(_model(), _config())
    assert converted.dtype == converted.config.dtype == torch.float16
    (message,) = caplog.messages
    assert message.startswith("cuda:0 emulates bfloat16")
    capability = (8, 0)
    assert in_fast_dtype(_model(), _config()).dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "num_warnings"), [("highest", 0), ("high", 1)])
def test_float32_that_a_gpu_rounds_is_a_warning(
    precision: str, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in NVIDIA's images does."""
    monkeypatch.setattr(weights, "resolve_device", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert in_fast_dtype(_model(torch.float32), _config(dtype="float32")).dtype == torch.float32
    assert sum("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in message for message in caplog.messages) == num_warnings
