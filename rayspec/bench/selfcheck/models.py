"""Models for checks: the bundled model, optionally widened, and small random models of several families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rayspec import demo
from rayspec.config import EngineConfig
from rayspec.decode.runner import Runner
from rayspec.demo.widen import widen
from rayspec.model.architecture import Decomposition, decompose
from rayspec.model.bodies import fuse
from rayspec.model.graphs import StepGraphs
from rayspec.model.kv_arena import KVArena
from rayspec.model.static_rows import StepBuffers
from rayspec.model.static_step import StaticStep
from rayspec.model.weights import load_model

# How sublayers run: transformers' modules, fused bodies of torch's operations, fused bodies of `rayspec::*`.
Way: TypeAlias = Literal["modules", "fused", "operators"]
Capture: TypeAlias = Callable[[StaticStep], StepGraphs]
BUNDLED = "bundled"
_SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.25,  # so large that every layer matters
}
# They cover plain layers; head norms; and windows, softcaps, norms before and after, and another activation.
RANDOM_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 1},
    "gemma2": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 32,
    },
}


def bundled_model(dtype: torch.dtype, device: torch.device, *, factor: int = 1) -> PreTrainedModel:
    """Return the bundled model. factor: factor by which it is widened."""
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig(model=demo.model_path(), dtype=name, device=str(device))
    model = load_model(config)
    return model if factor == 1 else widen(model, factor)


def random_model(family: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a small random model, with the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(_SIZES | RANDOM_FAMILIES[family]))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # ones and zeros would hide mistakes in norms
                weight.add_(torch.randn_like(weight) * 0.1)
            weight.data = weight.data.to(dtype)  # not the buffers: rotary frequencies are float32 in any model
    moved: PreTrainedModel = model.to(device)
    return moved


def model_named(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    return bundled_model(dtype, device) if name == BUNDLED else random_model(name, dtype, device)


def split(model: PreTrainedModel, way: Way) -> Decomposition:
    """Split the model into sublayers that run in the given way. Fusing frees the model's own weights."""
    parts = decompose(model)
    return parts if way == "modules" else fuse(parts, use_operators=way == "operators")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A runner with its own arena. buffers: static buffers of its passes; None if each pass allocates its own."""

    runner: Runner
    buffers: StepBuffers | None

    @property
    def parts(self) -> Decomposition:
        return self.runner.parts

    @property
    def vocab_size(self) -> int:
        return int(self.parts.config.get_text_config().vocab_size)


def prepare(
    parts: Decomposition,
    *,
    num_slots: int,
    max_rows: int = 0,
    max_sequences: int = 0,
    max_places: int = 0,
    capture: Capture | None = None,
) -> Prepared:
    """Make a runner and an arena, in which layers with a sliding window have a store of their own. max_rows: if not 0,
    passes of at most `max_rows` rows run in static buffers. capture: makes graphs of these passes."""
    arena = KVArena(
        parts.shapes,
        num_slots,
        num_windowed_slots=num_slots,
        windowed_layers=parts.windows,
        dtype=parts.dtype,
        device=parts.device,
        num_spare=1,
    )
    buffers = None
    if max_rows:
        buffers = StepBuffers(
            arena,
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_places=max_places,
            hidden_size=parts.config.get_text_config().hidden_size,
            dtype=parts.dtype,
            device=parts.device,
        )
    graphs = capture(StaticStep(parts, buffers)) if capture is not None and buffers is not None else None
    runner = Runner(parts, arena, device=parts.device, row_counts=None, buffers=buffers, graphs=graphs)
    return Prepared(runner, buffers)
