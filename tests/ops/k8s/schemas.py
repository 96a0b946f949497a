"""What the API server and KubeRay's operator would say of a manifest; unknown fields, which they drop, are errors here.

KubeRay's resources by its own definitions (v1.7.0), where a checkout has them; core kinds by Kubernetes' schemas;
others, and the rules of the operator, by tests/data.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft7Validator

_KUBERNETES = "1.33"
_DATA = Path(__file__).parents[2] / "data"
_DEFINITIONS = Path(os.environ.get("KUBERAY_CRDS") or Path(__file__).parents[4] / "shared" / "data" / "kuberay-crds")
_CLUSTER_IN = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
_RAY_KINDS = ("RayCluster", *_CLUSTER_IN)

Manifest = dict[str, Any]


def has_ray_schemas() -> bool:
    return _DEFINITIONS.is_dir()


def problems(manifest: Manifest) -> list[str]:
    """Empty where the API server would take all of it."""
    if manifest["kind"] in _RAY_KINDS:
        return _errors(_ray_validator(manifest["kind"]), manifest)
    if manifest["apiVersion"].startswith("monitoring."):
        return _errors(_own_validator("monitoring", manifest["kind"]), manifest)
    try:
        kubernetes_validate.validate(manifest, _KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


def violations(manifest: Manifest) -> list[str]:
    """Of a RayCluster, RayJob or RayService: empty where the operator, and a restricted namespace, would take it."""
    found = _errors(_own_validator("operator", manifest["kind"]), manifest)
    for group in cluster_spec(manifest)["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append(f"replicas of {group['groupName']}")
    return found


def open_rules(policy: Manifest) -> list[str]:
    """Rules of a NetworkPolicy that name no peer, no port or no namespace: Kubernetes takes each as all of them."""
    rules = [
        (rule.get(peer), rule)
        for side, peer in (("ingress", "from"), ("egress", "to"))
        for rule in policy["spec"][side]
    ]
    return [
        str(rule)
        for peers, rule in rules
        if not peers or not rule.get("ports") or any(peer.get("namespaceSelector") == {} for peer in peers)
    ]


def cluster_spec(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]
    return spec[_CLUSTER_IN[manifest["kind"]]] if manifest["kind"] in _CLUSTER_IN else spec


def pod_templates(manifest: Manifest) -> list[Manifest]:
    cluster = cluster_spec(manifest)
    found = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*found, submitter] if submitter else found


def _errors(validator: Draft7Validator, manifest: Manifest) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@cache
def _own_validator(name: str, kind: str) -> Draft7Validator:
    schemas = yaml.safe_load((_DATA / f"{name}.schema.yaml").read_text(encoding="utf-8"))
    return Draft7Validator(schemas[kind] | {"definitions": schemas["definitions"]})


@cache
def _ray_validator(kind: str) -> Draft7Validator:
    path = next(_DEFINITIONS.glob(f"ray.io_{kind.lower()}s.*.yaml"))
    definition = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    versions = definition["spec"]["versions"]
    strict = _strict(next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"])
    metadata = _own_validator("monitoring", "PodMonitor").schema["definitions"]
    strict["properties"] |= {"metadata": metadata["metadata"], "apiVersion": {"const": "ray.io/v1"}}
    return Draft7Validator(strict | {"definitions": metadata})


def _strict(schema: Any) -> Any:
    """OpenAPI's as JSON Schema, with no room for fields that it does not name."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        key: {name: _strict(one) for name, one in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
    }
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict
