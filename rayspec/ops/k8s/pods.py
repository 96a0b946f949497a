"""Pods of a Ray cluster: an unprivileged container, its mounts, and the nodes where it may run."""

from __future__ import annotations

import math
from typing import Any

from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.sizing import GIB, ClusterPlan, PodShape

Manifest = dict[str, Any]

# KubeRay's defaults, written out. Only ports without a default in KubeRay are our own choice.
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
MONITORING_PORTS = {"as-metrics": 44217, "dash-metrics": 44227}
AGENT_PORT = 52365
WORKER_PORTS = (10002, 19999)

MODELS_FOLDER = "/models"
JOBS_FOLDER = "/opt/rayspec/jobs"
_HOME = "/home/rayspec"
_USER = 1000

UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
TMP_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - in the pod, and Ray's

# Names of GPUs in the label nvidia.com/gpu.product, which NVIDIA's GPU feature discovery sets.
_PRODUCTS = {
    "A100-40G": "NVIDIA-A100-SXM4-40GB",
    "A100-80G": "NVIDIA-A100-SXM4-80GB",
    "H100-80G": "NVIDIA-H100-80GB-HBM3",
    "H100-PCIe-80G": "NVIDIA-H100-PCIe",
    "H200-141G": "NVIDIA-H200",
    "B200-180G": "NVIDIA-B200",
    "L40S-48G": "NVIDIA-L40S",
    "L4-24G": "NVIDIA-L4",
}
# Labels that clouds and Karpenter give to preemptible nodes.
_SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
_SPOT_TAINTS = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority")

_HEAD_CPUS, _HEAD_BYTES, _HEAD_SHARED_BYTES = 4, 8 * GIB, 2 * GIB


def labels(options: RenderOptions) -> dict[str, str]:
    """Return the labels of all resources of one render. The network policy selects pods by these labels."""
    return {"app.kubernetes.io/part-of": "rayspec", "app.kubernetes.io/instance": options.name}


def image(options: RenderOptions, version: str) -> str:
    return options.image or f"rayspec:{version}-{'cpu' if options.cpus is not None else 'cuda'}"


def claim_name(options: RenderOptions) -> str:
    return options.models_claim or f"{options.name}-models"


def head_pod(options: RenderOptions, image_name: str) -> Manifest:
    """Return the head's pod. With `num-cpus: "0"` the head computes nothing. Its autoscaler needs the API's token."""
    container = _container(
        "ray-head",
        image_name,
        options,
        resources=_resources(cpus=_HEAD_CPUS, memory_bytes=_HEAD_BYTES),
        ports=PORTS | MONITORING_PORTS,
    )
    spec = _pod_spec(options, container, shared_bytes=_HEAD_SHARED_BYTES, needs_api=options.autoscales)
    if options.spot:
        spec["affinity"] = _node_affinity([[_expression(label, "NotIn", value) for label, value in _spot_labels()]])
    return {"metadata": {"labels": labels(options)}, "spec": spec}


def worker_pod(options: RenderOptions, shape: PodShape, image_name: str) -> Manifest:
    resources = _resources(cpus=shape.cpus, memory_bytes=shape.memory_bytes)
    if shape.num_gpus:
        for side in resources.values():
            side[options.gpu_resource] = str(shape.num_gpus)
    ports = {name: PORTS[name] for name in ("metrics", "serve")}
    container = _container("ray-worker", image_name, options, resources=resources, ports=ports)
    spec = _pod_spec(options, container, shared_bytes=shape.shared_bytes, needs_api=False)
    selector = options.node_selector or _product(shape)
    if selector:
        spec["nodeSelector"] = dict(selector)
    tolerations = [_tolerates(options.gpu_resource)] if shape.num_gpus else []
    if options.spot:
        tolerations += [_tolerates(taint) for taint in _SPOT_TAINTS]
        spec["affinity"] = _node_affinity([[_expression(label, "In", value)] for label, value in _spot_labels()])
    if tolerations:
        spec["tolerations"] = tolerations
    return {"metadata": {"labels": labels(options)}, "spec": spec}


