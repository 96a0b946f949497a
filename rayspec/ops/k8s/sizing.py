"""Number and size of the pods that a model needs, computed from the plan of `rayspec placement`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import PretrainedConfig

from rayspec import demo
from rayspec.config import SpeculationOptions
from rayspec.model.sizes import model_sizes
from rayspec.model.weights import read_config
from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.plan.forecast import place_best
from rayspec.ops.plan.gpus import Gpu, are_ranks_alike, parse_gpus
from rayspec.ops.plan.options import PlacementOptions
from rayspec.ops.plan.placement import Placement, placed_dtype
from rayspec.types import ConfigError

GIB = 2**30
# Memory in addition to the weights. Of a shard: torch, CUDA context and pinned buffers. Of a pod: the engine, Serve's
# proxy and the readers of documents.
_SHARD_BYTES, _POD_BYTES = 4 * GIB, 6 * GIB
_OBJECT_STORE_BYTES, _NCCL_BYTES = 2 * GIB, GIB
_CPUS_BESIDE_SHARDS = 4  # the engine's actor, the ingress, and for Ray Data two
_LOADING_BYTES_PER_S = 250 * 10**6  # of a slow volume, or the Hub
_LEAST_START_S = 600
_DISK_SHARE = 1.2
_ANY_CPU = "CPU-4096G@50"  # a device on which everything fits; only the memory of the stages is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    """A group of equal worker pods.

    gpu: None on CPUs. num_pods: pods per copy of the model. num_shards: processes per pod that hold a part of the
    model, each on its own GPU. shared_bytes: size of /dev/shm, which memory_bytes includes.
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
    """A placement, and pods for it. checkpoint_bytes: size of the model on disk. num_copies: initial copies of the
    model. max_copies: limit of the autoscaler."""

    placement: Placement
    pods: tuple[PodShape, ...]
    checkpoint_bytes: int
    num_copies: int
    max_copies: int

    @property
    def num_stages(self) -> int:
        return len(self.placement.stages)

    @property
    def num_ranks(self) -> int:
        """Tensor-parallel ranks per stage."""
        return self.placement.options.num_ranks

    @property
    def num_shards(self) -> int:
        """Shards per copy of the model."""
        return self.num_stages * self.num_ranks

    @property
    def concurrency(self) -> int:
        """Sequences at once, per copy of the model."""
        return self.placement.options.concurrency

    @property
    def start_timeout_s(self) -> float:
        return float(max(_LEAST_START_S, math.ceil(self.checkpoint_bytes / _LOADING_BYTES_PER_S)))

    @property
    def claim_bytes(self) -> int:
        """Size of a volume for the model."""
        return math.ceil(_DISK_SHARE * self.checkpoint_bytes) + GIB


def plan_cluster(options: RenderOptions) -> ClusterPlan:
    """Plan the pods of a model. Raises ConfigError if it does not fit, also while it loads, or if the copies would be
    on different kinds of GPUs; CheckpointError for an unreadable config."""
    config = read_config(
        demo.model_path(options.model) if options.model in demo.BUNDLED else options.sizes_from or options.model
    )
    gpus, stages, tensor = options.gpus, options.stages, options.tensor
    if gpus is None:
        stages, tensor = stages or 1, tensor or 1
        gpus = f"{stages * tensor}x{_ANY_CPU}"
    same = {name: getattr(options, name) for name in ("context", "concurrency", "quantization", "dtype")}
    copies = SpeculationOptions().draft_weights if options.gpus is None else ()
    asked = PlacementOptions(gpus=gpus, stages=stages, tensor=tensor, draft_weights=copies, **same)
    max_replicas = 1 if options.names_copies else None
    placement, *unlike = place_best(config, asked, gpus_per_node=options.gpus_per_node, max_replicas=max_replicas)
    if unlike:
        raise _mixed(options)
    ranks = placement.options.num_ranks
    if placement.missing_bytes:
        raise ConfigError(
            f"option 'gpus' is {options.gpus!r}: {placement.missing_bytes * ranks / GIB:.1f} GiB are missing for "
            f"{options.model}; name more or larger GPUs, more stages, or a lower context or concurrency (rayspec "
            "placement shows each stage)"
        )
    if options.gpus is not None and placement.loading_bytes_missing:
        raise ConfigError(
            f"option 'tensor' is {ranks}: while it loads, each GPU holds a whole layer in addition to its share, and "
            f"{placement.loading_bytes_missing / GIB:.1f} GiB are missing on one GPU; use more stages"
        )
    num_copies = options.replicas or placement.num_copies
    max_copies = options.max_replicas or num_copies
    # The whole model: a sum over ranks would count the embedding and the head several times.
    sizes = model_sizes(
        config, dtype=placed_dtype(placement.options.dtype, config), quantization=placement.options.quantization
    )
    layer_bytes = sum(layer.weight_bytes for layer in sizes.layers)
    return ClusterPlan(
        placement=placement,
        pods=_gpu_pods(config, placement, options, max_copies)
        if options.gpus is not None
        else (_cpu_pod(placement, options),),
        checkpoint_bytes=sizes.embedding_bytes + layer_bytes + sizes.last_stage_bytes(1),
        num_copies=num_copies,
        max_copies=max_copies,
    )


