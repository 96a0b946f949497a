"""Ways to lay a model out over GPUs: pipeline stages x tensor-parallel ranks x replicas."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from rayspec.model.sizes import ModelSizes, model_sizes
from rayspec.ops.plan.gpus import Gpu, are_ranks_alike, gpus_spec, parse_gpus
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Placement, place_sizes, placed_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Stages, ranks and replicas on given GPUs. groups: placements of replicas on equal GPUs, which are `num_copies`
    each. sizes: of a tensor-parallel rank."""

    stages: int
    tensor: int
    replicas: int
    groups: tuple[Placement, ...]
    sizes: ModelSizes

    @property
    def name(self) -> str:
        return f"{self.stages} x {self.tensor} x {self.replicas}"

    @property
    def title(self) -> str:
        return f"{self.stages} stages x {self.tensor} tensor-parallel ranks x {self.replicas} replicas"

    @property
    def num_gpus(self) -> int:
        return self.stages * self.tensor * self.replicas

    @property
    def concurrency(self) -> int:
        """Sequences of each replica."""
        return self.groups[0].options.concurrency

    @property
    def parallel(self) -> dict[str, int]:
        """Options of `ParallelOptions`; empty where one process holds the only copy."""
        if self.num_gpus == 1:
            return {}
        replicas = {"replicas": self.replicas} if self.replicas > 1 else {}
        return {"stages": self.stages, "tensor": self.tensor} | replicas

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Shortage over all GPUs, for weights and KV cache or else during loading; 0 where everything fits."""
        return sum(group.shortage * self.tensor * group.num_copies for group in self.groups)

    @property
    def bytes_left(self) -> int:
        """Free bytes on the fullest GPU."""
        return min(stage.bytes_left for group in self.groups for stage in group.stages)


def layouts(config: PretrainedConfig, options: PlanOptions, *, max_replicas: int | None = None) -> Iterator[Layout]:
    """Yield for each tensor-parallel degree one replica with as many stages as the GPUs allow, two with half as many,
    and so on, whether they fit or not; and one with the fewest stages that fit. A model that does not split has one
    stage and one rank. max_replicas: may leave GPUs unused. Raises ConfigError, and the errors of `model_sizes`.
    """
    gpus = parse_gpus(options.gpus)
    dtype = placed_dtype(options.dtype, config)
    for tensor in _tensor_degrees(config, gpus, options):
        sizes = model_sizes(
            config,
            dtype=dtype,
            quantization=options.quantization,
            tensor=tensor,
            draft_weights=options.draft_weights,
        )
        if sizes.splits or tensor == 1:
            yield from _with_ranks(tensor, gpus, sizes, dtype, options, max_replicas)


def _with_ranks(
    tensor: int,
    gpus: Sequence[Gpu],
    sizes: ModelSizes,
    dtype: torch.dtype,
    options: PlanOptions,
    max_replicas: int | None,
) -> Iterator[Layout]:
    def placed(gpus: Sequence[Gpu], stages: int | None, concurrency: int) -> Placement:
        own = {"gpus": gpus_spec(gpus), "stages": stages, "tensor": tensor, "concurrency": concurrency}
        return place_sizes(sizes, dtype, PlacementOptions(**options.load | own))

    num_groups = len(gpus) // tensor
    stages = {min(num_groups // replicas, len(sizes.layers)) for replicas in range(1, num_groups + 1)}
    most = min(options.concurrency, max_replicas or num_groups)
    replicas_of = {count: min(num_groups // count, most) for count in (sorted(stages) if sizes.splits else [1])}
    fewest = placed(gpus, None, options.concurrency)
    if fewest.fits:
        replicas_of.setdefault(len(fewest.stages), 1)
    for count, replicas in replicas_of.items():
        # Replica after replica takes GPUs in their order; sequences are divided evenly.
        size, concurrency = count * tensor, math.ceil(options.concurrency / replicas)
        alike = Counter(tuple(gpus[first * size : (first + 1) * size]) for first in range(replicas))
        groups = [replace(placed(own, count, concurrency), num_copies=copies) for own, copies in alike.items()]
        yield Layout(stages=count, tensor=tensor, replicas=replicas, groups=tuple(groups), sizes=sizes)


def _tensor_degrees(config: PretrainedConfig, gpus: Sequence[Gpu], options: PlanOptions) -> list[int]:
    """Return powers of two that divide the attention heads and keep each stage on one node and one kind of GPU."""
    if options.quantization:  # ranks cannot split quantized weights
        return [1]
    num_heads = int(getattr(config.get_text_config(decoder=True), "num_attention_heads", 1))
    most = min(len(gpus), options.max_ranks)
    powers = itertools.takewhile(lambda degree: degree <= most, (2**power for power in itertools.count()))
    return [
        degree
        for degree in powers
        if num_heads % degree == 0
        and (options.max_ranks % degree == 0 or len(gpus) <= options.max_ranks)
        and are_ranks_alike(gpus, degree)
    ]
