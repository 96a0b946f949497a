"""Facts that a node of a cluster reports about itself."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import ray

from rayspec.config import EngineConfig
from rayspec.ops.doctor.findings import Finding
from rayspec.ops.doctor.gpus import Gpus, inspect_gpus
from rayspec.ops.doctor.machine import (
    check_memory,
    check_open_files,
    check_packages,
    check_ray_folder,
    check_shared_memory,
    installed_version,
)
from rayspec.ops.doctor.model_files import ModelFiles, look_at_model

_PACKAGES = ("rayspec", "ray", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node. versions: of Python and of packages that must be the same on all nodes. findings: checks of
    this node alone. model: None where no model is checked. fingerprint: of the model's weights, "" if unreadable."""

    address: str
    versions: Mapping[str, str]
    gpus: Gpus
    findings: tuple[Finding, ...]
    model: ModelFiles | None
    fingerprint: str


def describe_node(model: str | None) -> NodeFacts:
    """Collect the facts of the node that runs this function."""
    files = look_at_model(model) if model is not None else None
    return NodeFacts(
        address=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
        versions={"python": platform.python_version()} | {name: installed_version(name) or "-" for name in _PACKAGES},
        gpus=inspect_gpus(hidden_too=True),
        findings=(check_packages(), check_memory(), check_shared_memory(), check_ray_folder(), check_open_files()),
        model=files,
        fingerprint=_fingerprint(files) if files is not None else "",
    )


def _fingerprint(files: ModelFiles) -> str:
    if files.folder is None or files.errors:
        return ""
    from rayspec.model.fingerprint import weights_fingerprint  # noqa: PLC0415 - it brings torch and transformers

    return weights_fingerprint(EngineConfig(model=files.folder))
