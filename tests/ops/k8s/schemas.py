"""What the API server would say of a manifest, and what it would silently drop: unknown fields are errors here.

KubeRay's resources by its own definitions (v1.7.0), where a checkout has them; core kinds by Kubernetes' schemas.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft7Validator

_KUBERNETES = "1.33"
_DEFINITIONS = Path(os.environ.get("KUBERAY_CRDS") or Path(__file__).parents[4] / "shared" / "data" / "kuberay-crds")
_RAY_KINDS = ("RayCluster", "RayJob", "RayService")
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _LABELS,
        "annotations": _LABELS,
    },
    "required": ["name"],
    "additionalProperties": False,
}
# Of monitoring.coreos.com_podmonitors.yaml (prometheus-operator 0.91), the fields that are used here.
_RELABELING = {
    "type": "object",
    "properties": {"sourceLabels": {"type": "array", "items": {"type": "string"}}, "targetLabel": {"type": "string"}},
    "additionalProperties": False,
}
_ENDPOINT = {
    "type": "object",
    "properties": {"port": {"type": "string"}, "relabelings": {"type": "array", "items": _RELABELING}},
    "additionalProperties": False,
}
_POD_MONITOR = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {},
        "metadata": _METADATA,
        "spec": {
            "type": "object",
            "properties": {
                "jobLabel": {"type": "string"},
                "selector": {
                    "type": "object",
                    "properties": {"matchLabels": _LABELS},
                    "additionalProperties": False,
                },
                "podMetricsEndpoints": {"type": "array", "items": _ENDPOINT},
            },
            "required": ["selector", "podMetricsEndpoints"],
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def has_ray_schemas() -> bool:
    return _DEFINITIONS.is_dir()


def problems(manifest: dict[str, Any]) -> list[str]:
    """Empty where the API server would take all of it."""
    if manifest["kind"] in _RAY_KINDS:
        return _errors(_ray_validator(manifest["kind"]), manifest)
    if manifest["kind"] == "PodMonitor":
        return _errors(Draft7Validator(_POD_MONITOR), manifest)
    try:
        kubernetes_validate.validate(manifest, _KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


def _errors(validator: Draft7Validator, manifest: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@cache
def _ray_validator(kind: str) -> Draft7Validator:
    path = next(_DEFINITIONS.glob(f"ray.io_{kind.lower()}s.*.yaml"))
    definition = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    versions = definition["spec"]["versions"]
    schema = next(version for version in versions if version["name"] == "v1")["schema"]["openAPIV3Schema"]
    strict = _strict(schema)
    strict["properties"] |= {"metadata": _METADATA, "apiVersion": {"const": "ray.io/v1"}}
    return Draft7Validator(strict)


def _strict(schema: Any) -> Any:
    """OpenAPI's as JSON Schema, with no room for fields that it does not name."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        key: _strict_properties(value) if key == "properties" else _strict(value) for key, value in schema.items()
    }
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def _strict_properties(properties: dict[str, Any]) -> dict[str, Any]:
    return {name: _strict(schema) for name, schema in properties.items()}
