"""Record the launches of a forward, in order, with everything that a captured graph would store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.device.models import Prepared
from rayspec.choices import Choice
from rayspec.model.rows import RowSpan
from rayspec.model.static_rows import BatchMetadata

# These copy numbers between device and host. A graph would repeat the numbers of its capture.
HOST_OPERATIONS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::item",
        "aten::lift_fresh",
        "aten::masked_select",
        "aten::nonzero",
    }
)
_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation. arguments: for tensors shape, strides, offset, type and storage; for other values their text."""

    name: str
    arguments: tuple[object, ...]


class LaunchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation that computes something. Views and allocations are left out.

    A custom operator counts once, whatever its implementation calls. Inference mode shows composite operations as a
    whole; `torch.no_grad` shows the operations that they consist of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self._own: list[torch.UntypedStorage] = []  # made while recording; kept, so that no address is reused
        self._own_places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        given, made = _tensors((args, kwargs)), _tensors(result)
        if name in HOST_OPERATIONS or (name not in _ALLOCATIONS and _computes(func, given, made)):
            arguments = tuple(self._argument(each) for each in tree_leaves((args, kwargs)))
            self.launches.append(Launch(name, arguments))
            self.note(name, given, made)
        known = {_place(tensor) for tensor in given}
        for tensor in made:
            if _place(tensor) not in known:
                self._own.append(tensor.untyped_storage())
                self._own_places.add(_place(tensor))
        return result

    def note(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Hook for subclasses that count more. given, made: tensor arguments and results of the launch."""

    def _argument(self, each: object) -> object:
        if not isinstance(each, Tensor):
            return str(each)
        place = "own" if _place(each) in self._own_places else _place(each)
        return (tuple(each.shape), each.stride(), each.storage_offset(), each.dtype, place)


@torch.no_grad()
def record_forward(
    prepared: Prepared,
    recorder: LaunchRecorder,
    spans: Sequence[RowSpan],
    token_ids: Sequence[int],
    choices: Sequence[Choice] | None = None,
) -> None:
    """Record a forward from token ids to logits. Filling static buffers comes before and is not recorded; computing the
    sines and cosines of the rows' positions is."""
    runner = prepared.runner
    batch = runner.batch(spans, token_ids=token_ids)
    rows = batch.buckets[0][1]
    static = None
    if prepared.buffers is not None and isinstance(rows, BatchMetadata):
        static, _ = prepared.buffers.hold(rows)
    with recorder:
        if static is not None:
            prepared.parts.rotate(static.residual[:, :1], static)
        runner.head(runner.run(batch, runner.embed(batch), choices=choices))


def first_difference(some: Sequence[Launch], others: Sequence[Launch]) -> str | None:
    """Describe the first difference of two sequences of launches; None if they are equal."""
    for index, (one, other) in enumerate(zip_longest(some, others)):
        if one != other:
            return f"launch {index}: {_described(one, other)} against {_described(other, one)}"
    return None


def host_operations(launches: Sequence[Launch]) -> list[str]:
    return [launch.name for launch in launches if launch.name in HOST_OPERATIONS]


def num_kernels(launches: Sequence[Launch]) -> int:
    """Return the maximum number of GPU kernels: attention over long contexts has two, every other launch one."""
    return len(launches) + sum(launch.name == "rayspec::attend" for launch in launches)


def _described(launch: Launch | None, other: Launch | None) -> str:
    """Describe `launch` with its first argument that differs from `other`."""
    if launch is None:
        return "none"
    if other is None or launch.name != other.name:
        return launch.name
    pairs = zip_longest(launch.arguments, other.arguments)
    return f"{launch.name} with {next((mine for mine, its in pairs if mine != its), '')}"


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _computes(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Return whether the operation writes to an argument, or makes a tensor that is no view of an argument."""
    if func._schema.is_mutable:
        return True
    known = {_place(tensor) for tensor in given}
    return any(_place(tensor) not in known for tensor in made)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
