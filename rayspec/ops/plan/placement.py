"""Placement of a model's layers on GPUs, and all ways to lay a model out: pipeline stages x tensor-parallel ranks x
replicas. The speed of a decode step is a roofline of bytes read over memory bandwidth, of which good engines reach two
thirds to four fifths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from rich.console import Group
from rich.table import Table
from transformers import PretrainedConfig

from rayspec.config import KV_CACHE_SHARE, DType, EngineConfig, ParallelOptions
from rayspec.decode.loading import cache_size
from rayspec.errors import counted
from rayspec.model.architecture import max_positions, why_context_ends
from rayspec.model.sizes import (
    BYTES_PER_LINEAR_WEIGHT,
    ModelSizes,
    Quantization,
    model_sizes,
    quantisation_of,
    rank_counts,
)
from rayspec.model.weights import dtype_of_plain_weights, format_of_weights, quantiser_settings
from rayspec.ops.plan.gpus import (
    RESERVED_BYTES,
    RESERVED_SHARE,
    Gpu,
    are_ranks_alike,
    gpus_of_a_node,
    gpus_spec,
    parse_gpus,
)
from rayspec.ops.plan.options import DEFAULT_CONTEXT, LoadOptions, PlacementOptions, PlanOptions
from rayspec.planning.partition import Device, LayerCost, ModelCosts, StageCost, bytes_missing, partition, stage_costs
from rayspec.types import ConfigError, UnsupportedModelError

_GB, _GIB = 10**9, 2**30
# Numbers of the config that predictions read, and that must be those of every layer.
_PLANNED_FROM = {"num_attention_heads", "head_dim", "hidden_size"}
AnyLoad = TypeVar("AnyLoad", bound=LoadOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model split into stages. Bytes are those of one tensor-parallel rank.

    missing_bytes: shortage summed over stages, on one rank; 0 where everything fits. loading_bytes_missing: largest
    shortage of a GPU while the model loads. splits: whether layers split into attention and MLP. choice: reason for the
    layout, as text. num_copies: copies of the whole model, each on GPUs like these.
    """

    options: PlacementOptions
    dtype: str
    num_parameters: int
    splits: bool
    stages: tuple[StageCost, ...]
    missing_bytes: int
    loading_bytes_missing: int
    choice: str
    num_copies: int = 1

    @property
    def size(self) -> str:
        """The parameters of the whole model, in words."""
        number = self.num_parameters
        return f"{number / 1e9:.2f} billion parameters" if number >= 1e8 else f"{number / 1e6:.2f} million parameters"

    @property
    def fits(self) -> bool:
        return self.shortage == 0

    @property
    def shortage(self) -> int:
        """Shortage of one rank per stage, summed over stages; if only loading lacks memory, the largest of a GPU."""
        return self.missing_bytes or self.loading_bytes_missing

    @property
    def step_s(self) -> float:
        """Roofline time of a decode step of all sequences, through one stage after the other."""
        return sum(stage.seconds for stage in self.stages)


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
        parts = ((self.stages, "stage"), (self.tensor, "tensor-parallel rank"), (self.replicas, "replica"))
        return " x ".join(counted(count, name) for count, name in parts)

    @property
    def num_gpus(self) -> int:
        return self.stages * self.tensor * self.replicas

    @property
    def concurrency(self) -> int:
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


def for_model(options: AnyLoad, config: PretrainedConfig) -> AnyLoad:
    """Return the options with a context that the model has, and the type that its linear weights have after the load.
    Raises ConfigError for a longer context and another type, and UnsupportedModelError for a model whose layers differ
    in their numbers of heads."""
    varying = set(getattr(config.get_text_config(decoder=True), "per_layer_attributes", None) or ())
    if varying & _PLANNED_FROM:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} cannot be planned: its layers differ in "
            f"{', '.join(sorted(varying & _PLANNED_FROM))}; load it without a plan, in one process"
        )
    limit = max_positions(config)
    if options.context is not None and limit is not None and options.context > limit:
        raise ConfigError(f"option 'context' is {options.context}, {why_context_ends(config)}: lower it")
    return options.replace(
        context=options.context or usual_context(config), quantization=_loaded_quantization(options, config)
    )


def _loaded_quantization(options: LoadOptions, config: PretrainedConfig) -> Quantization | None:
    asked, engine = options.quantization, EngineConfig(model="planned")
    if not (settings := quantiser_settings(engine, config)):
        return asked
    through_cpu = options.on_cpu or getattr(options, "num_ranks", 1) > 1  # ranks load their shares there
    own = quantisation_of(engine, config, on_cpu=through_cpu)
    if own == "fp8" and not all(gpu.has_fp8 for gpu in parse_gpus(options.gpus)):
        own = None
    if asked is not None and (own is None or BYTES_PER_LINEAR_WEIGHT[asked] != BYTES_PER_LINEAR_WEIGHT[own]):
        name, _ = format_of_weights(settings, on_cpu=through_cpu)
        raise ConfigError(
            f"option 'quantization' is {asked!r}, but the {name} weights of this checkpoint "
            f"{'become plain matrices at load' if own is None else f'stay {own}'}: leave it out"
        )
    return own


