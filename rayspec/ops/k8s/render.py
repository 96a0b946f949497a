"""Plans the pods that a model needs, from the plan of `rayspec placement`, and writes manifests for them as text for
`kubectl apply`, with the plan as a comment at the top."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from transformers import PretrainedConfig

import rayspec
from rayspec import demo
from rayspec.config import EngineConfig
from rayspec.model.sizes import ModelSizes, stored_quantisation
from rayspec.model.weights import quantiser_settings, read_config
from rayspec.ops.doctor.machine import object_store_bytes
from rayspec.ops.k8s.options import RenderOptions, read_render_options
from rayspec.ops.plan.forecast import place_best
from rayspec.ops.plan.gpus import ANY_CPU, Gpu, are_ranks_alike, parse_gpus
from rayspec.ops.plan.options import LoadOptions, PlacementOptions, choices_with
from rayspec.ops.plan.placement import Placement, placed_dtype, rank_sizes
from rayspec.types import ConfigError

GIB = 2**30
# In addition to the weights: torch, CUDA context, pinned buffers; engine, Serve's proxy and readers of documents.
_SHARD_BYTES, _POD_BYTES = 4 * GIB, 6 * GIB
_OBJECT_STORE_BYTES, _NCCL_BYTES = 2 * GIB, GIB
_CPU_CACHE_SHARE = 0.8  # of the memory that weights leave, for keys and values: nobody else works in such a pod
_CPUS_BESIDE_SHARDS = 4  # the engine's actor, the ingress, and for Ray Data two
_LOADING_BYTES_PER_S = 250 * 10**6  # of a slow volume, or the Hub
_LEAST_START_S = 600
_DISK_SHARE = 1.2
OPTIONS_NAME, MANIFEST_NAME = "options.yaml", "manifest.yaml"
JOBS_FOLDER = "/opt/rayspec/jobs"
# The excepted addresses are metadata services of clouds, which hand out a node's credentials.
Manifest = dict[str, Any]
_ANYWHERE: Manifest = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodShape:
    """A group of equal worker pods. gpu: None on CPUs. num_pods: pods per copy of the model. num_shards: processes per
    pod that hold a part of the model, each on its own GPU. shared_bytes: size of /dev/shm, of which
    memory_bytes includes what is used."""

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


def plan_cluster(options: RenderOptions) -> ClusterPlan:
    """Plan the pods of a model. Raises ConfigError if it does not fit, also while it loads, or if the copies would be
    on different kinds of GPUs; CheckpointError for an unreadable config."""
    config = read_config(
        demo.model_path(options.model) if options.model in demo.BUNDLED else options.sizes_from or options.model
    )
    gpus, stages, tensor = options.gpus, options.stages, options.tensor
    if gpus is None:
        stages, tensor = stages or 1, tensor or 1
        gpus = f"{stages * tensor}x{ANY_CPU}"
    same = {name: getattr(options, name) for name in LoadOptions.model_fields if name != "gpus"}
    asked = PlacementOptions(gpus=gpus, stages=stages, tensor=tensor, **same)
    max_replicas = 1 if options.names_copies else None
    placement, *unlike = place_best(config, asked, gpus_per_node=options.gpus_per_node, max_replicas=max_replicas)
    if unlike:
        raise _mixed(options)
    ranks = placement.options.num_ranks
    if placement.missing_bytes:
        raise ConfigError(
            f"option 'gpus' is {options.gpus!r}: {placement.missing_bytes * ranks / GIB:.1f} GiB are missing for "
            f"{options.model}; name more or larger GPUs, more stages, a lower context or concurrency, or draft_weights "
            "none (rayspec placement shows each stage)"
        )
    if options.gpus is not None and placement.loading_bytes_missing:
        raise ConfigError(
            f"option 'tensor' is {ranks}: while it loads, each GPU holds a whole layer in addition to its share, and "
            f"{placement.loading_bytes_missing / GIB:.1f} GiB are missing on one GPU; use more stages"
        )
    num_copies = options.replicas or placement.num_copies
    max_copies = options.max_replicas or num_copies
    # The whole model: a sum over ranks would count the embedding and the head several times. After the load, and in the
    # files.
    sizes, settings = rank_sizes(config, placement.options, 1), quantiser_settings(EngineConfig(model="m"), config)
    own = {"dtype": "auto", "quantization": stored_quantisation(settings) or placement.options.quantization}
    stored = rank_sizes(config, LoadOptions(**placement.options.load | own), 1)
    return ClusterPlan(
        placement=placement,
        pods=_gpu_pods(config, sizes, placement, options, max_copies)
        if options.gpus is not None
        else (_cpu_pod(placement, options),),
        checkpoint_bytes=_bytes_read(stored, range(len(stored.layers))),
        num_copies=num_copies,
        max_copies=max_copies,
    )


def _mixed(options: RenderOptions) -> ConfigError:
    return ConfigError(
        f"option 'gpus' is {options.gpus!r}: Ray would mix the GPUs of several copies; name GPUs of one kind, or "
        "render one copy with --replicas 1"
    )


def _gpu_pods(
    config: PretrainedConfig, sizes: ModelSizes, placement: Placement, options: RenderOptions, max_copies: int
) -> tuple[PodShape, ...]:
    """Return one shape for each kind of GPU, which spreads its stages evenly over as few pods as the size of a node
    allows. sizes: of the whole model. max_copies: of the model. Raises ConfigError for GPUs that Ray could not
    distinguish."""
    tensor = placement.options.num_ranks
    if tensor > options.gpus_of_a_pod:
        raise ConfigError(
            f"option 'tensor' is {tensor}, of {options.gpus_of_a_pod} GPUs of a node: ranks of a stage share a node, "
            "lower it or raise gpus_per_node"
        )
    gpus = parse_gpus(placement.options.gpus)
    of_amd = next((gpu.name for gpu in gpus if re.match(r"MI\d", gpu.name)), None)
    if of_amd is not None and options.gpu_resource.startswith("nvidia.com/"):
        raise ConfigError(
            f"option 'gpu_resource' is {options.gpu_resource!r}, but {of_amd} is an AMD GPU: set it to amd.com/gpu, "
            "and image to one with torch for ROCm"
        )
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
    # own copy of weights that differ from the files: of another dtype, of a quantised checkpoint, and experts, which
    # transformers merges.
    is_quantised = bool(quantiser_settings(EngineConfig(model="m"), config))
    as_in_files = placed_dtype("auto", config) == getattr(torch, placement.dtype) and not is_quantised
    text_config = config.get_text_config(decoder=True)
    has_experts = any(getattr(text_config, name, None) for name in ("num_experts", "num_local_experts"))
    copies = 1 if as_in_files and not has_experts else tensor
    shapes = []
    for gpu, stages in kinds:
        num_pods = math.ceil(len(stages) / (options.gpus_of_a_pod // tensor))
        num_stages = math.ceil(len(stages) / num_pods)
        heaviest = sorted((_bytes_read(sizes, stage.layers) for stage in stages), reverse=True)[:num_stages]
        num_shards = num_stages * tensor
        used_bytes = _OBJECT_STORE_BYTES + num_shards * _NCCL_BYTES
        memory_bytes = copies * sum(heaviest) + num_shards * _SHARD_BYTES + used_bytes + _POD_BYTES
        shape = PodShape(
            group=re.sub(r"[^a-z0-9]+", "-", gpu.label.lower()).strip("-"),  # a part of the names of pods
            gpu=gpu,
            num_pods=num_pods,
            num_shards=num_shards,
            cpus=num_shards + _CPUS_BESIDE_SHARDS,
            memory_bytes=memory_bytes,
            shared_bytes=max(used_bytes, _store_bytes(memory_bytes)),
        )
        shapes.append(shape)
    return tuple(shapes)


def _bytes_read(sizes: ModelSizes, layers: range) -> int:
    """Return the bytes of a stage's weights, without the copies for drafts, which a GPU makes itself."""
    is_first, is_last = layers.start == 0, layers.stop == len(sizes.layers)
    return (
        sum(sizes.layers[layer].weight_bytes for layer in layers)
        + (sizes.embedding_bytes if is_first or sizes.embedding_everywhere else 0)
        + (sizes.last_stage_bytes(1 if is_first else 2) if is_last else 0)
    )


