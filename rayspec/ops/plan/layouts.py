"""Ways to lay a model out over GPUs: pipeline stages x tensor-parallel ranks x replicas."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from rayspec.model.sizes import ModelSizes, model_sizes
from rayspec.ops.plan.gpus import Gpu, are_ranks_alike, gpus_spec, parse_gpus
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Placement, place_sizes, placed_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """`count` replicas on equal GPUs. gpus: of one replica, in order. concurrency: sequences of each replica."""

    placement: Placement
    gpus: tuple[Gpu, ...]
    count: int
    concurrency: int

    @property
    def missing_bytes(self) -> int:
        """Shortage of one rank per stage, summed over stages; if only loading lacks memory, the largest of a GPU."""
        return self.placement.missing_bytes or self.placement.loading_bytes_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Stages, ranks and replicas on given GPUs. sizes: of a tensor-parallel rank."""

    stages: int
    tensor: int
    replicas: int
    groups: tuple[ReplicaGroup, ...]
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
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Shortage over all GPUs, for weights and KV cache or else during loading; 0 where everything fits."""
        return sum(group.missing_bytes * self.tensor * group.count for group in self.groups)

    @property
    def bytes_left(self) -> int:
        """Free bytes on the fullest GPU."""
        return min(stage.bytes_left for group in self.groups for stage in group.placement.stages)


def layouts(config: PretrainedConfig, options: PlanOptions, *, max_replicas: int | None = None) -> Iterator[Layout]:
    """Yield for each tensor-parallel degree one replica with as many stages as the GPUs allow, two with half as many,
    and so on; and one replica with the fewest stages that fit. The other layouts may not fit, see `Layout.fits`. A
    model that does not split has one stage and one rank.

    max_replicas: limit, which may leave GPUs unused; None: as many replicas as the GPUs allow.

    Raises ConfigError, and the errors of `model_sizes`.
    """
    gpus = parse_gpus(options.gpus)
    dtype = placed_dtype(options.dtype, config)
    # Ranks cannot split quantized weights.
    degrees = [1] if options.quantization else _tensor_degrees(config, gpus, options.max_ranks)
    for tensor in degrees:
        sizes = model_sizes(
            config,
            dtype=dtype,
            quantization=options.quantization,
            tensor=tensor,
            draft_weights=options.draft_weights,
        )
        maker = _Maker(gpus, sizes, dtype, tensor, options)
        num_groups = len(gpus) // tensor
        if sizes.splits:
            stages = {min(num_groups // replicas, len(sizes.layers)) for replicas in range(1, num_groups + 1)}
        elif tensor > 1:
            break
        else:
            stages = {1}
        for count in sorted(stages):
            most = num_groups // count if max_replicas is None else min(num_groups // count, max_replicas)
            yield maker.layout(count, min(most, options.concurrency))
        fewest = maker.fewest_stages
        if fewest is not None and fewest not in stages:
            yield maker.layout(fewest, 1)


def _tensor_degrees(config: PretrainedConfig, gpus: Sequence[Gpu], gpus_per_node: int) -> list[int]:
    """Return powers of two that divide the attention heads and keep each stage on one node and one kind of GPU."""
    num_heads = int(getattr(config.get_text_config(decoder=True), "num_attention_heads", 1))
    most = min(len(gpus), gpus_per_node)
    powers = itertools.takewhile(lambda degree: degree <= most, (2**power for power in itertools.count()))
    return [
        degree
        for degree in powers
        if num_heads % degree == 0
        and (gpus_per_node % degree == 0 or len(gpus) <= gpus_per_node)
        and are_ranks_alike(gpus, degree)
    ]


@dataclass(frozen=True, slots=True)
class _Maker:
    gpus: Sequence[Gpu]
    sizes: ModelSizes
    dtype: torch.dtype
    tensor: int
    options: PlanOptions

    @property
    def fewest_stages(self) -> int | None:
        """Smallest number of stages with which one replica fits; None where no number fits."""
        placement = self._placed(self.gpus, None, self.options.concurrency)
        return len(placement.stages) if placement.fits else None

    def layout(self, stages: int, replicas: int) -> Layout:
        """Return a layout. Replica after replica takes GPUs in their order; sequences are divided evenly."""
        size, concurrency = stages * self.tensor, math.ceil(self.options.concurrency / replicas)
        alike = Counter(tuple(self.gpus[first * size : (first + 1) * size]) for first in range(replicas))
        groups = [
            ReplicaGroup(
                placement=self._placed(gpus, stages, concurrency), gpus=gpus, count=count, concurrency=concurrency
            )
            for gpus, count in alike.items()
        ]
        return Layout(stages=stages, tensor=self.tensor, replicas=replicas, groups=tuple(groups), sizes=self.sizes)

    def _placed(self, gpus: Sequence[Gpu], stages: int | None, concurrency: int) -> Placement:
        options = self.options
        asked = PlacementOptions(
            gpus=gpus_spec(gpus),
            stages=stages,
            tensor=self.tensor,
            context=options.num_tokens,
            concurrency=concurrency,
            quantization=options.quantization,
            draft_weights=options.draft_weights,
            dtype=options.dtype,
        )
        return place_sizes(self.sizes, self.dtype, asked)