def usual_context(config: PretrainedConfig) -> int:
    """Return the context where none is named: the model's, but at most `DEFAULT_CONTEXT`."""
    return min(DEFAULT_CONTEXT, max_positions(config) or DEFAULT_CONTEXT)


def place(config: PretrainedConfig, options: PlacementOptions, sizes: ModelSizes | None = None) -> Placement:
    """Place a model: stage i runs on `tensor` GPUs from number i * tensor. Without `stages` and `layers`, the stages
    are the fewest that fit. Where nothing fits, layers are spread by time alone, and `missing_bytes` is the shortage.
    sizes: of a rank, with options of `for_model`. Raises ConfigError for GPUs that are unknown or too few (also of a
    node), and the errors of `for_model`, `model_sizes` and `partition`."""
    if sizes is None:
        options = for_model(options, config)
    node = gpus_of_a_node(options.gpus, unnamed=options.num_ranks)
    if options.num_ranks > node:
        raise ConfigError(
            f"option 'tensor' is {options.num_ranks}, of {node} GPUs of a node: ranks of a stage share a node, lower it"
        )
    sizes = sizes or rank_sizes(config, options, options.num_ranks)
    groups = _tensor_groups(parse_gpus(options.gpus), options.num_ranks)
    num_stages, choice = _num_stages(sizes, groups, options)
    if num_stages > 1 and sizes.why_whole:
        raise UnsupportedModelError(
            f"option 'stages' is {num_stages}, but stages cannot divide the model: {sizes.why_whole}; set it to 1"
        )
    if not sizes.splits and options.num_ranks > 1:
        raise UnsupportedModelError(
            f"option 'tensor' is {options.num_ranks}, but the model does not split into attention and MLP sublayers, "
            "so each layer is on one GPU: set it to 1"
        )
    costs, devices = _costs(sizes, groups[:num_stages], options)
    spread = devices
    if bytes_missing(costs, devices):
        spread = [replace(device, bytes_free=costs.total_bytes, cache_share=1.0) for device in devices]
    stages = stage_costs(costs, devices, partition(costs, spread, options.layers))
    ranks, short = options.num_ranks, [0]
    # While it loads, a tensor-parallel rank holds a whole layer in addition to its share, but no copies or caches yet.
    for stage in stages if ranks > 1 else ():
        own = [sizes.layers[layer] for layer in stage.layers]
        held = stage.weight_bytes - sum(layer.copy_bytes for layer in own)
        short.append(held + ranks * max(layer.weight_bytes for layer in own) - stage.device.bytes_free)
    return Placement(
        options=options,
        dtype=str(placed_dtype(options.dtype, config)).removeprefix("torch."),
        num_parameters=sizes.num_parameters,
        splits=sizes.splits,
        stages=stages,
        missing_bytes=sum(max(0, -stage.bytes_left) for stage in stages),
        loading_bytes_missing=max(short),
        choice=choice,
    )


def rank_sizes(config: PretrainedConfig, options: LoadOptions, num_ranks: int) -> ModelSizes:
    """Return the sizes of one of the tensor-parallel ranks. Raises as `model_sizes`."""
    dtype, quantization = placed_dtype(options.dtype, config), options.quantization
    copies = options.draft_weights
    return model_sizes(
        config,
        dtype=dtype,
        quantization=quantization,
        tensor=num_ranks,
        draft_weights=copies,
        on_cpu=options.on_cpu,
    )


