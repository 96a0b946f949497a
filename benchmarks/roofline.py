"""Latency models of named models on named GPUs, from bytes moved and arithmetic alone: bounds, not measurements.

`ideal_latency` is a bound for efficient kernels. `reference_latency` models the code published with KnapSpec. In every
forward, this code concatenates its cache, expands it to all query heads, and converts it to another container.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rayspec.choices import Choice, combined, weights_of
from rayspec.ops.plan.gpus import REACHED
from rayspec.planning.latency import Curve, LatencyModel, kind_of

_BYTES_16_BIT = 2
QUANTISED_BYTES: Mapping[Choice, float] = {"int8": 1.0, "int4": 0.5 + 4 / 128}  # per weight, scales included
_PAGES_KEYS = 352  # keys that a draft reads by choice `pages`: the default budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """bytes_per_s: peak memory bandwidth. flops: peak dense 16-bit operations per second."""

    name: str
    bytes_per_s: float
    flops: float

    def knee_rows(self, bytes_per_weight: float) -> int:
        """Return the number of rows up to which reading a weight matrix takes at least as long as multiplying by it."""
        return round(bytes_per_weight * self.flops * REACHED / (2 * self.bytes_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer with gated MLPs, from its config.json. Biases and norms are ignored."""

    name: str
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False

    @property
    def attention_parameters(self) -> int:
        """Attention weights of one layer."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """MLP weights of one layer."""
        return 3 * self.hidden_size * self.mlp_size

    @property
    def head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        matrices = 1 if self.tied else 2
        layers = self.num_layers * (self.attention_parameters + self.mlp_parameters)
        return layers + matrices * self.head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one layer's keys and values per token, in 16 bits."""
        return 2 * self.num_kv_heads * self.head_dim * _BYTES_16_BIT


def _shape(name: str, *numbers: int, tied: bool = False) -> ModelShape:
    layers, hidden, mlp, heads, kv_heads, dim, vocab = numbers
    return ModelShape(
        name=name, num_layers=layers, hidden_size=hidden, mlp_size=mlp, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, vocab_size=vocab, tied=tied,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
        _shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, tied=True),
        _shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
        _shape("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256),
        _shape("Llama-3.1-405B", 126, 16384, 53248, 128, 8, 128, 128256),
        _shape("Llama-2-13B", 40, 5120, 13824, 40, 40, 128, 32000),
        _shape("Llama-2-70B", 80, 8192, 28672, 64, 8, 128, 32000),
        _shape("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
        _shape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936),
        _shape("Qwen3-14B", 40, 5120, 17408, 40, 8, 128, 151936),
        _shape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936),
    )
}


# NVIDIA's data sheets, SXM with 80 GB (H200: 141 GB). The A800 is an A100 with a slower link between GPUs.
ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator(name="A100", bytes_per_s=2.039e12, flops=312e12),
        Accelerator(name="A800", bytes_per_s=2.039e12, flops=312e12),
        Accelerator(name="H100", bytes_per_s=3.35e12, flops=989e12),
        Accelerator(name="H200", bytes_per_s=4.8e12, flops=989e12),
    )
}


def ideal_latency(shape: ModelShape, accelerator: Accelerator, *, bytes_per_weight: float = 2) -> LatencyModel:
    """Return the latency of forwards that read each used weight once, and the keys and values of each attention once.

    Several GPUs that hold consecutive layers take as long as one GPU that could hold all layers. Beyond `knee_rows`
    rows the arithmetic of matrix products dominates. The attention scores of a verify are assumed to overlap with
    reading the keys. Keys, values and the LM head have 16 bits.
    """
    return _latency(shape, accelerator, bytes_per_weight=bytes_per_weight, kv_passes=1, overhead_s=0.0)


def reference_latency(
    shape: ModelShape, accelerator: Accelerator, *, context: int, bytes_per_weight: float = 2
) -> LatencyModel:
    """Return `ideal_latency` plus the cache handling of KnapSpec's published code, at `context` tokens.

    Each attention moves its keys and values 3 + 2 * (query heads per KV head) times. Concatenation reads and writes
    them, the expansion reads them and writes a copy for each query head, and attention reads these copies. Every
    forward, including draft steps, also copies (reads and writes) the keys and values of *all* layers to convert the
    cache. Kernel launches and host synchronisation are not included, because they cannot be computed here.
    """
    copied = 2 * shape.num_layers * shape.kv_bytes_per_token * context
    return _latency(
        shape,
        accelerator,
        bytes_per_weight=bytes_per_weight,
        kv_passes=3 + 2 * shape.num_heads // shape.num_kv_heads,
        overhead_s=copied / accelerator.bytes_per_s,
    )


def choice_latency(shape: ModelShape, accelerator: Accelerator) -> LatencyModel:
    """Return `ideal_latency` with curves for cheaper choices of drafts. int8 weights take half of the bytes; int4
    weights, with the scales of their groups, slightly more than a quarter. Attention to pages reads a fixed number of
    keys per sequence."""
    full = ideal_latency(shape, accelerator)
    curves = dict(full.curves)
    for weights, bytes_per_weight in QUANTISED_BYTES.items():
        quantised = ideal_latency(shape, accelerator, bytes_per_weight=bytes_per_weight)
        curves |= {kind_of(kind, weights): quantised.curves[kind] for kind in ("attention", "mlp")}
    for choice in ("full", "int8", "int4"):
        curve = curves[kind_of("attention", choice)]
        read_s = curve.kv_s * _PAGES_KEYS
        pages = combined(weights_of(choice), "pages")
        curves[kind_of("attention", pages)] = replace(
            curve, base_s=tuple(seconds + read_s for seconds in curve.base_s), sequence_s=read_s, kv_s=0.0
        )
    return replace(full, curves=curves)


def _latency(
    shape: ModelShape, accelerator: Accelerator, *, bytes_per_weight: float, kv_passes: int, overhead_s: float
) -> LatencyModel:
    def curve(parameters: int, width: float, kv_bytes: int = 0) -> Curve:
        knee, seconds = accelerator.knee_rows(width), parameters * width / accelerator.bytes_per_s
        return Curve(
            rows=(1, knee, 2 * knee),
            base_s=(seconds, seconds, 2 * seconds),
            kv_s=kv_bytes / accelerator.bytes_per_s,
        )

    return LatencyModel(
        sublayers=("attention", "mlp") * shape.num_layers,
        curves={
            "attention": curve(shape.attention_parameters, bytes_per_weight, kv_passes * shape.kv_bytes_per_token),
            "mlp": curve(shape.mlp_parameters, bytes_per_weight),
            "head": curve(shape.head_parameters, _BYTES_16_BIT),
        },
        head="head",
        overhead_s=overhead_s,
        stages=(0,) * 2 * shape.num_layers,
        transfer_s=(0.0,) * 2 * shape.num_layers,
    )