def _cpu_pod(placement: Placement, options: RenderOptions) -> PodShape:
    """Return a shape with all shards in one pod: weights and KV cache stay in its memory."""
    assert options.cpus is not None
    ranks = placement.options.num_ranks
    num_shards = len(placement.stages) * ranks
    of_stages = [stage.weight_bytes * ranks + int(stage.kv_bytes / _CPU_CACHE_SHARE) for stage in placement.stages]
    memory_bytes = ranks * sum(of_stages) + (num_shards + 2) * GIB + _OBJECT_STORE_BYTES
    return PodShape(
        group="cpu",
        gpu=None,
        num_pods=1,
        num_shards=num_shards,
        cpus=num_shards * options.cpus + _CPUS_BESIDE_SHARDS,
        memory_bytes=memory_bytes,
        shared_bytes=_store_bytes(memory_bytes),
    )


def _store_bytes(memory_bytes: int) -> int:
    """Return the size of Ray's object store in a pod with so much memory, which is rounded up."""
    return object_store_bytes(math.ceil(memory_bytes / GIB) * GIB)


def render(options: RenderOptions) -> str:
    """Return YAML documents. The same options give the same text. Raises ConfigError, CheckpointError."""
    plan = plan_cluster(options)
    placement, asked = plan.placement, plan.placement.options
    each = " on each GPU" if asked.num_ranks > 1 else ""
    lines = [
        "Made by `rayspec k8s`: change the options and render again, rather than numbers here.",
        f"{options.model}: {placement.size} in {placement.dtype}.",
        f"{asked.concurrency} sequences of {asked.num_tokens} tokens at once, on each copy of it.",
        f"Layout: {placement.choice}.",
    ]
    for number, stage in enumerate(placement.stages):
        lines.append(
            f"  stage {number}: layers {stage.layers[0]}-{stage.layers[-1]}, {stage.weight_bytes / GIB:.1f} GiB of "
            f"weights and {stage.kv_bytes / GIB:.1f} GiB of keys and values{each}"
        )
    for shape in plan.pods:
        gpus = f"{shape.num_gpus} {shape.gpu.label}" if shape.gpu is not None else "no GPU"
        size = f"{gpus}, {shape.cpus} CPUs, {_gib(shape.memory_bytes)}"
        lines.append(f"  pods: {shape.num_pods}, each with {size}, for {shape.num_shards} of its shards")
    header = "".join(f"# {line}\n" for line in lines)
    documents = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=4096) for one in manifests(options, plan))
    return f"{header}---\n" + "---\n".join(documents)