def layouts(config: PretrainedConfig, options: PlanOptions, *, max_replicas: int | None = None) -> Iterator[Layout]:
    """Yield for each tensor-parallel degree one replica with as many stages as the GPUs allow, two with half as many,
    and so on, whether they fit or not; and one with the fewest stages that fit. A model that does not split has one
    rank, and one stage unless stages can divide its layers. max_replicas: may leave GPUs unused. Raises ConfigError,
    and the errors of `model_sizes`.
    """
    gpus = parse_gpus(options.gpus)

    def placed(sizes: ModelSizes, own: Sequence[Gpu], **layout: int) -> Placement:
        """Place a replica on some of the GPUs. layout: options in place of those of the load."""
        return place(config, PlacementOptions(**options.load | {"gpus": gpus_spec(own)} | layout), sizes)

    for tensor in _tensor_degrees(config, gpus, options):
        sizes, num_groups = rank_sizes(config, options, tensor), len(gpus) // tensor
        stages = {min(num_groups // replicas, len(sizes.starts)) for replicas in range(1, num_groups + 1)}
        most = min(options.concurrency, max_replicas or num_groups)
        replicas_of = {count: min(num_groups // count, most) for count in ([1] if sizes.why_whole else sorted(stages))}
        fewest = placed(sizes, gpus, tensor=tensor)
        if fewest.fits:
            replicas_of.setdefault(len(fewest.stages), 1)
        for count, replicas in replicas_of.items():
            # Replica after replica takes GPUs in their order; sequences are divided evenly.
            size, concurrency = count * tensor, math.ceil(options.concurrency / replicas)
            alike = Counter(tuple(gpus[first * size : (first + 1) * size]) for first in range(replicas))
            layout = {"stages": count, "tensor": tensor, "concurrency": concurrency}
            groups = tuple(replace(placed(sizes, own, **layout), num_copies=copies) for own, copies in alike.items())
            yield Layout(stages=count, tensor=tensor, replicas=replicas, groups=groups, sizes=sizes)
        if not sizes.splits:  # ranks cannot share its layers
            return


def _tensor_degrees(config: PretrainedConfig, gpus: Sequence[Gpu], options: PlanOptions) -> list[int]:
    """Return powers of two that divide the heads and columns, and keep each stage on one node and one kind of GPU."""
    if options.quantization:  # ranks cannot split quantized weights
        return [1]
    counts = rank_counts(config).values()
    most = min(len(gpus), options.max_ranks)
    return [
        degree
        for degree in (2**power for power in range(most.bit_length()))
        if not any(count % degree for count in counts)
        and (options.max_ranks % degree == 0 or len(gpus) <= options.max_ranks)
        and are_ranks_alike(gpus, degree)
    ]


def two_digits(number: float) -> str:
    """Return a prediction with two significant digits, as "64,000" or "0.0031"."""
    return f"{float(f'{number:.2g}'):,.10g}"


def placements_table(placements: Sequence[Placement]) -> Group:
    """Return a table per placement, for each kind of copy. Its GPUs are those of the first copy of that kind."""
    shown = []
    for placement in placements:
        options, missing_bytes = placement.options, placement.missing_bytes * placement.options.num_ranks
        table = Table()
        for heading in ("GPU", "layers", "sublayers", "weights GiB", "KV GiB", "left GiB", "ms a step", "fits"):
            table.add_column(heading, justify="left" if heading in ("GPU", "fits") else "right", no_wrap=True)
        for stage in placement.stages:
            first, last = stage.layers[0], stage.layers[-1]
            table.add_row(
                stage.device.name,
                f"{first}-{last}",
                f"{2 * first}-{2 * last + 1}" if placement.splits else "-",
                *(f"{size / _GIB:.1f}" for size in (stage.weight_bytes, stage.kv_bytes, stage.bytes_left)),
                two_digits(1000 * stage.seconds),
                "yes" if stage.bytes_left >= 0 else f"{-stage.bytes_left / _GIB:.1f} GiB missing",
            )
        verdict = "it fits"
        if missing_bytes:
            verdict = (
                f"it does not fit: {missing_bytes / _GIB:.1f} GiB are missing; use more or larger GPUs, more stages or "
                "tensor-parallel ranks, quantization, drafts without copies (--draft-weights none), or plan for fewer "
                "or shorter sequences"
            )
        elif placement.loading_bytes_missing:
            verdict = (
                f"it does not load: {placement.loading_bytes_missing / _GIB:.1f} GiB are missing on a GPU, which holds "
                "a whole layer in addition to its share meanwhile; use more stages"
            )
        form = f"{options.quantization} with embedding and head in " if options.quantization else ""
        copies = f" on each of {placement.num_copies} copies" if placement.num_copies > 1 else ""
        own = Group(
            f"{placement.size} in {form}{placement.dtype}, KV cache of "
            f"{options.concurrency} sequences of {options.num_tokens} tokens{copies}",
            table,
            f"{placement.choice}; GiB are of each GPU, of whose memory {RESERVED_SHARE:.0%} and "
            f"{RESERVED_BYTES / _GIB:.0f} GiB are kept for activations and the CUDA context; the KV cache may take "
            f"{KV_CACHE_SHARE['cuda']:.0%} of what the weights leave",
            f"a decode step of all sequences takes {two_digits(1000 * placement.step_s)} ms by roofline, "
            "bytes read over memory bandwidth: a bound, not a measurement",
            verdict,
        )
        shown.append(own)
    return Group(*shown)


def placements_json(placements: Sequence[Placement]) -> dict[str, Any]:
    """Return options, stages and totals as JSON values: bytes, seconds, and numbers of the first and last layer; copies
    on other kinds of GPUs than the first are under `unlike_copies`."""
    found = []
    for placement in placements:
        own = asdict(placement) | {"options": placement.options.model_dump()}
        for stage, shown in zip(placement.stages, own["stages"], strict=True):
            first, last = stage.layers[0], stage.layers[-1]
            sublayers = (2 * first, 2 * last + 1) if placement.splits else None
            shown.update(layers=(first, last), sublayers=sublayers, bytes_left=stage.bytes_left)
        found.append(own | {"fits": placement.fits, "step_s": placement.step_s})
    first_copy, *others = found
    return {**first_copy, "unlike_copies": others}


def _tensor_groups(gpus: Sequence[Gpu], tensor: int) -> list[tuple[Device, float]]:
    """Return the device of each possible stage, and its bytes per second. The weakest GPU decides for a stage."""
    groups = []
    for first in range(0, len(gpus) - tensor + 1, tensor):
        members = gpus[first : first + tensor]
        numbers = str(first) if tensor == 1 else f"{first}-{first + tensor - 1}"
        labels = "+".join(dict.fromkeys(gpu.label for gpu in members))
        free = max(0, min(gpu.usable_bytes for gpu in members))
        device = Device(name=f"{numbers}: {labels}", bytes_free=free, cache_share=KV_CACHE_SHARE["cuda"])
        groups.append((device, min(gpu.bandwidth_gb_s for gpu in members) * _GB))
    if not groups:
        raise ConfigError(f"option 'tensor' is {tensor}, of {len(gpus)} GPUs: lower it, or name more GPUs")
    return groups


def placed_dtype(asked: DType, config: PretrainedConfig) -> torch.dtype:
    dtype: torch.dtype = dtype_of_plain_weights(config) if asked == "auto" else getattr(torch, asked)
    return dtype


def _num_stages(
    sizes: ModelSizes, groups: Sequence[tuple[Device, float]], options: PlacementOptions
) -> tuple[int, str]:
    asked = options.stages if options.stages is not None or options.layers is None else len(options.layers)
    if asked is not None:
        if asked > len(groups):
            num_gpus = len(groups) * options.num_ranks
            raise ConfigError(
                f"option 'stages' is {asked}, times {options.num_ranks} GPUs: there are {num_gpus}; lower it, or name "
                "more GPUs"
            )
        return asked, f"{counted(asked, 'stage')} as asked"
    most = 1 if sizes.why_whole else min(len(groups), len(sizes.starts))
    for count in range(1, most + 1):
        if not bytes_missing(*_costs(sizes, groups[:count], options)):
            return count, f"{count} of up to {most} stages, the fewest that fit with tensor {options.num_ranks}"
    return most, f"all {most} stages with tensor {options.num_ranks}"


def _costs(
    sizes: ModelSizes, groups: Sequence[tuple[Device, float]], options: PlacementOptions
) -> tuple[ModelCosts, list[Device]]:
    """Return the costs of the model, and the devices. One step reads each weight once, but of experts only those that a
    sequence goes through, and what the caches of all sequences hold. It reads almost nothing of the embedding."""
    bandwidths = [bandwidth for _, bandwidth in groups]
    engine = EngineConfig(
        model="planned",
        device="cpu" if options.on_cpu else "cuda",
        max_num_seqs=options.concurrency,
        parallel=ParallelOptions(stages=len(groups)),
    )
    window = sizes.window if sizes.splits else None  # a model that does not split keeps all tokens
    size = cache_size(engine, options.num_tokens * options.concurrency, window)

    def cost(weight_bytes: int, *, kv_bytes: int = 0, bytes_read: float) -> LayerCost:
        seconds = tuple(bytes_read / bandwidth for bandwidth in bandwidths)
        return LayerCost(weight_bytes=weight_bytes, kv_bytes=kv_bytes, seconds=seconds)

    layers = tuple(
        cost(
            layer.weight_bytes + layer.copy_bytes,
            kv_bytes=layer.kv_bytes_per_token * size.slots_of(layer.window) + layer.state_bytes * options.concurrency,
            bytes_read=layer.weight_bytes
            - layer.expert_bytes_unread(options.concurrency)
            + (layer.kv_bytes_read(options.num_tokens) + layer.state_bytes // 2) * options.concurrency,
        )
        for layer in sizes.layers
    )
    embedding = cost(sizes.embedding_bytes, bytes_read=0)
    head = cost(
        sizes.last_stage_bytes(len(groups)) + sizes.head_copy_bytes, bytes_read=sizes.norm_bytes + sizes.head_bytes
    )
    costs = ModelCosts(
        embedding=embedding,
        layers=layers,
        head=head,
        starts=sizes.starts,
        embedding_everywhere=sizes.embedding_everywhere,
    )
    return costs, [device for device, _ in groups]
