"""The LatencyModel of a model in stages: from rooflines, or from a profile of the whole model on one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from rayspec.model.sizes import BYTES_PER_LINEAR_WEIGHT, ModelSizes, Quantization
from rayspec.ops.plan.gpus import REACHED, Gpu
from rayspec.planning.latency import HEAD, Curve, LatencyModel, StaleProfileError
from rayspec.types import ConfigError

_GB = 10**9
# Share of the bandwidth that good engines reach: 0.63 to 0.80.
EFFICIENCY = 0.72


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model split into stages. sizes: of a rank. layers, gpus: the layers and the weakest GPU of each stage.

    itemsize: bytes of a number that is not quantized. context: tokens of a sequence; windowed attention is assumed to
    read the same share of every context as of this one. hop_s: from a stage to the next one. all_reduce_s: of few rows,
    between the ranks of a stage, once per sublayer.
    """

    config: PretrainedConfig
    sizes: ModelSizes
    layers: Sequence[range]
    gpus: Sequence[Gpu]
    tensor: int
    quantization: Quantization | None
    itemsize: int
    context: int
    hop_s: float
    all_reduce_s: float

    def exchange_s(self, rows: int, stage: int) -> float:
        """Return the seconds that each sublayer takes longer: a rank sends and receives all states nearly twice."""
        if self.tensor == 1:
            return 0.0
        sent = 2 * (self.tensor - 1) / self.tensor * rows * int(self.config.hidden_size) * self.itemsize
        return self.all_reduce_s + sent / (self.gpus[stage].link_gb_s * _GB)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stage of each sublayer."""
        return tuple(
            stage
            for stage, span in enumerate(self.layers)
            for layer in span
            for _ in self.sizes.layers[layer].sublayer_bytes
        )

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight in the layers' matrices."""
        return BYTES_PER_LINEAR_WEIGHT[self.quantization] if self.quantization else self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted costs of decoding and of prompts."""

    decode: LatencyModel
    prefill: LatencyModel


def roofline(cut: Cut) -> Predicted:
    """Predict by rooflines: a forward pass reads all weights and its keys and values at `EFFICIENCY` of the bandwidth.

    Where the arithmetic takes longer, at 65 % of its peak, its time counts instead. A prompt's attention scores always
    count in addition. Every rank reads the whole LM head. A mixture is assumed to run all its experts.
    """
    num_heads = int(cut.config.num_attention_heads)
    # Per prompt row and attended token, in one layer: for the scores and the weighted sum.
    score_flops = 4 * num_heads * int(getattr(cut.config, "head_dim", None) or cut.config.hidden_size // num_heads)
    decode: dict[str, Curve] = {}
    prefill: dict[str, Curve] = {}
    names = []
    for stage, span in enumerate(cut.layers):
        gpu = cut.gpus[stage]
        for layer in (cut.sizes.layers[number] for number in span):
            for index, num_bytes in enumerate(layer.sublayer_bytes):
                # The share of the context that the layer's attention reads.
                seen = layer.kv_bytes_read(cut.context) / (layer.kv_bytes_per_token * cut.context) if index == 0 else 0
                name = f"{num_bytes} bytes, {seen:g} of context, {gpu.label}"
                base = _exchanging(cut, stage, _weights(num_bytes, cut.bytes_per_weight, gpu))
                decode[name] = replace(
                    base, kv_s=seen * layer.kv_bytes_per_token / (gpu.bandwidth_gb_s * _GB * EFFICIENCY)
                )
                prefill[name] = replace(base, score_s=seen * score_flops / cut.tensor / (gpu.flops * REACHED))
                names.append(name)
    head = _weights(cut.sizes.head_bytes, cut.itemsize, cut.gpus[-1])
    model = LatencyModel(
        sublayers=tuple(names),
        curves=decode | {HEAD: head},
        head=HEAD,
        hop_s=cut.hop_s,
        stages=cut.stages,
        transfer_s=(0.0,) * len(names),
    )
    return Predicted(decode=model, prefill=replace(model, curves=prefill | {HEAD: head}))


def profiled(cut: Cut, profile: LatencyModel) -> Predicted:
    """Split the profile of the whole model on one device into stages. Ranks share sublayers evenly, and all-reduce.

    Raises ConfigError when the profile is of another model.
    """
    if len(profile.sublayers) != len(cut.stages):
        raise ConfigError(
            f"option 'profile' is of a model with {len(profile.sublayers)} sublayers, and this one has "
            f"{len(cut.stages)}: profile the same model"
        )
    shared = {
        name: replace(
            curve,
            base_s=tuple(base_s / cut.tensor for base_s in curve.base_s),
            kv_s=curve.kv_s / cut.tensor,
            score_s=curve.score_s / cut.tensor,
        )
        for name, curve in profile.curves.items()
        if name != profile.head
    }
    curves = {name: _exchanging(cut, 0, curve) for name, curve in shared.items()}
    model = replace(
        profile,
        curves=curves | {profile.head: profile.curves[profile.head]},
        stages=cut.stages,
        hop_s=cut.hop_s,
        link_s=(),
    )
    return Predicted(decode=model, prefill=model)


def load_profile(path: Path) -> tuple[LatencyModel, dict[str, Any]]:
    """Return a profile that `rayspec profile` has saved, and its key: the measured setup. Raises ConfigError."""
    try:
        key = json.loads(path.read_text(encoding="utf-8"))["key"]
        return LatencyModel.load(path, key), key
    except OSError as error:
        raise ConfigError(f"option 'profile' is {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, StaleProfileError) as error:
        raise ConfigError(
            f"option 'profile' is {str(path)!r}, which is no profile that can be read ({error}): run rayspec profile"
        ) from error


def _weights(num_bytes: int, bytes_per_weight: float, gpu: Gpu) -> Curve:
    """Return a curve that is flat while reading takes longer than multiplying, then proportional to the rows."""
    bytes_per_s = gpu.bandwidth_gb_s * _GB * EFFICIENCY
    knee, seconds = round(bytes_per_weight * gpu.flops * REACHED / (2 * bytes_per_s)), num_bytes / bytes_per_s
    return Curve(rows=(1, knee, 2 * knee), base_s=(seconds, seconds, 2 * seconds))


def _exchanging(cut: Cut, stage: int, curve: Curve) -> Curve:
    """Add the all-reduce between the ranks of a stage to a curve."""
    pairs = zip(curve.rows, curve.base_s, strict=True)
    return replace(curve, base_s=tuple(base_s + cut.exchange_s(rows, stage) for rows, base_s in pairs))
