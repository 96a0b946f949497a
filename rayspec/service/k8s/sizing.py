"""How many pods of what size a model needs: from the plan of `rayspec placement`, nothing by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import PretrainedConfig

from rayspec import demo
from rayspec.model.architecture import max_positions
from rayspec.model.sizes import load_config
from rayspec.planning.partition import StageCost
from rayspec.service.k8s.options import RenderOptions
from rayspec.service.placement_report import Gpu, Placement, PlacementOptions, parse_gpus, place, placed_dtype
from rayspec.types import ConfigError

GIB = 2**30
# Beside the weights: a process with torch, CUDA context and pinned buffers, and in each pod the engine, Serve's proxy
# and what reads documents.
_SHARD_BYTES, _POD_BYTES = 4 * GIB, 6 * GIB
_OBJECT_STORE_BYTES, _NCCL_BYTES = 2 * GIB, GIB
_CPUS_BESIDE_SHARDS = 4  # the engine's actor, the ingress, and for Ray Data two
_LOADING_BYTES_PER_S = 250 * 10**6  # of a slow volume, or the Hub
_LEAST_START_S = 600
_DISK_SHARE = 1.2
_ANY_CPU = "CPU-4096G@50"  # a device on which everything fits: what is wanted is what the stages take


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    """Workers that are alike.

    gpu: None on CPUs. num_pods: of a copy of the model. num_shards: processes with a part of the model in a pod, each
    on a GPU of its own. shared_bytes: of /dev/shm; memory_bytes has room for it.
    """

    group: str
    gpu: Gpu | None
    num_pods: int
    num_shards: int
    cpus: int
    memory_bytes: int
    shared_bytes: int

    @property
    def num_gpus(self) -> int:
        return self.num_shards if self.gpu is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A placement, and pods for it. checkpoint_bytes: of the model on disk."""

    placement: Placement
    pods: tuple[PodShape, ...]
    checkpoint_bytes: int

    @property
    def num_stages(self) -> int:
        return len(self.placement.stages)

    @property
    def num_shards(self) -> int:
        """Of a copy of the model."""
        return self.num_stages * self.placement.options.tensor

    @property
    def start_timeout_s(self) -> float:
        return float(max(_LEAST_START_S, math.ceil(self.checkpoint_bytes / _LOADING_BYTES_PER_S)))

    @property
    def claim_bytes(self) -> int:
        """Of a volume for the model."""
        return math.ceil(_DISK_SHARE * self.checkpoint_bytes) + GIB


def plan_cluster(options: RenderOptions) -> ClusterPlan:
    """Raises ConfigError for what does not fit, CheckpointError for a model whose config cannot be read."""
    config = load_config(str(demo.model_path()) if options.model == "demo" else options.sizes_from or options.model)
    limit = max_positions(config)
    if limit is not None and options.context > limit:
        raise ConfigError(f"option 'context' is {options.context}, the model ends at {limit}: lower it")
    placement = place(config, _placement_options(options))
    if not placement.fits:
        missing = placement.missing_bytes * options.tensor / GIB
        raise ConfigError(
            f"option 'gpus' is {options.gpus!r}: {missing:.1f} GiB are missing for {options.model}; name more or "
            "larger GPUs, more stages, or a lower context or concurrency (rayspec placement shows each stage)"
        )
    if options.gpus is not None:
        _check_loading(placement, options)
    return ClusterPlan(
        placement=placement,
        pods=tuple(_gpu_pods(placement, options, _copies_in_memory(config, placement)))
        if options.gpus is not None
        else (_cpu_pod(placement, options),),
        checkpoint_bytes=options.tensor * sum(stage.weight_bytes for stage in placement.stages),
    )


def _placement_options(options: RenderOptions) -> PlacementOptions:
    stages = options.stages or 1
    return PlacementOptions(
        gpus=options.gpus or f"{stages * options.tensor}x{_ANY_CPU}",
        stages=options.stages if options.gpus is not None else stages,
        tensor=options.tensor,
        context=options.context,
        concurrency=options.concurrency,
        quantization=options.quantization,
        dtype=options.dtype,
    )


