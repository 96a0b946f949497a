"""The torch operators `rayspec::*`: shapes for tracing, plain torch on a CPU, Triton kernels on a GPU.

Importing this module registers them and does not need triton. `reference.py` says what each computes. Operators are
for inference: they have no gradients. `probe.py` tries the kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from rayspec.errors import remedy_for
from rayspec.model.cuda import reference

P = ParamSpec("P")
R = TypeVar("R", Tensor, None)
_LIBRARY = torch.library.Library("rayspec", "DEF")  # type: ignore[no-untyped-call]


def _defined(run: Callable[P, R], shape: Callable[..., R], writes: tuple[str, ...] = ()) -> Callable[P, R]:
    """Register an operator with the name and the arguments of its reference. shape: returns an empty result. writes:
    arguments that it changes. The launches of its kernels need triton, so they are imported at the first call."""
    name: str = run.__name__

    def on_gpu(*arguments: Any) -> R:
        launches = importlib.import_module("rayspec.model.cuda.launches")
        with torch.cuda.device(arguments[0].device):  # Triton launches on the current device
            return cast(R, getattr(launches, name)(*arguments).run())

    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=writes))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, on_gpu, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"rayspec::{name}", shape, lib=_LIBRARY)
    return cast(Callable[P, R], getattr(torch.ops.rayspec, name))


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return first.new_empty(first.shape)


def _nothing(*_: Any) -> None:
    """Return what an operator returns that writes to its arguments."""


def _rotated(packed: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, *others: Any) -> Tensor:
    return packed.new_empty(len(packed), others[1], keys.shape[-1])


def _noise(keys: Tensor, vocab_size: int) -> Tensor:
    return keys.new_empty(keys.shape[1], vocab_size, dtype=torch.float32)


def _gated(packed: Tensor, activation: str) -> Tensor:
    return packed.new_empty(len(packed), packed.shape[1] // 2)


attend = _defined(reference.attend, _like_first)
rms_norm = _defined(reference.rms_norm, _like_first)
rotate_and_write = _defined(reference.rotate_and_write, _rotated, writes=("keys", "values"))
gated = _defined(reference.gated, _gated)
product = _defined(reference.product, _nothing, writes=("output",))
gumbel = _defined(reference.gumbel, _noise)
cut_to_top_p = _defined(reference.cut_to_top_p, _nothing, writes=("scores",))


_LEAST_CAPABILITY = (8, 0)  # tiles of the attention kernels do not fit into the shared memory of older GPUs


def has_operators(device: torch.device) -> bool:
    """Return whether the device should run the operators `rayspec::*` with Triton kernels. Runs none: `probe` does."""
    return device.type == "cuda" and obstacle(device) is None


def obstacle(device: torch.device) -> str | None:
    """Return what a GPU obviously lacks to run the kernels."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed ({remedy_for('triton')})"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, own = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"they need compute capability {least}, this GPU has {own}"
    return None
