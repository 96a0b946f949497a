"""Records what a forward launches, in order, with all that a captured graph would keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayspec.bench.selfcheck.models import Prepared
from rayspec.choices import Choice
from rayspec.model.rows import RowSpan
from rayspec.model.static_rows import Filling

# They bring numbers from the device to the host, or from the host to the device: a graph would repeat old ones.
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
    """arguments: of tensors shape, strides, offset, type and place; of everything else its text."""

    name: str
    arguments: tuple[object, ...]


class LaunchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each operation under it that computes something. Views and allocations are left out.

    A custom operator counts once, whatever its implementation calls. Under inference mode composite operations are seen
    whole; use `torch.no_grad` to see what they consist of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self._own: list[torch.UntypedStorage] = []  # made while recording; held, so that no place is used twice
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
        """For those who count more."""

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
    """From token ids to logits. What fills static buffers comes before and is left out; the sines and cosines of the
    rows' positions are in it."""
    runner = prepared.runner
    batch = runner.batch(spans, token_ids=token_ids)
    rows = batch.buckets[0][1]
    static = prepared.buffers.hold(rows)[0] if prepared.buffers is not None and isinstance(rows, Filling) else None
    with recorder:
        if static is not None:
            prepared.parts.rotate(static.residual[:, :1], static)
        runner.head(runner.run(batch, runner.embed(batch), choices=choices))


def first_difference(some: Sequence[Launch], others: Sequence[Launch]) -> str | None:
    """Where two streams part, in words. None where they are equal."""
    for index, (one, other) in enumerate(zip_longest(some, others)):
        if one != other:
            return f"launch {index}: {_described(one, other)} against {_described(other, one)}"
    return None


def host_operations(launches: Sequence[Launch]) -> list[str]:
    return [launch.name for launch in launches if launch.name in HOST_OPERATIONS]


def num_kernels(launches: Sequence[Launch]) -> int:
    """On a GPU, at most: attention over long contexts is two kernels, every other launch one."""
    return len(launches) + sum(launch.name == "rayspec::attend" for launch in launches)


def _described(launch: Launch | None, other: Launch | None) -> str:
    """With the first argument that differs."""
    if launch is None:
        return "none"
    if other is None or launch.name != other.name:
        return launch.name
    pairs = zip_longest(launch.arguments, other.arguments)
    return f"{launch.name} with {next((mine for mine, its in pairs if mine != its), '')}"


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _computes(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """It writes to an argument, or makes something that is no view of one."""
    if func._schema.is_mutable:
        return True
    known = {_place(tensor) for tensor in given}
    return any(_place(tensor) not in known for tensor in made)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
