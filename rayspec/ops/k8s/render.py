"""Manifests as text for `kubectl apply`, with the underlying plan as a comment at the top."""

from __future__ import annotations

import contextlib
import ipaddress
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import yaml

import rayspec
from rayspec.ops.k8s.options import RenderOptions, read_render_options
from rayspec.ops.k8s.sizing import GIB, ClusterPlan, plan_cluster
from rayspec.types import ConfigError

OPTIONS_NAME, MANIFEST_NAME = "options.yaml", "manifest.yaml"
JOBS_FOLDER = "/opt/rayspec/jobs"
# The excepted addresses are metadata services of clouds, which hand out a node's credentials.
Manifest = dict[str, Any]
_ANYWHERE: Manifest = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}


def render(options: RenderOptions) -> str:
    """Return YAML documents. The same options give the same text. Raises ConfigError, CheckpointError."""
    plan = plan_cluster(options)
    placement, each = plan.placement, " on each GPU" if plan.num_ranks > 1 else ""
    lines = [
        "Made by `rayspec k8s`: change the options and render again, rather than numbers here.",
        f"{options.model}: {placement.num_parameters / 1e9:.2f} billion parameters in {placement.dtype}.",
        f"{plan.concurrency} sequences of {plan.placement.options.num_tokens} tokens at once, on each copy of it.",
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
    engine, parallel = _engine_options(options, plan)
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
        raise ConfigError(f"folder {str(folder)!r} has no {OPTIONS_NAME}: name one that has, as k8s/overlays")
    stale = {}
    for file in files:
        text, path = render(read_render_options(file, {})), file.with_name(MANIFEST_NAME)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale[path] = text
    return stale


def _engine_options(options: RenderOptions, plan: ClusterPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of EngineConfig, without model and parallel, and those of ParallelOptions; the latter are
    empty for a single copy in one process. For a service, Serve makes the replicas, not the engine."""
    engine: dict[str, Any] = {
        "device": "cpu" if options.cpus is not None else "cuda",
        "max_model_len": plan.placement.options.num_tokens,
        "max_num_seqs": plan.concurrency,
    }
    if options.dtype != "auto":
        engine["dtype"] = options.dtype
    replicas = plan.num_copies if options.kind == "job" else 1
    parallel: dict[str, Any] = {}
    if plan.num_shards > 1 or replicas > 1:
        parallel = {"stages": plan.num_stages, "start_timeout_s": plan.start_timeout_s}
        parallel |= {"tensor": plan.num_ranks} if plan.num_ranks > 1 else {}
        parallel |= {"replicas": replicas} if replicas > 1 else {}
    if options.cpus is not None:
        engine["num_threads"] = options.cpus
        parallel |= {"cpus_per_shard": float(options.cpus)} if parallel else {}
    return engine, parallel


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


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
