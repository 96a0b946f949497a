"""Manifests as text for `kubectl apply`, with the underlying plan as a comment at the top."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import rayspec
from rayspec.ops.k8s.network import network_policy
from rayspec.ops.k8s.options import RenderOptions, read_render_options
from rayspec.ops.k8s.pods import Manifest, image, labels, models_claim, quantity
from rayspec.ops.k8s.ray_kinds import ray_resource
from rayspec.ops.k8s.sizing import GIB, ClusterPlan, PodShape, plan_cluster
from rayspec.types import ConfigError

OPTIONS_NAME, MANIFEST_NAME = "options.yaml", "manifest.yaml"


def render(options: RenderOptions) -> str:
    """Return YAML documents. The same options give the same text. Raises ConfigError, CheckpointError."""
    plan = plan_cluster(options)
    return f"{_header(options, plan)}---\n" + "---\n".join(_text(one) for one in manifests(options, plan))


def manifests(options: RenderOptions, plan: ClusterPlan) -> list[Manifest]:
    """Return a service account without rights, the network policy, a claim for models, and the Ray resource."""
    found: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": options.name, "labels": labels(options)},
            "automountServiceAccountToken": False,
        },
        network_policy(options),
    ]
    if options.uses_hub and options.models_claim is None:
        found.append(models_claim(options, plan))
    image_name = image(options, rayspec.__version__)
    found.append(ray_resource(options, plan, image=image_name, ray_version=metadata.version("ray")))
    if options.namespace is not None:
        for one in found:
            one["metadata"]["namespace"] = options.namespace
    return found


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


def _header(options: RenderOptions, plan: ClusterPlan) -> str:
    placement = plan.placement
    lines = [
        "Made by `rayspec k8s`: change the options and render again, rather than numbers here.",
        f"{options.model}: {placement.num_parameters / 1e9:.2f} billion parameters in {placement.dtype}.",
        f"{plan.concurrency} sequences of {plan.placement.options.num_tokens} tokens at once, on each copy of it.",
        f"Layout: {placement.choice}.",
        *(_stage_line(plan, number) for number in range(plan.num_stages)),
        *(_pod_line(shape) for shape in plan.pods),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _stage_line(plan: ClusterPlan, number: int) -> str:
    stage = plan.placement.stages[number]
    each = " on each GPU" if plan.num_ranks > 1 else ""
    return (
        f"  stage {number}: layers {stage.layers[0]}-{stage.layers[-1]}, {stage.weight_bytes / GIB:.1f} GiB of weights "
        f"and {stage.kv_bytes / GIB:.1f} GiB of keys and values{each}"
    )


def _pod_line(shape: PodShape) -> str:
    gpus = f"{shape.num_gpus} {shape.gpu.label}" if shape.gpu is not None else "no GPU"
    size = f"{gpus}, {shape.cpus} CPUs, {quantity(shape.memory_bytes)}"
    return f"  pods: {shape.num_pods}, each with {size}, for {shape.num_shards} of its shards"


class _Dumper(yaml.SafeDumper):
    """Writes YAML without aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _text(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=4096)
