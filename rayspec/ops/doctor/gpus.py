"""The GPUs of a machine, as the driver and as torch see them. Each is queried in a separate process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayspec.ops.doctor.findings import Finding, ok, problem, skipped, warning

_NAME = "GPUs"
_TIMEOUT_S = 60.0
_QUERY = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
_TORCH = """
import json, torch
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps([torch.cuda.device_count(), torch.__version__, torch.version.cuda, nccl]))
"""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs of a machine. names, driver: from nvidia-smi. num_usable, torch, cuda, has_nccl: from torch; `cuda` is None
    in CPU builds. error: why the query of nvidia-smi or torch failed."""

    names: tuple[str, ...] = ()
    driver: str = ""
    num_usable: int = 0
    torch: str = ""
    cuda: str | None = None
    has_nccl: bool = False
    error: str = ""


def inspect_gpus(*, hidden_too: bool = False) -> Gpus:
    """Query the driver and, where there is a GPU, torch. hidden_too: include GPUs that CUDA_VISIBLE_DEVICES hides; Ray
    sets that variable in tasks that reserve no GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Gpus()
    environment = {name: value for name, value in os.environ.items() if not (hidden_too and name == _VISIBLE)}
    try:
        rows = [line.split(", ") for line in _run([smi, *_QUERY], environment).splitlines() if line.strip()]
        if not rows:
            return Gpus()
        seen = Gpus(names=tuple(row[0] for row in rows), driver=rows[0][1])
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return Gpus(error=f"nvidia-smi: {_reason(error)}")
    try:
        count, version, cuda, nccl = json.loads(_run([sys.executable, "-c", _TORCH], environment).splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Gpus(names=seen.names, driver=seen.driver, error=f"torch: {_reason(error)}")
    return Gpus(names=seen.names, driver=seen.driver, num_usable=count, torch=version, cuda=cuda, has_nccl=nccl)


def check_gpus(gpus: Gpus) -> Finding:
    """Check that torch can use all GPUs of the driver."""
    if not gpus.names and not gpus.error:
        return skipped(_NAME, "no GPU")
    found = f"{len(gpus.names)} x {'/'.join(dict.fromkeys(gpus.names))}, driver {gpus.driver}" if gpus.names else ""
    if gpus.error or gpus.cuda is None or gpus.num_usable == 0:
        return _unusable(gpus, found)
    found += f", torch {gpus.torch} for CUDA {gpus.cuda}"
    if gpus.num_usable < len(gpus.names):
        return warning(_NAME, f"{found}, which sees {gpus.num_usable} of them", f"unset {_VISIBLE}, unless it is meant")
    return ok(_NAME, found)


def _unusable(gpus: Gpus, found: str) -> Finding:
    if not gpus.names:
        return problem(_NAME, gpus.error, "reinstall the NVIDIA driver; in a container, its toolkit and --gpus all")
    if gpus.error:
        return problem(_NAME, f"{found}; {gpus.error}", "reinstall torch")
    if gpus.cuda is None:
        return problem(_NAME, f"{found}; torch {gpus.torch} is a build for the CPU", "install torch's build for CUDA")
    remedy = f"update the driver to one for CUDA {gpus.cuda}, or install torch for an older CUDA; unset {_VISIBLE}"
    return problem(_NAME, f"{found}; torch {gpus.torch} for CUDA {gpus.cuda} can use none of them", remedy)


def check_nccl(gpus: Gpus) -> Finding:
    """Check that torch includes NCCL."""
    if not gpus.names:
        return skipped("NCCL", "no GPU")
    if gpus.has_nccl:
        return ok("NCCL", "in torch")
    return problem("NCCL", f"torch {gpus.torch} has none", "install torch's build for CUDA: shards on GPUs need NCCL")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(  # noqa: S603 - nvidia-smi as found on PATH, and this very Python
        command, env=dict(environment), capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    )
    return done.stdout


def _reason(error: Exception) -> str:
    """Return the last line of the process's errors, or of the exception."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next((line for line in reversed(str(said).splitlines()) if line.strip()), type(error).__name__)
