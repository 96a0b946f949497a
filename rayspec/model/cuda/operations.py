"""The torch operators `rayspec::*`: shapes for tracing, plain torch on a CPU, Triton kernels on a GPU.

Importing this module registers them and does not need triton. `reference.py` says what each computes. Operators are
for inference: they have no gradients. Whether a device can run the kernels, it shows by running one: an installed
triton proves too little.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor

from rayspec.model.cuda import reference

P = ParamSpec("P")
_LIBRARY = torch.library.Library("rayspec", "DEF")  # type: ignore[no-untyped-call]


def _defined(
    run: Callable[P, Tensor], shape: Callable[..., Tensor], writes: tuple[str, ...] = ()
) -> Callable[P, Tensor]:
    """Register an operator with the name and the arguments of its reference. shape: returns an empty result. writes:
    arguments that it changes. The launches of its kernels need triton, so they are imported at the first call."""
    name: str = run.__name__

    def on_gpu(*arguments: Any) -> Tensor:
        launches = importlib.import_module("rayspec.model.cuda.launches")
        with torch.cuda.device(arguments[0].device):  # Triton launches on the current device
            return cast(Tensor, getattr(launches, name)(*arguments).run())

    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=writes))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, on_gpu, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"rayspec::{name}", shape, lib=_LIBRARY)
    return cast(Callable[P, Tensor], getattr(torch.ops.rayspec, name))


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(first.shape)


def _product(rows: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight))


def _rotated(packed: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, *others: Any) -> Tensor:
    return packed.new_empty(len(packed), others[1], keys.shape[-1])


def _gated(packed: Tensor, activation: str) -> Tensor:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(reference.ACTIVATIONS)}")
    return packed.new_empty(len(packed), packed.shape[1] // 2)


attend = _defined(reference.attend, _like_first)
rms_norm = _defined(reference.rms_norm, _like_first)
rotate_and_write = _defined(reference.rotate_and_write, _rotated, writes=("keys", "values"))
gated = _defined(reference.gated, _gated)
int8_product = _defined(reference.int8_product, _product)
int4_product = _defined(reference.int4_product, _product)


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
