"""Which layers of a model go on which GPUs, what that leaves free and how fast a decode step could be there.

Predictions are rooflines, not measurements: bytes of weights and KV cache that a step reads, over memory bandwidth.
Kernels, hops and all-reduces come on top; good engines reach two thirds to four fifths of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from rich.console import Group
from rich.table import Table
from transformers import PretrainedConfig

from rayspec.config import DType, Options
from rayspec.model.sizes import ModelSizes, Quantization, model_sizes
from rayspec.planning.partition import (
    Device,
    LayerCost,
    ModelCosts,
    StageCost,
    bytes_missing,
    partition,
    shortfalls,
    stage_costs,
)
from rayspec.types import ConfigError

_GB, _GIB = 10**9, 2**30
# Of a GPU's memory, kept for activations, workspaces and fragmentation, and for the CUDA context and NCCL.
RESERVED_SHARE, RESERVED_BYTES = 0.05, 2 * _GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. memory_gb: vendors' gigabytes, which the card has at least; bandwidth_gb_s: of its memory."""

    name: str
    memory_gb: int
    bandwidth_gb_s: float

    @property
    def label(self) -> str:
        return f"{self.name}-{self.memory_gb}G"

    @property
    def usable_bytes(self) -> int:
        """For weights and KV cache."""
        return int(self.memory_gb * _GB * (1 - RESERVED_SHARE)) - RESERVED_BYTES


# Memory and bandwidth as in the vendors' data sheets: NVIDIA A100 (SXM), H100 (SXM; PCIe), H200, HGX B200, L40S, L4,
# GH200 (HBM3; HBM3e), AMD Instinct MI300X.
KNOWN_GPUS = tuple(
    Gpu(name=name, memory_gb=memory_gb, bandwidth_gb_s=bandwidth_gb_s)
    for name, memory_gb, bandwidth_gb_s in (
        ("A100", 40, 1555),
        ("A100", 80, 2039),
        ("H100", 80, 3350),
        ("H100-PCIe", 80, 2000),
        ("H200", 141, 4800),
        ("B200", 180, 8000),
        ("L40S", 48, 864),
        ("L4", 24, 300),
        ("GH200", 96, 4000),
        ("GH200", 144, 4900),
        ("MI300X", 192, 5300),
    )
)
_SPEC = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<model>[^@]+)(?:@(?P<bandwidth>\d+(?:\.\d+)?))?")
_MODEL = re.compile(r"(?P<name>.+)-(?P<memory_gb>[1-9]\d*)G")


