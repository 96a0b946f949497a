"""Names of GPUs on the command line, and data of known GPUs. Imports neither torch nor ray."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayspec.errors import ConfigError
from rayspec.machine import import_path

_GB, _GIB = 10**9, 2**30
# The part of a GPU's memory that is kept for activations, workspaces, fragmentation, the CUDA context and NCCL.
RESERVED_SHARE, RESERVED_BYTES = 0.05, 2 * _GIB
DEFAULT_GPUS_PER_NODE = 8
MAX_GPUS = 4096
ANY_CPU = "CPU-4096G@50"  # a device on which everything fits, of which only the memory of the stages is needed
REACHED = 0.65  # share of peak arithmetic that large matrix products reach
_LEAST_WHOLE = 0.9  # share of its memory that torch sees of a whole GPU; 0.98 with error correction
# Operations per byte of memory bandwidth, for GPUs that are not listed. The listed GPUs have 150 to 420.
_OPERATIONS_PER_BYTE = 200.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. memory_gb: at least so many gigabytes (10**9 bytes). bandwidth_gb_s: of its memory. tflops: peak of
    dense 16-bit arithmetic; None: guessed from the bandwidth. link_gb_s: to other GPUs of its node, per direction.
    has_fp8: whether it multiplies in fp8; on others, transformers makes such weights plain."""

    name: str
    memory_gb: int
    bandwidth_gb_s: float
    tflops: float | None = None
    link_gb_s: float = 32.0  # PCIe 4.0 x16
    has_fp8: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}-{self.memory_gb}G"

    @property
    def usable_bytes(self) -> int:
        """Bytes that are available for weights and KV cache."""
        return int(self.memory_gb * _GB * (1 - RESERVED_SHARE)) - RESERVED_BYTES

    @property
    def flops(self) -> float:
        return (self.tflops or self.bandwidth_gb_s * _OPERATIONS_PER_BYTE / 1000) * 1e12


# As in the vendors' data sheets: NVIDIA A100 (SXM), H100 (SXM; PCIe), H200, HGX B200, L40S, L4, GeForce RTX 4090 and
# 3090, RTX A6000, A40, A30, A10, A10G, T4, GH200 (HBM3; HBM3e), AMD Instinct MI300X.
KNOWN_GPUS = (
    Gpu("A100", 40, 1555, 312, 300, has_fp8=False),
    Gpu("A100", 80, 2039, 312, 300, has_fp8=False),
    Gpu("H100", 80, 3350, 989, 450),
    Gpu("H100-PCIe", 80, 2000, 756),
    Gpu("H200", 141, 4800, 989, 450),
    Gpu("B200", 180, 8000, 2250, 900),
    Gpu("L40S", 48, 864, 362),
    Gpu("L4", 24, 300, 121),
    Gpu("RTX-4090", 24, 1008, 165),
    Gpu("RTX-3090", 24, 936, 71, has_fp8=False),
    Gpu("RTX-A6000", 48, 768, 155, has_fp8=False),
    Gpu("A40", 48, 696, 150, has_fp8=False),
    Gpu("A30", 24, 933, 165, has_fp8=False),
    Gpu("A10", 24, 600, 125, has_fp8=False),
    Gpu("A10G", 24, 600, 70, has_fp8=False),
    Gpu("T4", 16, 320, 65, 16, has_fp8=False),
    Gpu("GH200", 96, 4000, 989, 450),
    Gpu("GH200", 144, 4900, 989, 450),
    Gpu("MI300X", 192, 5300, 1307, 448),
)
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ASK = """
import json, torch
gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps({
    "names": [gpu.name for gpu in gpus], "num_bytes": [gpu.total_memory for gpu in gpus],
    "torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "has_nccl": nccl,
}))
"""
_PART = re.compile(
    r"(?:(?P<nodes>\d{1,9})\s*x\s*)?(?:(?P<count>\d{1,9})\s*x\s*)?"
    r"(?P<model>[^@]+?)(?:\s*@\s*(?P<bandwidth>\d{1,9}(?:\.\d{1,9})?))?",
    re.IGNORECASE,
)
_SIZED = re.compile(r"(?!\d+\s*x)(?P<name>.+)-(?P<memory_gb>[1-9]\d{0,6})GB?", re.IGNORECASE)


def parse_gpus(spec: str) -> tuple[Gpu, ...]:
    """Return every GPU in order, for instance of "4xH200-141G,4xA100-80G", "2x8xH100" (two nodes) or "8xNEW-96G@4000".
    Upper and lower case are equal. Raises ConfigError."""
    groups = _groups(spec)
    total = sum(math.prod(counts) for _, counts in groups)
    if total > MAX_GPUS:
        raise ConfigError(f"option 'gpus' is {spec!r}, which is {total} GPUs: name {MAX_GPUS} or fewer")
    return tuple(gpu for gpu, counts in groups for _ in range(math.prod(counts)))