def submitter_pod(options: RenderOptions, image_name: str) -> Manifest:
    """Return the pod that submits the entrypoint to the dashboard and follows its log. KubeRay adds the command."""
    container = {
        "name": "ray-job-submitter",
        "image": image_name,
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108 - in the pod
        "resources": _resources(cpus=1, memory_bytes=GIB),
        "securityContext": dict(UNPRIVILEGED),
        "volumeMounts": [dict(TMP_MOUNT)],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": dict(_POD_SECURITY),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    return {"metadata": {"labels": labels(options)}, "spec": spec}


def models_claim(options: RenderOptions, plan: ClusterPlan) -> Manifest:
    """Return a claim for the volume to which all pods write fetched models and measurements."""
    spec: Manifest = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": quantity(plan.claim_bytes)}},
    }
    if options.storage_class is not None:
        spec["storageClassName"] = options.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name(options), "labels": labels(options)},
        "spec": spec,
    }


def quantity(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / GIB)}Gi"


def _container(
    name: str, image_name: str, options: RenderOptions, *, resources: Manifest, ports: dict[str, int]
) -> Manifest:
    mounts = [dict(TMP_MOUNT), {"name": "home", "mountPath": _HOME}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    if options.uses_hub:
        mounts.append({"name": "models", "mountPath": MODELS_FOLDER})
    return {
        "name": name,
        "image": image_name,
        "env": _environment(options),
        "envFrom": [{"secretRef": {"name": options.bucket_secret, "optional": True}}],
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "resources": resources,
        "securityContext": dict(UNPRIVILEGED),
        "volumeMounts": mounts,
    }


def _environment(options: RenderOptions) -> list[Manifest]:
    values = {"HOME": _HOME, "RAY_USAGE_STATS_ENABLED": "0"}
    if options.uses_hub:  # caches of fetched models and of measurements
        values |= {"HF_HOME": f"{MODELS_FOLDER}/huggingface", "XDG_CACHE_HOME": f"{MODELS_FOLDER}/cache"}
    found: list[Manifest] = [{"name": name, "value": value} for name, value in values.items()]
    if options.uses_hub:
        found.append(_from_secret("HF_TOKEN", options.hf_secret, "token", optional=True))
    if options.kind == "service":
        found.append(_from_secret("RAYSPEC_API_KEYS", options.api_keys_secret, "keys", optional=False))
    return found


def _from_secret(name: str, secret: str, key: str, *, optional: bool) -> Manifest:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": optional}}}


def _pod_spec(options: RenderOptions, container: Manifest, *, shared_bytes: int, needs_api: bool) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": "50Gi"}},
        {"name": "home", "emptyDir": {"sizeLimit": "5Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(shared_bytes)}},
    ]
    if options.uses_hub:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim_name(options)}})
    return {
        "serviceAccountName": options.name,
        "automountServiceAccountToken": needs_api,
        "terminationGracePeriodSeconds": 90,
        "securityContext": dict(_POD_SECURITY),
        "initContainers": [_doctor(container)],
        "containers": [container],
        "volumes": volumes,
    }


def _doctor(container: Manifest) -> Manifest:
    """Return a container that checks the pod before Ray starts. It requests the container's resources, at no cost: a
    pod reserves the maximum of both."""
    same = {name: container[name] for name in ("image", "resources", "securityContext", "volumeMounts")}
    no_secrets = [variable for variable in container["env"] if "value" in variable]
    return {"name": "doctor", "command": ["rayspec", "doctor", "--quick"], "env": no_secrets, **same}


def _resources(*, cpus: int, memory_bytes: int) -> Manifest:
    """Return equal requests and limits, so that no other pod slows a stage down or is killed because of it."""
    amounts = {"cpu": str(cpus), "memory": quantity(memory_bytes)}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _product(shape: PodShape) -> dict[str, str]:
    product = _PRODUCTS.get(shape.gpu.label) if shape.gpu is not None else None
    return {"nvidia.com/gpu.product": product} if product is not None else {}


def _tolerates(taint: str) -> Manifest:
    return {"key": taint, "operator": "Exists", "effect": "NoSchedule"}


def _spot_labels() -> list[tuple[str, str]]:
    return sorted(_SPOT_LABELS.items())


def _expression(label: str, operator: str, value: str) -> Manifest:
    return {"key": label, "operator": operator, "values": [value]}


def _node_affinity(terms: list[list[Manifest]]) -> Manifest:
    """Return the affinity to nodes for which all expressions of at least one term hold."""
    selector = {"nodeSelectorTerms": [{"matchExpressions": expressions} for expressions in terms]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
