"""A driver of graphs that stands in for a GPU's: it records operations, and runs them again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayspec.model.graphs import CapturedGraph, Work

# What makes the host wait for the device, which no capture allows.
_FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::unique_dim",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation with the very tensors that it reads and writes. fresh: what it has allocated."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]

    def run(self) -> None:
        made = self.operation(*self.arguments, **self.options)
        for each in tree_leaves(made):
            if hasattr(each, "wait"):  # the work of a collective
                each.wait()
        results = _tensors(made)
        for at, result in self.fresh:
            result.copy_(results[at])


class _Recorder(TorchDispatchMode):
    """Runs operations to learn what they return, and takes back what they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if operation.name().partition(".")[0] in _FORBIDDEN:
            raise RuntimeError(f"{operation.name()} is not permitted when a stream is capturing")
        self._before.extend((tensor, tensor.clone()) for tensor in _written(operation, arguments, options))
        result = operation(*arguments, **options)
        known = {_storage(tensor) for tensor in _tensors((arguments, options))}
        fresh = [(at, each) for at, each in enumerate(_tensors(result)) if _storage(each) not in known]
        self.launches.append(Launch(operation, arguments, options, tuple(fresh)))
        return result

    def take_back(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)


@dataclass(eq=False)
class RecordedGraph:
    """Its temporaries hold NaN when it is not running: another graph may have used their memory."""

    driver: RecordingDriver
    launches: list[Launch]
    num_replays: int = 0

    def __post_init__(self) -> None:
        self._spoil()

    def replay(self) -> None:
        assert self in self.driver.graphs, "a graph that was released is not replayed"
        self.num_replays += 1
        self.driver.num_replays += 1
        for launch in self.launches:
            launch.run()
        self._spoil()

    def _spoil(self) -> None:
        for launch in self.launches:
            for _, tensor in launch.fresh:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)


class RecordingDriver:
    """A `GraphDriver` for a CPU. refuses: which captures fail, by number. bytes_each: that a graph takes."""

    def __init__(self, *, refuses: Callable[[int], bool] = lambda number: False, bytes_each: int = 1) -> None:
        self._refuses = refuses
        self._bytes_each = bytes_each
        self.bytes_left = 0
        self.graphs: list[RecordedGraph] = []
        self.num_captures = self.num_replays = 0

    def rehearse(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> CapturedGraph:
        self.num_captures += 1
        if self._refuses(self.num_captures):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        recorder = _Recorder()
        try:
            with recorder:
                work()
        finally:
            recorder.take_back()
        self.graphs.append(RecordedGraph(self, recorder.launches))
        return self.graphs[-1]

    def release(self, graphs: Collection[CapturedGraph]) -> None:
        self.graphs = [graph for graph in self.graphs if graph not in graphs]

    def bytes_held(self) -> int:
        return self.bytes_left + self._bytes_each * len(self.graphs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    for at, argument in enumerate(operation._schema.arguments):
        value = arguments[at] if at < len(arguments) else options.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)