def gpus_of_a_node(spec: str, *, unnamed: int = DEFAULT_GPUS_PER_NODE) -> int:
    """Return the GPUs of the smallest node, as 8 of "2x8xH100"; `unnamed` if there are no nodes in the text. Raises
    ConfigError."""
    return min((counts[1] for _, counts in _groups(spec) if len(counts) == 2), default=unnamed)


def ask_torch(*, hidden_too: bool = False) -> dict[str, Any]:
    """Return what torch says of the GPUs here (names, num_bytes) and of its build (torch, cuda, rocm, has_nccl), by a
    process of its own. hidden_too: include GPUs that the environment hides. Raises OSError,
    subprocess.SubprocessError and ValueError where there is no answer."""
    environment = {name: value for name, value in os.environ.items() if not (hidden_too and name in _HIDING)}
    done = subprocess.run(  # noqa: S603 - this very Python
        [sys.executable, "-c", _ASK],
        env=environment | {"PYTHONPATH": import_path()},
        cwd="/",  # see `import_path`
        capture_output=True,
        text=True,
        check=True,
        timeout=120.0,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def gpu_called(product: str, num_bytes: int) -> Gpu:
    """Return the known GPU for the product name of a driver, as "NVIDIA H100 80GB HBM3". Of several, the nearest memory
    size decides. A part of one, as of MIG, has its own memory size. Raises ConfigError."""
    words = set(re.split(r"[\s-]+", product.casefold()))
    called = [gpu for gpu in KNOWN_GPUS if set(gpu.name.casefold().split("-")) <= words]
    if not called:
        raise ConfigError(
            f"GPU {product!r} is not known, so no layout can be chosen for it: name one, as `rayspec plan --gpus "
            "8xNAME-80G@3350` recommends it"
        )
    most_words = max(len(gpu.name.split("-")) for gpu in called)
    alike = [gpu for gpu in called if len(gpu.name.split("-")) == most_words]
    nearest = min(alike, key=lambda gpu: abs(gpu.memory_gb * _GB - num_bytes))
    is_whole = num_bytes >= _LEAST_WHOLE * nearest.memory_gb * _GB
    return nearest if is_whole else replace(nearest, memory_gb=max(1, num_bytes // _GB))


def gpus_spec(gpus: Sequence[Gpu]) -> str:
    """Return the shortest text that `parse_gpus` reads as these GPUs."""
    runs = [(gpu, len(list(alike))) for gpu, alike in itertools.groupby(gpus)]
    return ",".join(
        f"{count}x{gpu.label}" + ("" if gpu in KNOWN_GPUS else f"@{gpu.bandwidth_gb_s}") for gpu, count in runs
    )


def are_ranks_alike(gpus: Sequence[Gpu], num_ranks: int) -> bool:
    """Return whether each stage, of `num_ranks` consecutive GPUs, has GPUs of one kind."""
    stages = (gpus[first : first + num_ranks] for first in range(0, len(gpus) - num_ranks + 1, num_ranks))
    return all(len(set(stage)) == 1 for stage in stages)


def _groups(spec: str) -> list[tuple[Gpu, list[int]]]:
    """Return the GPU of each part of the text, and its counts: none, how many, or nodes and GPUs of each."""
    groups = []
    known = {name.casefold(): gpu.label for gpu in KNOWN_GPUS for name in (gpu.name, gpu.label)}
    for part in map(str.strip, spec.split(",")):
        reason = f"{part!r} is no GPU that is known"
        gpus: list[Gpu] = []
        if (found := _PART.fullmatch(part)) is not None:
            counts = [int(count) for count in found.group("nodes", "count") if count is not None]
            model, bandwidth = found["model"], found["bandwidth"]
            sized = _SIZED.fullmatch(model)
            if bandwidth is None:
                name = f"{sized['name']}-{sized['memory_gb']}G" if sized is not None else model
                gpus = [gpu for gpu in KNOWN_GPUS if name.casefold() in (gpu.label.casefold(), gpu.name.casefold())]
            elif sized is not None and float(bandwidth) > 0:
                has_fp8 = all(gpu.has_fp8 for gpu in KNOWN_GPUS if gpu.name.casefold() == sized["name"].casefold())
                gpus = [Gpu(sized["name"], int(sized["memory_gb"]), float(bandwidth), has_fp8=has_fp8)]
            if len(gpus) == 1 and 0 not in counts:
                groups.append((gpus[0], counts))
                continue
            near = difflib.get_close_matches(model.casefold(), known, n=1)
            if 0 in counts:
                reason = f"{part!r} has a count of 0"
            elif gpus:
                reason = f"{part!r} is {' or '.join(gpu.label for gpu in gpus)}"
            elif near:
                reason += f", did you mean {known[near[0]]}?"
        names = ", ".join(gpu.label for gpu in KNOWN_GPUS)
        raise ConfigError(
            f"option 'gpus' is {spec!r}: {reason}; name one of {names} with a count "
            "before it, as 8xH100-80G or 2x8xH100-80G (two nodes), or others with memory and GB/s, as 8xNAME-80G@3350"
        )
    return groups
