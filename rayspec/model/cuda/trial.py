"""Whether a device can run the Triton kernels. It runs one to find out: an installed triton proves too little."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch

from rayspec.model.cuda import reference
from rayspec.model.cuda.operations import rms_norm

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)  # tiles of the attention kernels do not fit into the shared memory of older GPUs


def has_operators(device: torch.device) -> bool:
    """Return whether the device runs the operators `rayspec::*` with Triton kernels.

    The first call for a CUDA device runs a kernel. If the device cannot run it, plain PyTorch runs in its place, and
    one warning gives the reason.
    """
    return device.type == "cuda" and _works(device)


@cache
def _works(device: torch.device) -> bool:
    reason = _obstacle(device)
    if reason is not None:
        logger.warning(
            "%s runs without the GPU kernels: %s. Plain PyTorch runs in their place and is slower. "
            "Option cuda_kernels='off' chooses it without this trial.",
            device, reason,
        )  # fmt: skip
    return reason is None


def _obstacle(device: torch.device) -> str | None:
    """Return why the device cannot run the kernels, None if it can. Raises torch.OutOfMemoryError."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install rayspec[cuda])"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, own = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"they need compute capability {least}, this GPU has {own}"
    rows, weight = torch.linspace(-1, 1, 256).view(4, 64), torch.linspace(0.5, 1.5, 64)
    try:
        found = rms_norm(rows.to(device), weight.to(device), 1e-6, 0.0).cpu()
    except torch.OutOfMemoryError:
        raise
    # Triton raises errors of many types: no compiler, no headers, no driver, a compilation that fails.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    is_right = torch.allclose(found, reference.rms_norm(rows, weight, 1e-6, 0.0), rtol=1e-4)
    return None if is_right else "the result of a first kernel is wrong"