class PlacementOptions(Options):
    """What is to be placed where. `context` and `concurrency` are the KV cache that is planned for."""

    gpus: str
    stages: int | None = Field(None, ge=1)
    tensor: int = Field(1, ge=1)
    context: int = Field(16384, ge=1)
    concurrency: int = Field(32, ge=1)
    quantization: Quantization | None = None
    dtype: DType = "auto"
    layers: tuple[int, ...] | None = None

    @field_validator("layers", mode="before")
    @classmethod
    def _numbers_with_commas(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A cut of the model over stages. Bytes are those of one tensor-parallel rank.

    missing_bytes: summed over stages, on one rank; 0 where everything fits. splits: layers are known as attention and
    MLP. choice: how the number of stages came about.
    """

    options: PlacementOptions
    dtype: str
    num_parameters: int
    splits: bool
    stages: tuple[StageCost, ...]
    missing_bytes: int
    choice: str

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def step_s(self) -> float:
        """Roofline of a decode step of all sequences, through one stage after the other."""
        return sum(stage.seconds for stage in self.stages)


def parse_gpus(spec: str) -> tuple[Gpu, ...]:
    """Every GPU of, for instance, "4xH200-141G,4xA100-80G" or "8xNEW-96G@4000", in order. Raises ConfigError."""
    return tuple(gpu for part in spec.split(",") for gpu in _parse_group(part.strip(), spec))


def place(config: PretrainedConfig, options: PlacementOptions) -> Placement:
    """Stage i runs on GPUs i * tensor and following. Where the number of stages is open, the fewest that fit.

    Where nothing fits, layers are spread by time alone and `missing_bytes` says what is lacking. Raises ConfigError for
    GPUs that are unknown or too few, and what `model_sizes` and `partition` raise.
    """
    dtype = placed_dtype(options.dtype, config)
    sizes = model_sizes(config, dtype=dtype, quantization=options.quantization, tensor=options.tensor)
    return place_sizes(sizes, dtype, options)


def place_sizes(sizes: ModelSizes, dtype: torch.dtype, options: PlacementOptions) -> Placement:
    """`place` for sizes that are known already, those of a rank of `options.tensor`."""
    groups = _tensor_groups(parse_gpus(options.gpus), options.tensor)
    num_stages, choice = _num_stages(sizes, groups, options)
    costs, devices = _costs(sizes, groups[:num_stages], options)
    spread = devices
    if bytes_missing(costs, devices):
        spread = [replace(device, bytes_free=costs.total_bytes) for device in devices]
    stages = stage_costs(costs, devices, partition(costs, spread, options.layers))
    return Placement(
        options=options,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=sizes.num_parameters,
        splits=sizes.splits,
        stages=stages,
        missing_bytes=sum(shortfalls(stages)),
        choice=choice,
    )


def placement_table(placement: Placement) -> Group:
    """For people."""
    options = placement.options
    table = Table()
    for heading in ("GPU", "layers", "sublayers", "weights GiB", "KV GiB", "left GiB", "ms a step", "fits"):
        table.add_column(heading, justify="left" if heading in ("GPU", "fits") else "right", no_wrap=True)
    for stage in placement.stages:
        table.add_row(
            stage.device.name,
            "{}-{}".format(*_ends(stage.layers)),
            "{}-{}".format(*_ends(_sublayers(stage.layers))) if placement.splits else "-",
            *(f"{size / _GIB:.1f}" for size in (stage.weight_bytes, stage.kv_bytes, stage.bytes_left)),
            f"{1000 * stage.seconds:.2f}",
            "yes" if stage.bytes_left >= 0 else f"{-stage.bytes_left / _GIB:.1f} GiB missing",
        )
    return Group(
        f"{placement.num_parameters / 1e9:.2f} billion parameters in {_format(placement)}, KV cache of "
        f"{options.concurrency} sequences of {options.context} tokens",
        table,
        f"{placement.choice}; GiB are of each GPU, of whose memory {RESERVED_SHARE:.0%} and "
        f"{RESERVED_BYTES / _GIB:.0f} GiB are kept for activations and the CUDA context",
        f"a decode step of all sequences takes {1000 * placement.step_s:.1f} ms by roofline, bytes read over memory "
        "bandwidth: a bound, not a measurement",
        _verdict(placement),
    )


def save_placement(placement: Placement, path: Path) -> None:
    """For machines: options, stages and totals in JSON. Bytes, seconds, and numbers of the first and last layer."""
    stages = [
        asdict(stage)
        | {
            "layers": _ends(stage.layers),
            "sublayers": _ends(_sublayers(stage.layers)) if placement.splits else None,
            "bytes_left": stage.bytes_left,
        }
        for stage in placement.stages
    ]
    plain = {name: getattr(placement, name) for name in ("num_parameters", "dtype", "choice", "missing_bytes")}
    totals = {"fits": placement.fits, "step_s": placement.step_s, "options": placement.options.model_dump()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**plain, **totals, "stages": stages}, indent=2) + "\n", encoding="utf-8")


def _parse_group(part: str, spec: str) -> list[Gpu]:
    found = _SPEC.fullmatch(part)
    model = found["model"] if found else ""
    matching = [gpu for gpu in KNOWN_GPUS if model in (gpu.label, gpu.name)]
    if found and found["bandwidth"] and float(found["bandwidth"]) > 0 and (sized := _MODEL.fullmatch(model)):
        gpu = Gpu(name=sized["name"], memory_gb=int(sized["memory_gb"]), bandwidth_gb_s=float(found["bandwidth"]))
    elif found and not found["bandwidth"] and len(matching) == 1:
        gpu = matching[0]
    else:
        raise ConfigError(
            f"option 'gpus' is {spec!r}: {part!r} is not one of {', '.join(gpu.label for gpu in KNOWN_GPUS)} with a "
            "count before it, as 8xH100-80G; give others with memory and GB/s, as 8xNAME-80G@3350"
        )
    return [gpu] * int(found["count"] or 1)


def _tensor_groups(gpus: Sequence[Gpu], tensor: int) -> list[tuple[Device, float]]:
    """The device of each possible stage, and its bytes per second: a group is as good as its weakest GPU."""
    groups = []
    for first in range(0, len(gpus) - tensor + 1, tensor):
        members = gpus[first : first + tensor]
        numbers = str(first) if tensor == 1 else f"{first}-{first + tensor - 1}"
        labels = "+".join(dict.fromkeys(gpu.label for gpu in members))
        device = Device(name=f"{numbers}: {labels}", bytes_free=max(0, min(gpu.usable_bytes for gpu in members)))
        groups.append((device, min(gpu.bandwidth_gb_s for gpu in members) * _GB))
    if not groups:
        raise ConfigError(f"option 'tensor' is {tensor}, of {len(gpus)} GPUs: lower it, or name more GPUs")
    return groups


def placed_dtype(asked: DType, config: PretrainedConfig) -> torch.dtype:
    """What "auto" stands for: the dtype in the config, bfloat16 where it has none."""
    own = getattr(config, "dtype", None) or torch.bfloat16
    dtype: torch.dtype = own if asked == "auto" else getattr(torch, asked)
    return dtype


def _num_stages(
    sizes: ModelSizes, groups: Sequence[tuple[Device, float]], options: PlacementOptions
) -> tuple[int, str]:
    """How many, and a sentence about it."""
    asked = options.stages if options.stages is not None or options.layers is None else len(options.layers)
    if asked is not None:
        if asked > len(groups):
            raise ConfigError(
                f"option 'stages' is {asked}, times {options.tensor} GPUs: there are {len(groups) * options.tensor}; "
                "lower it, or name more GPUs"
            )
        return asked, f"{asked} stages as asked"
    most = min(len(groups), len(sizes.layers))
    tensor = "tensor stays 1 unless asked" if options.tensor == 1 else f"tensor {options.tensor} as asked"
    for count in range(1, most + 1):
        if not bytes_missing(*_costs(sizes, groups[:count], options)):
            return count, f"{count} of up to {most} stages, the fewest that fit ({tensor})"
    return most, f"all {most} stages ({tensor})"


def _costs(
    sizes: ModelSizes, groups: Sequence[tuple[Device, float]], options: PlacementOptions
) -> tuple[ModelCosts, list[Device]]:
    """One step reads each weight once, all experts of a mixture too, and the KV cache of all sequences; of the
    embedding, next to nothing."""
    bandwidths = [bandwidth for _, bandwidth in groups]

    def cost(weight_bytes: int, *, kv_bytes: int = 0, bytes_read: int) -> LayerCost:
        seconds = tuple(bytes_read / bandwidth for bandwidth in bandwidths)
        return LayerCost(weight_bytes=weight_bytes, kv_bytes=kv_bytes, seconds=seconds)

    layers = tuple(
        cost(
            layer.weight_bytes,
            kv_bytes=layer.kv_bytes_per_token * options.context * options.concurrency,
            bytes_read=layer.weight_bytes + layer.kv_bytes_read(options.context) * options.concurrency,
        )
        for layer in sizes.layers
    )
    embedding = cost(sizes.embedding_bytes, bytes_read=0)
    head = cost(sizes.last_stage_bytes(len(groups)), bytes_read=sizes.norm_bytes + sizes.head_bytes)
    return ModelCosts(embedding=embedding, layers=layers, head=head), [device for device, _ in groups]


def _sublayers(layers: range) -> range:
    return range(2 * layers.start, 2 * layers.stop)


def _ends(numbers: range) -> tuple[int, int]:
    """First and last."""
    return numbers[0], numbers[-1]


def _format(placement: Placement) -> str:
    quantization = placement.options.quantization
    return f"{quantization} with embedding and head in {placement.dtype}" if quantization else placement.dtype


def _verdict(placement: Placement) -> str:
    if placement.fits:
        return "it fits"
    missing = placement.missing_bytes * placement.options.tensor / _GIB
    return (
        f"it does not fit: {missing:.1f} GiB are missing; use more or larger GPUs, more stages or tensor-parallel "
        "ranks, quantization, or plan for fewer or shorter sequences"
    )
