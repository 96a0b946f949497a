"""What is wrong with a launcher file: by Ray's schema and code, and by what the clouds say of their interfaces."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster"
NAMES = ("on-prem", "aws", "gcp", "azure")
CLOUDS = NAMES[1:]
LIBRARIES = {"aws": "botocore", "gcp": "googleapiclient"}

_AUTOSCALER = Path(ray.autoscaler.__file__).parent
_PROVIDERS = {"local": "local", "aws": "aws", "gcp": "gcp", "azure": "_azure"}
_ARM_TYPES = {"string": str, "int": int, "bool": bool, "object": dict}
_OF_RAY_ONLY = {"availability_zone"}  # taken out before the parameters go to Azure


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """With Ray's defaults. Raises what Ray raises."""
    complete: dict[str, Any] = prepare_config(config)
    validate_config(complete)
    return complete


def problems(config: dict[str, Any]) -> list[str]:
    """Empty where Ray, and the cloud, would take all of it."""
    try:
        prepared(config)
    except (jsonschema.ValidationError, ValueError, RuntimeError, TypeError) as error:
        return [str(error).splitlines()[0]]
    kind = config["provider"]["type"]
    return [*_unknown_provider_keys(config["provider"]), *_wrong_nodes(kind, config)]


def can_check_nodes(kind: str) -> bool:
    """Whether the library is here that describes the cloud's interface."""
    library = LIBRARIES.get(kind)
    return library is None or importlib.util.find_spec(library) is not None


def _unknown_provider_keys(provider: dict[str, Any]) -> Iterator[str]:
    """Ray's schema lets everything pass here; its providers ask for keys by name."""
    known = (_AUTOSCALER / "ray-schema.json").read_text(encoding="utf-8")
    for path in (_AUTOSCALER / "_private" / _PROVIDERS[provider["type"]]).glob("*.py"):
        known += path.read_text(encoding="utf-8")
    yield from (f"provider.{key} is not known" for key in provider if f'"{key}"' not in known)


def _wrong_nodes(kind: str, config: dict[str, Any]) -> Iterator[str]:
    check = {"aws": _wrong_instance, "gcp": _wrong_machine, "azure": _wrong_parameters}.get(kind)
    if check is None or not can_check_nodes(kind):
        return
    for name, node_type in config["available_node_types"].items():
        yield from (f"{name}: {problem}" for problem in check(node_type["node_config"]))


def _wrong_instance(node: dict[str, Any]) -> Iterator[str]:
    """By the service model of EC2 that botocore has."""
    session = importlib.import_module("botocore.session").Session()
    shape = session.get_service_model("ec2").operation_model("RunInstances").input_shape
    validator = importlib.import_module("botocore.validate").ParamValidator()
    report = validator.validate(node | {"MinCount": 1, "MaxCount": 1}, shape)
    if report.has_errors():
        yield report.generate_report()


def _wrong_machine(node: dict[str, Any]) -> Iterator[str]:
    """By the discovery document of Compute Engine that Google's client has."""
    package = Path(str(importlib.import_module("googleapiclient").__file__)).parent
    document = (package / "discovery_cache" / "documents" / "compute.v1.json").read_text(encoding="utf-8")
    schemas = json.loads(document)["schemas"]
    yield from _by_discovery(node, schemas["Instance"], schemas, "node_config")


def _by_discovery(value: Any, schema: dict[str, Any], schemas: dict[str, Any], place: str) -> Iterator[str]:
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    kind = int if schema.get("format") == "int64" else kinds[schema["type"]]
    if not isinstance(value, kind):
        yield f"{place} is no {schema['type']}"
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in schema["properties"]:
                yield from _by_discovery(one, schema["properties"][key], schemas, f"{place}.{key}")
            else:
                yield f"{place}.{key} is not known"
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _by_discovery(one, schema["items"], schemas, f"{place}[{number}]")
    elif value not in schema.get("enum", [value]):
        yield f"{place} is {value!r}, not one of {schema['enum']}"


def _wrong_parameters(node: dict[str, Any]) -> Iterator[str]:
    """By the template that Ray fills in for Azure."""
    template = json.loads((_AUTOSCALER / "_private" / "_azure" / "azure-vm-template.json").read_text(encoding="utf-8"))
    yield from (f"{key} is not known" for key in node.keys() - {"azure_arm_parameters", "tags"})
    for key, value in node["azure_arm_parameters"].items():
        if key in _OF_RAY_ONLY:
            continue
        if key not in template["parameters"]:
            yield f"azure_arm_parameters.{key} is not known"
        elif type(value) is not _ARM_TYPES[template["parameters"][key]["type"]]:
            yield f"azure_arm_parameters.{key} is {value!r}"