def _check_loading(placement: Placement, options: RenderOptions) -> None:
    """Beside its share, a tensor-parallel rank has a layer whole until that is split. Raises ConfigError."""
    for stage in placement.stages:
        whole_layer_bytes = math.ceil(stage.weight_bytes * options.tensor / len(stage.layers))
        if options.tensor > 1 and stage.weight_bytes + whole_layer_bytes > stage.device.bytes_free:
            raise ConfigError(
                f"option 'tensor' is {options.tensor}: while it loads, each GPU holds a whole layer beside its share, "
                f"{(stage.weight_bytes + whole_layer_bytes) / GIB:.1f} GiB, and has "
                f"{stage.device.bytes_free / GIB:.1f}; use more stages"
            )


def _copies_in_memory(config: PretrainedConfig, placement: Placement) -> int:
    """Of a stage that goes to GPUs. Its ranks map the same files, and so share them, unless the weights are something
    else than what lies in the files: of another type, or experts, which transformers joins as it loads them."""
    as_in_files = placed_dtype("auto", config) == getattr(torch, placement.dtype)
    has_experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    return 1 if as_in_files and not has_experts else placement.options.tensor


def _gpu_pods(placement: Placement, options: RenderOptions, copies: int) -> list[PodShape]:
    """One shape for each model of GPU. copies: of a stage in a pod's memory while it loads. Raises ConfigError for GPUs
    that Ray could not tell apart."""
    tensor = options.tensor
    if tensor > options.gpus_per_node:
        raise ConfigError(
            f"option 'tensor' is {tensor}, of {options.gpus_per_node} GPUs of a node: ranks of a stage share a node, "
            "lower it or raise gpus_per_node"
        )
    gpus = parse_gpus(placement.options.gpus)
    owners = [(gpus[number * tensor], stage) for number, stage in enumerate(placement.stages)]
    kinds = [(gpu, [stage for _, stage in found]) for gpu, found in groupby(owners, key=lambda owner: owner[0])]
    if len({gpu.label for gpu, _ in kinds}) > 1 and options.most_replicas > 1:
        raise ConfigError(
            f"option 'gpus' is {options.gpus!r}: Ray would mix the GPUs of several copies; name GPUs of one kind, or "
            "render one copy"
        )
    if len({gpu.label for gpu, _ in kinds}) < len(kinds):
        raise ConfigError(f"option 'gpus' is {options.gpus!r}: name the GPUs of one kind side by side")
    return [_gpu_pod(gpu, stages, options, copies) for gpu, stages in kinds]


def _gpu_pod(gpu: Gpu, stages: Sequence[StageCost], options: RenderOptions, copies: int) -> PodShape:
    """Stages spread evenly over as few pods as the size of a node allows."""
    stages_of_a_node = options.gpus_per_node // options.tensor
    num_pods = math.ceil(len(stages) / stages_of_a_node)
    num_stages = math.ceil(len(stages) / num_pods)
    heaviest = sorted((stage.weight_bytes * options.tensor for stage in stages), reverse=True)[:num_stages]
    num_shards = num_stages * options.tensor
    return _pod(
        group=gpu.label.lower(),
        gpu=gpu,
        num_pods=num_pods,
        num_shards=num_shards,
        cpus=num_shards,
        model_bytes=copies * sum(heaviest),  # it is read into memory, and then moved
    )


def _cpu_pod(placement: Placement, options: RenderOptions) -> PodShape:
    """All shards in one pod: weights and KV cache stay in its memory."""
    assert options.cpus is not None
    num_shards = len(placement.stages) * options.tensor
    stage_bytes = sum(stage.weight_bytes * options.tensor + stage.kv_bytes for stage in placement.stages)
    return _pod(
        group="cpu",
        gpu=None,
        num_pods=1,
        num_shards=num_shards,
        cpus=num_shards * options.cpus,
        model_bytes=options.tensor * stage_bytes,
    )


def _pod(*, group: str, gpu: Gpu | None, num_pods: int, num_shards: int, cpus: int, model_bytes: int) -> PodShape:
    shared_bytes = _OBJECT_STORE_BYTES + (num_shards * _NCCL_BYTES if gpu is not None else 0)
    memory_bytes = model_bytes + num_shards * (_SHARD_BYTES if gpu is not None else GIB) + shared_bytes
    return PodShape(
        group=group,
        gpu=gpu,
        num_pods=num_pods,
        num_shards=num_shards,
        cpus=cpus + _CPUS_BESIDE_SHARDS,
        memory_bytes=memory_bytes + (_POD_BYTES if gpu is not None else 2 * GIB),
        shared_bytes=shared_bytes,
    )
