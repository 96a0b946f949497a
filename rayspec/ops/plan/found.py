"""The available GPUs: those of the Ray cluster if there is one, else those of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayspec.ops.plan.gpus import Gpu, gpu_called
from rayspec.ray_session import ray_session

_LOOK = "import json; from rayspec.ops.plan.found import gpus_of_this_machine as look; print(json.dumps(look()))"
_LOOK_TIMEOUT_S = 120.0

Seen = Sequence[tuple[str, int]]
"""Name and memory bytes of each GPU, from the driver."""


def found_gpus() -> tuple[tuple[Gpu, ...], ...]:
    """Return the GPUs of each node with GPUs. There is a cluster if RAY_ADDRESS is set or this process is connected.
    Raises ConfigError for an unknown GPU."""
    if "RAY_ADDRESS" not in os.environ and not ray.is_initialized():
        return _known([gpus_of_this_machine()])
    with ray_session():
        return _known(_gpus_of_cluster())


def gpus_of_this_machine() -> Seen:
    """Return the GPUs that this process may use."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(gpu.name, gpu.total_memory) for gpu in found]


def _gpus_of_cluster() -> list[Seen]:
    look = ray.remote(_gpus_of_node).options(num_cpus=0)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    num_gpus = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]}
    looked = {
        node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node, count in num_gpus.items()
        if count
    }
    return [ray.get(seen)[: num_gpus[node]] for node, seen in looked.items()]


def _gpus_of_node() -> Seen:
    """Return all GPUs, also those in use. A new process is needed: Ray hides GPUs from tasks that reserve none."""
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in hiding}
    command = [sys.executable, "-c", _LOOK]
    done = subprocess.run(  # noqa: S603 - this very Python
        command, env=environment, capture_output=True, text=True, check=True, timeout=_LOOK_TIMEOUT_S
    )
    return [(name, num_bytes) for name, num_bytes in json.loads(done.stdout.splitlines()[-1])]


def _known(seen: Sequence[Seen]) -> tuple[tuple[Gpu, ...], ...]:
    return tuple(tuple(gpu_called(name, num_bytes) for name, num_bytes in node) for node in seen if node)