def _mixed(options: RenderOptions) -> ConfigError:
    return ConfigError(
        f"option 'gpus' is {options.gpus!r}: Ray would mix the GPUs of several copies; name GPUs of one kind, or "
        "render one copy with --replicas 1"
    )


def _gpu_pods(
    config: PretrainedConfig, placement: Placement, options: RenderOptions, max_copies: int
) -> tuple[PodShape, ...]:
    """Return one shape for each kind of GPU, which spreads its stages evenly over as few pods as the size of a node
    allows. max_copies: of the model. Raises ConfigError for GPUs that Ray could not distinguish."""
    tensor = placement.options.num_ranks
    if tensor > options.gpus_of_a_pod:
        raise ConfigError(
            f"option 'tensor' is {tensor}, of {options.gpus_of_a_pod} GPUs of a node: ranks of a stage share a node, "
            "lower it or raise gpus_per_node"
        )
    gpus = parse_gpus(placement.options.gpus)
    if not are_ranks_alike(gpus[: tensor * len(placement.stages)], tensor):
        raise ConfigError(
            f"option 'tensor' is {tensor}, of the GPUs {options.gpus!r}: the ranks of a stage share a pod with GPUs of "
            "one kind; lower it, or name a multiple of it for each kind"
        )
    owners = [(gpus[number * tensor], stage) for number, stage in enumerate(placement.stages)]
    kinds = [(gpu, [stage for _, stage in found]) for gpu, found in groupby(owners, key=lambda owner: owner[0])]
    labels = {gpu.label for gpu, _ in kinds}
    if len(labels) > 1 and max_copies > 1:
        raise _mixed(options)
    if len(labels) < len(kinds):
        raise ConfigError(f"option 'gpus' is {options.gpus!r}: name the GPUs of one kind side by side")
    # Weights are read into memory, and then moved. Ranks map the same files and so share one copy. Each rank has its
    # own copy of weights that differ from the files: of another dtype, and experts, which transformers merges.
    as_in_files = placed_dtype("auto", config) == getattr(torch, placement.dtype)
    text_config = config.get_text_config(decoder=True)
    has_experts = any(getattr(text_config, name, None) for name in ("num_experts", "num_local_experts"))
    copies = 1 if as_in_files and not has_experts else tensor
    shapes = []
    for gpu, stages in kinds:
        num_pods = math.ceil(len(stages) / (options.gpus_of_a_pod // tensor))
        num_stages = math.ceil(len(stages) / num_pods)
        heaviest = sorted((stage.weight_bytes * tensor for stage in stages), reverse=True)[:num_stages]
        num_shards = num_stages * tensor
        shared_bytes = _OBJECT_STORE_BYTES + num_shards * _NCCL_BYTES
        shape = PodShape(
            group=gpu.label.lower(),
            gpu=gpu,
            num_pods=num_pods,
            num_shards=num_shards,
            cpus=num_shards + _CPUS_BESIDE_SHARDS,
            memory_bytes=copies * sum(heaviest) + num_shards * _SHARD_BYTES + shared_bytes + _POD_BYTES,
            shared_bytes=shared_bytes,
        )
        shapes.append(shape)
    return tuple(shapes)


def _cpu_pod(placement: Placement, options: RenderOptions) -> PodShape:
    """Return a shape with all shards in one pod: weights and KV cache stay in its memory."""
    assert options.cpus is not None
    ranks = placement.options.num_ranks
    num_shards = len(placement.stages) * ranks
    model_bytes = ranks * sum(stage.weight_bytes * ranks + stage.kv_bytes for stage in placement.stages)
    return PodShape(
        group="cpu",
        gpu=None,
        num_pods=1,
        num_shards=num_shards,
        cpus=num_shards * options.cpus + _CPUS_BESIDE_SHARDS,
        memory_bytes=model_bytes + (num_shards + 2) * GIB + _OBJECT_STORE_BYTES,
        shared_bytes=_OBJECT_STORE_BYTES,
    )