def manifests(options: RenderOptions, plan: ClusterPlan) -> list[Manifest]:
    """Return a service account without rights, the network policy, a claim for models, and the Ray resource."""
    asked, num_stages = plan.placement.options, len(plan.placement.stages)
    engine: dict[str, Any] = {
        "device": "cpu" if options.cpus is not None else "cuda",
        "max_model_len": asked.num_tokens,
        "max_num_seqs": asked.concurrency,
        "dtype": None if options.dtype == "auto" else options.dtype,
        "num_threads": options.cpus,
        "kv_cache_share": _CPU_CACHE_SHARE if options.cpus is not None else None,
    }
    replicas = plan.num_copies if options.kind == "job" else 1  # of a service, Serve makes the replicas
    parallel: dict[str, Any] = {}  # empty for a single copy in one process
    if num_stages * asked.num_ranks > 1 or replicas > 1:
        start_timeout_s = float(max(_LEAST_START_S, math.ceil(plan.checkpoint_bytes / _LOADING_BYTES_PER_S)))
        parallel = {"stages": num_stages, "start_timeout_s": start_timeout_s}
        parallel |= {"tensor": asked.num_ranks if asked.num_ranks > 1 else None}
        parallel |= {"replicas": replicas if replicas > 1 else None}
        parallel |= {"cpus_per_shard": float(options.cpus) if options.cpus else None}
    if (choices := choices_with(options.draft_weights)) is not None:
        is_job = options.kind == "job"
        engine |= {"choices": ",".join(choices)} if is_job else {"speculation": {"choices": choices}}
    engine, parallel = ({name: value for name, value in some.items() if value} for some in (engine, parallel))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - YAML: texts are quoted by tojson
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["gib"] = _gib
    text = environment.get_template("manifests.yaml.j2").render(
        o=options,
        plan=plan,
        claim_bytes=math.ceil(_DISK_SHARE * plan.checkpoint_bytes) + GIB,
        version=rayspec.__version__,
        ray_version=metadata.version("ray"),
        anywhere=_ANYWHERE,
        redis=_redis(options.redis_address),
        jobs_folder=JOBS_FOLDER,
        engine=engine,
        parallel=parallel,
    )
    return list(yaml.safe_load_all(text))


def stale_overlays(folder: Path) -> dict[Path, str]:
    """Return the correct text of each manifest below `folder` that differs from its rendered options.yaml. Raises
    ConfigError where there is no options.yaml."""
    files = sorted(folder.rglob(OPTIONS_NAME))
    if not files:
        raise ConfigError(f"folder {str(folder)!r} has no {OPTIONS_NAME} below it: name a folder of overlays")
    stale = {}
    for file in files:
        text, path = render(read_render_options(file, {})), file.with_name(MANIFEST_NAME)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale[path] = text
    return stale


def _redis(place: str | None) -> dict[str, Any] | None:
    """Return the port of a Redis, and the peer that stands for its host, because a policy cannot name a host. An IP
    address stands for itself. A service of the cluster (SERVICE, SERVICE.NAMESPACE or SERVICE.NAMESPACE.svc...) becomes
    the pods of its namespace. Any other name becomes all outside addresses."""
    if place is None:
        return None
    host, _, port = place.rpartition(":")
    peer: Manifest = {"podSelector": {}}
    namespace = host.split(".")[1:]
    if namespace:
        peer["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace[0]}}
    if len(namespace) > 1 and namespace[1] != "svc":
        peer = _ANYWHERE
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        peer = {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}
    return {"peer": peer, "port": int(port)}


def _gib(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / GIB)}Gi"


class _Dumper(yaml.SafeDumper):
    """Writes YAML without aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
