"""What KubeRay 1.7's operator refuses though its schema allows it (controllers/ray/utils/validation.go), and what a
namespace with Pod Security "restricted" would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

_MAX_NAME = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCES_IN_START = {"num-cpus", "num-gpus", "memory", "resources"}
_REDIS_VARIABLES = {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}


def violations(manifest: dict[str, Any]) -> list[str]:
    """Of a RayCluster, RayJob or RayService."""
    kind, spec = manifest["kind"], manifest["spec"]
    found = list(_name(manifest))
    cluster = cluster_spec(manifest)
    found += _cluster(cluster)
    found += [problem for template in pod_templates(manifest) for problem in _restricted(template["spec"])]
    if kind == "RayJob":
        found += _job(spec)
    if kind == "RayService" and cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        found.append("a service's headService has a name")
    if kind != "RayCluster" and cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        found.append("K8s token auth is of a RayCluster only")
    if kind != "RayCluster" and "upgradeStrategy" in cluster:
        found.append("upgradeStrategy of a cluster inside another resource")
    return found


def open_rules(policy: dict[str, Any]) -> list[str]:
    """Rules of a NetworkPolicy that name no peer, no port or no namespace: Kubernetes takes each as all of them."""
    sides = (("ingress", "from"), ("egress", "to"))
    rules = [(side, peer, rule) for side, peer in sides for rule in policy["spec"].get(side, [])]
    return [f"{side} rule {rule}" for side, peer, rule in rules if _is_open(rule.get(peer), rule.get("ports"))]


def _is_open(peers: list[dict[str, Any]] | None, ports: list[Any] | None) -> bool:
    return not peers or not ports or any(peer.get("namespaceSelector") == {} for peer in peers)


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    inside = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
    spec: dict[str, Any] = manifest["spec"]
    return spec[inside[manifest["kind"]]] if manifest["kind"] in inside else spec


def pod_templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_spec(manifest)
    found = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*found, submitter] if submitter else found


def _name(manifest: dict[str, Any]) -> Iterator[str]:
    name = manifest["metadata"]["name"]
    if not _DNS_1035.fullmatch(name) or len(name) > _MAX_NAME[manifest["kind"]]:
        yield f"name {name!r} is no DNS-1035 label of {_MAX_NAME[manifest['kind']]} characters"


def _cluster(spec: dict[str, Any]) -> Iterator[str]:
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        start = group.get("rayStartParams") or {}
        if not group["template"]["spec"].get("containers"):
            yield "a group without containers"
        if group.get("resources") and _RESOURCES_IN_START & start.keys():
            yield "resources both in the group and in rayStartParams"
        if "labels" in start:
            yield "rayStartParams.labels"
        if not all(isinstance(value, str) for value in start.values()):
            yield "rayStartParams are strings"
    for group in spec["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] or group["maxReplicas"] < 1:
            yield f"replicas of {group['groupName']}"
    yield from _autoscaler(spec, groups)
    yield from _state(spec)
    if spec.get("authOptions", {}).get("mode") == "token" and Version(spec["rayVersion"]) < Version("2.52"):
        yield "token auth needs Ray 2.52"


def _autoscaler(spec: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[str]:
    variables = _variables(spec["headGroupSpec"])
    if spec.get("enableInTreeAutoscaling"):
        policies = {group["template"]["spec"].get("restartPolicy", "Never") for group in groups}
        if spec.get("autoscalerOptions", {}).get("version", "v2") == "v2" and policies != {"Never"}:
            yield "autoscaler v2 needs restartPolicy Never or unset"
        if "RAY_enable_autoscaler_v2" in variables:
            yield "autoscaler's version in the environment"
        if not spec["headGroupSpec"]["template"]["spec"].get("automountServiceAccountToken", True):
            yield "the autoscaler has no token"
    elif "autoscalerOptions" in spec:
        yield "autoscalerOptions without autoscaler"


def _state(spec: dict[str, Any]) -> Iterator[str]:
    variables = _variables(spec["headGroupSpec"])
    if _REDIS_VARIABLES & variables:
        yield "Redis in the environment, not in gcsFaultToleranceOptions"
    options = spec.get("gcsFaultToleranceOptions")
    if options is not None and options.get("backend", "redis") == "redis" and "storage" in options:
        yield "storage is of the backend rocksdb"
    if options is not None and "redis-password" in spec["headGroupSpec"].get("rayStartParams", {}):
        yield "redis-password in rayStartParams"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode == "SidecarMode" and {"clusterSelector", "submitterPodTemplate", "submitterConfig"} & spec.keys():
        yield "SidecarMode has no submitter of its own"
    if spec.get("backoffLimit", 0) > 0 and ("clusterSelector" in spec or mode == "InteractiveMode"):
        yield "backoffLimit excludes clusterSelector and InteractiveMode"
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
    if "deletionStrategy" in spec and spec.get("shutdownAfterJobFinishes"):
        yield "deletionStrategy excludes shutdownAfterJobFinishes"
    if "gcsFaultToleranceOptions" in spec["rayClusterSpec"]:
        yield "GCS fault tolerance does nothing for a job (kuberay#4025)"


def _variables(group: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in group["template"]["spec"]["containers"][0].get("env", [])}


def _restricted(pod: dict[str, Any]) -> Iterator[str]:
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("runAsUser") == 0:
        yield "a pod may run as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "a pod without seccomp profile"
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"container {container['name']} may gain privileges"
        if not own.get("readOnlyRootFilesystem"):
            yield f"container {container['name']} may write its root"
        if not container.get("resources", {}).get("limits"):
            yield f"container {container['name']} has no limits"
    if any("hostPath" in volume for volume in pod.get("volumes", [])):
        yield "a pod mounts the host"
