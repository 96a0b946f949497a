"""A small part of kustomize, for tests where there is none: resources, components, namespace, images and
configMapGenerator. What it does not know it refuses. `kubectl kustomize` has the last word where it is installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

_KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "images", "configMapGenerator"}
_GENERATOR = {"name", "files", "options"}
_GENERATOR_OPTIONS = {"disableNameSuffixHash", "labels"}
_CLUSTER_WIDE = {"Namespace"}


def build(folder: Path) -> list[dict[str, Any]]:
    """The resources of a kustomization. Raises ValueError for what is not known."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    _check(content, _KNOWN, folder)
    if content["kind"] not in {"Kustomization", "Component"}:
        raise ValueError(f"{folder}: kind {content['kind']!r}")
    resources = [one for name in content.get("resources", []) for one in _resource(folder, name)]
    resources += [_config_map(folder, generator) for generator in content.get("configMapGenerator", [])]
    for name in content.get("components", []):
        resources += build((folder / name).resolve(strict=True))
    for image in content.get("images", []):
        _check(image, {"name", "newName", "newTag"}, folder)
        resources = [_with_image(resource, image) for resource in resources]
    return [_in_namespace(resource, content.get("namespace")) for resource in resources]


def _check(mapping: dict[str, Any], known: set[str], where: Path) -> None:
    unknown = mapping.keys() - known
    if unknown:
        raise ValueError(f"{where}: {sorted(unknown)} is not known here")


def _resource(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    if path.is_dir():
        return build(path.resolve())
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]


def _config_map(folder: Path, generator: dict[str, Any]) -> dict[str, Any]:
    _check(generator, _GENERATOR, folder)
    options = generator.get("options", {})
    _check(options, _GENERATOR_OPTIONS, folder)
    if not options.get("disableNameSuffixHash"):
        raise ValueError(f"{folder}: names with a hash are not made here")
    files = [(folder / name).resolve(strict=True) for name in generator["files"]]
    if any(folder.resolve() not in file.parents for file in files):
        raise ValueError(f"{folder}: kustomize reads no file outside")
    metadata = {"name": generator["name"], "labels": options.get("labels", {})}
    data = {file.name: file.read_text(encoding="utf-8") for file in files}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _with_image(resource: Any, image: dict[str, str]) -> Any:
    if isinstance(resource, list):
        return [_with_image(one, image) for one in resource]
    if not isinstance(resource, dict):
        return resource
    changed = {name: _with_image(value, image) for name, value in resource.items()}
    for name in ("containers", "initContainers"):
        for container in changed.get(name) or ():
            repository, _, tag = str(container["image"]).partition(":")
            if repository == image["name"]:
                container["image"] = f"{image.get('newName', repository)}:{image.get('newTag', tag)}"
    return changed


def _in_namespace(resource: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    if namespace is None or resource["kind"] in _CLUSTER_WIDE:
        return resource
    changed = copy.deepcopy(resource)
    changed["metadata"]["namespace"] = namespace
    return changed
