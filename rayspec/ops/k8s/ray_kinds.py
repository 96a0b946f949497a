"""RayCluster, RayJob and RayService in the form of KubeRay 1.7 (ray.io/v1)."""

from __future__ import annotations

from typing import Any

import yaml

from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.pods import (
    AGENT_PORT,
    JOBS_FOLDER,
    PORTS,
    TMP_MOUNT,
    UNPRIVILEGED,
    WORKER_PORTS,
    Manifest,
    head_pod,
    labels,
    submitter_pod,
    worker_pod,
)
from rayspec.ops.k8s.sizing import ClusterPlan, PodShape

_API = "ray.io/v1"
_SECONDS_TO_LOOK_AT = 600  # time to inspect an ended job before its cluster is deleted
_IDLE_S = 600
_START_PARAMS = {
    "dashboard-agent-listen-port": str(AGENT_PORT),
    "metrics-export-port": str(PORTS["metrics"]),
    "min-worker-port": str(WORKER_PORTS[0]),
    "max-worker-port": str(WORKER_PORTS[1]),
}


def ray_resource(options: RenderOptions, plan: ClusterPlan, *, image: str, ray_version: str) -> Manifest:
    """Return the resource of `options.kind`."""
    cluster = _cluster_spec(options, plan, image=image, ray_version=ray_version)
    if options.kind == "cluster":
        return _resource("RayCluster", options, cluster)
    if options.kind == "service":
        return _resource("RayService", options, _service_spec(options, plan, cluster))
    return _resource("RayJob", options, _job_spec(options, plan, cluster, image))


def _resource(kind: str, options: RenderOptions, spec: Manifest) -> Manifest:
    metadata = {"name": options.name, "labels": labels(options)}
    return {"apiVersion": _API, "kind": kind, "metadata": metadata, "spec": spec}


def _job_spec(options: RenderOptions, plan: ClusterPlan, cluster: Manifest, image: str) -> Manifest:
    """Return the spec of a job. Its submitter is a separate pod, so that it can be as unprivileged as the others."""
    values = {"model": options.model} | _engine_values(options, plan) | (_parallel_values(options, plan) or {})
    words = ["python", f"{JOBS_FOLDER}/summarize.py"]
    words += [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]
    if options.long != "fail":
        words += ["--long", options.long]
    words += ["--accept-failed-rows", "--output", str(options.output), *options.inputs]
    return {
        "entrypoint": " ".join(words),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _SECONDS_TO_LOOK_AT,
        "backoffLimit": options.retries,
        "rayClusterSpec": cluster,
        "submitterPodTemplate": submitter_pod(options, image),
    }


def _service_spec(options: RenderOptions, plan: ClusterPlan, cluster: Manifest) -> Manifest:
    return {
        "serveConfigV2": yaml.safe_dump(_serve_config(options, plan), sort_keys=False),
        "excludeHeadPodFromServeSvc": True,
        "upgradeStrategy": {"type": "NewCluster"},
        "rayClusterConfig": cluster,
    }


def _serve_config(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any]:
    application = {
        "name": "rayspec",
        "route_prefix": "/",
        "import_path": "rayspec.serve:build_openai_app",
        "args": {"llm_configs": [_llm_config(options, plan)]},
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORTS["serve"]},  # noqa: S104 - the network policy says who may
        "applications": [application],
    }


def _engine_values(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any]:
    """Return the options of EngineConfig, without model and parallel."""
    values: dict[str, Any] = {
        "device": "cpu" if options.cpus is not None else "cuda",
        "max_model_len": plan.placement.options.num_tokens,
        "max_num_seqs": plan.concurrency,
    }
    if options.dtype != "auto":
        values["dtype"] = options.dtype
    if options.cpus is not None:
        values["num_threads"] = options.cpus
    return values


def _parallel_values(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any] | None:
    """Return the options of ParallelOptions; None where the engine makes a single copy of the model, in one process.
    For a service, Serve makes the replicas, not the engine."""
    replicas = plan.num_copies if options.kind == "job" else 1
    if plan.num_shards == 1 and replicas == 1:
        return None
    values: dict[str, Any] = {"stages": plan.num_stages, "start_timeout_s": plan.start_timeout_s}
    if plan.num_ranks > 1:
        values["tensor"] = plan.num_ranks
    if replicas > 1:
        values["replicas"] = replicas
    if options.cpus is not None:
        values["cpus_per_shard"] = float(options.cpus)
    return values


def _llm_config(options: RenderOptions, plan: ClusterPlan) -> dict[str, Any]:
    """Return the options of the model for `rayspec.serve:build_openai_app`."""
    engine, parallel = _engine_values(options, plan), _parallel_values(options, plan)
    deployment: dict[str, Any] = {"num_replicas": plan.num_copies}
    if options.max_replicas is not None:
        scaling = {"min_replicas": plan.num_copies, "max_replicas": options.max_replicas}
        deployment = {"autoscaling_config": scaling | {"target_ongoing_requests": plan.concurrency}}
    if options.cpus is not None and parallel is None:
        deployment["ray_actor_options"] = {"num_cpus": options.cpus}
    return {
        "model_loading_config": {
            "model_id": options.served_model_name or options.model,
            "model_source": options.model,
        },
        "engine_kwargs": engine | ({"parallel": parallel} if parallel is not None else {}),
        "deployment_config": deployment,
    }


def _cluster_spec(options: RenderOptions, plan: ClusterPlan, *, image: str, ray_version: str) -> Manifest:
    spec: Manifest = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": options.autoscales,
    }
    if options.autoscales:
        spec["autoscalerOptions"] = _autoscaler()
    if options.redis_address is not None:
        password = {"secretKeyRef": {"name": options.redis_secret, "key": "password"}}
        spec["gcsFaultToleranceOptions"] = {
            "redisAddress": options.redis_address,
            "redisPassword": {"valueFrom": password},
        }
    spec["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_START_PARAMS},  # noqa: S104 - as above
        "template": head_pod(options, image),
    }
    spec["workerGroupSpecs"] = [_worker_group(options, plan, shape, image) for shape in plan.pods]
    return spec


def _autoscaler() -> Manifest:
    return {
        "version": "v2",
        "idleTimeoutSeconds": _IDLE_S,
        "resources": {side: {"cpu": "500m", "memory": "1Gi"} for side in ("requests", "limits")},
        "securityContext": dict(UNPRIVILEGED),
        "volumeMounts": [dict(TMP_MOUNT)],
    }


def _worker_group(options: RenderOptions, plan: ClusterPlan, shape: PodShape, image: str) -> Manifest:
    """Return a group of as many pods as the copies of the model need; for kind `cluster`, of none until demand."""
    fewest = 0 if options.kind == "cluster" else plan.num_copies * shape.num_pods
    group: Manifest = {
        "groupName": shape.group,
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": plan.max_copies * shape.num_pods,
        "rayStartParams": dict(_START_PARAMS),
    }
    if options.spot:
        group["labels"] = {"ray.io/market-type": "spot"}
    return group | {"template": worker_pod(options, shape, image)}
