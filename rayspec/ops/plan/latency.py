"""The LatencyModel of a model in stages: from rooflines, or from a profile of the whole model on one device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rayspec.model.sizes import BYTES_PER_LINEAR_WEIGHT
from rayspec.ops.plan.gpus import REACHED, Gpu, parse_gpus
from rayspec.ops.plan.layouts import Layout
from rayspec.ops.plan.options import PlanOptions
from rayspec.ops.plan.placement import Placement
from rayspec.planning.latency import HEAD, Curve, LatencyModel, StaleProfileError
from rayspec.types import ConfigError

_GB = 10**9
# Share of the bandwidth that good engines reach: 0.63 to 0.80.
EFFICIENCY = 0.72


def predicted(
    config: PretrainedConfig,
    options: PlanOptions,
    layout: Layout,
    group: Placement,
    profile: LatencyModel | None = None,
) -> tuple[LatencyModel, LatencyModel]:
    """Return the costs of decoding, and those of prompts, for a replica of the group. profile: of the whole model on
    one device, which is split into stages; None: rooflines.

    Windowed attention is assumed to read the same share of every context as of `options.context`. Of a stage's GPUs,
    the weakest decides. Ranks share sublayers evenly, and all-reduce the states of a pass once per sublayer. Raises
    ConfigError when the profile is of another model.
    """
    text = config.get_text_config(decoder=True)
    gpus, num_ranks = parse_gpus(group.options.gpus), layout.tensor
    weakest = [
        min(gpus[first : first + num_ranks], key=lambda gpu: gpu.bandwidth_gb_s)
        for first in range(0, len(group.stages) * num_ranks, num_ranks)
    ]
    itemsize = getattr(torch, group.dtype).itemsize
    # A rank sends and receives all states nearly twice.
    row_bytes = 2 * (num_ranks - 1) / num_ranks * int(text.hidden_size) * itemsize

    def exchanging(curve: Curve, gpu: Gpu) -> Curve:
        """Add the all-reduce between the ranks of a stage to a curve."""
        if num_ranks == 1:
            return curve
        sent_s = [options.all_reduce_us / 1e6 + rows * row_bytes / (gpu.link_gb_s * _GB) for rows in curve.rows]
        return replace(curve, base_s=tuple(a + b for a, b in zip(curve.base_s, sent_s, strict=True)))

    sublayers = [
        (stage, layer, index, num_bytes)
        for stage, placed in enumerate(group.stages)
        for layer in (layout.sizes.layers[number] for number in placed.layers)
        for index, num_bytes in enumerate(layer.sublayer_bytes)
    ]
    stages, hop_s = tuple(stage for stage, *_ in sublayers), options.hop_us / 1e6
    if profile is not None:
        curves = {
            name: curve if name == profile.head else exchanging(_shared(curve, num_ranks), weakest[0])
            for name, curve in profile.curves.items()
        }
        if len(profile.sublayers) != len(sublayers):
            raise ConfigError(
                f"option 'profile' is of a model with {len(profile.sublayers)} sublayers, and this one has "
                f"{len(sublayers)}: profile the same model"
            )
        model = replace(profile, curves=curves, stages=stages, hop_s=hop_s, link_s=())
        return model, model
    num_heads = int(text.num_attention_heads)
    # Per prompt row and attended token, in one layer: for the scores and the weighted sum.
    score_flops = 4 * num_heads * int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    bytes_per_weight = BYTES_PER_LINEAR_WEIGHT[options.quantization] if options.quantization else itemsize
    decode: dict[str, Curve] = {}
    prefill: dict[str, Curve] = {}
    names = []
    for stage, layer, index, num_bytes in sublayers:
        gpu, context = weakest[stage], options.num_tokens
        # The share of the context that the layer's attention reads.
        seen = layer.kv_bytes_read(context) / (layer.kv_bytes_per_token * context) if index == 0 else 0
        name = f"{num_bytes} bytes, {seen:g} of context, {gpu.label}"
        base = exchanging(_weights(num_bytes, bytes_per_weight, gpu), gpu)
        decode[name] = replace(base, kv_s=seen * layer.kv_bytes_per_token / (gpu.bandwidth_gb_s * _GB * EFFICIENCY))
        prefill[name] = replace(base, score_s=seen * score_flops / num_ranks / (gpu.flops * REACHED))
        names.append(name)
    head = {HEAD: _weights(layout.sizes.head_bytes, itemsize, weakest[-1])}  # every rank reads all of it
    unused = (0.0,) * len(names)
    about: dict[str, Any] = {"head": HEAD, "hop_s": hop_s, "stages": stages, "transfer_s": unused}
    model = LatencyModel(sublayers=tuple(names), curves=decode | head, **about)
    return model, replace(model, curves=prefill | head)


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


def _shared(curve: Curve, num_ranks: int) -> Curve:
    """Return a rank's share of a curve."""
    base_s = tuple(base_s / num_ranks for base_s in curve.base_s)
    return replace(curve, base_s=base_s, kv_s=curve.kv_s / num_ranks, score_s=curve.score_s / num_ranks)


def _weights(num_bytes: int, bytes_per_weight: float, gpu: Gpu) -> Curve:
    """Return a roofline: reading at `EFFICIENCY` of the bandwidth, flat until multiplying at `REACHED` of the peak
    takes longer, then proportional to the rows. A mixture is assumed to run all its experts."""
    bytes_per_s = gpu.bandwidth_gb_s * _GB * EFFICIENCY
    knee, seconds = round(bytes_per_weight * gpu.flops * REACHED / (2 * bytes_per_s)), num_bytes / bytes_per_s
    return Curve(rows=(1, knee, 2 * knee), base_s=(seconds, seconds, 2 * seconds))
