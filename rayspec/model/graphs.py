"""Captured CUDA graphs in place of eager launches, for passes in static buffers.

A bucket is captured as a whole, for any plan: the rotary embedding, the embedding, and every sublayer that can be
captured. A plan then decides which of these launches are replayed; a new plan needs no new capture. There are two ways:

- *One graph per sublayer.* A plan is a list of graphs. This needs nothing but `torch.cuda.CUDAGraph`.
- *One graph per bucket.* Its launches are grouped by sublayer. A plan is the set of groups that are switched on. Before
  a replay, only groups whose state changes are switched.

A replay reads the current content of the buffers, so a pass is uploaded first. It writes only the buffers and the KV
cache. Its temporaries are in memory that all graphs share, and the next replay overwrites them. Sharing is safe because
passes of different buckets never overlap in time: a `StepBuffers` serves one pass at a time, on one stream, and its
graphs have a memory pool of their own.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rayspec.choices import FULL, SKIP, Choice
from rayspec.model.architecture import Decomposition
from rayspec.model.buckets import MAX_TREE_ROWS, Bucket
from rayspec.model.static_rows import Filling, StaticRows
from rayspec.model.static_step import StaticStep
from rayspec.model.sublayers import Sublayer, Tap

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], object]
Part: TypeAlias = str | int
"""Index of a sublayer, or the name of a part outside the sublayers."""

ROTARY: Part = "rotary embedding"
EMBEDDING: Part = "embedding"


class CapturedGraph(Protocol):
    """A captured CUDA graph whose launches are in groups. At first all groups are on."""

    def switch(self, group: int, is_on: bool) -> None:
        """Switch a group on or off, from the next replay on."""

    def replay(self) -> None:
        """Launch the groups that are on, in order."""


class GraphDriver(Protocol):
    """Captures graphs on a device. Graphs of one driver share memory for temporaries."""

    def rehearse(self, works: Sequence[Work]) -> None:
        """Run each work where captures run, so that kernels get compiled and libraries allocate their workspace."""

    def capture(self, groups: Sequence[Work]) -> CapturedGraph:
        """Record the launches of each group without running them.

        Raises an error, often a RuntimeError, for an operation that a graph cannot hold.
        """

    def release(self, graphs: Collection[CapturedGraph]) -> None:
        """Free graphs that will not be replayed any more."""

    def bytes_held(self) -> int:
        """Return the device memory that the driver's graphs take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """Limits of capture. max_rows: the largest number of rows in a captured bucket. max_buckets: the most captured
    buckets at a time. max_bytes: the most device memory of all graphs. Above the last two limits, the least recently
    used buckets are evicted."""

    max_rows: int = 512
    max_buckets: int = 48
    max_bytes: int = 2**30


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured graph, the part that each of its groups runs, and the parts that are on."""

    parts: tuple[Part, ...]
    captured: CapturedGraph
    on: set[Part]

    def replay(self, wanted: Collection[Part]) -> None:
        for group, part in enumerate(self.parts):
            if (part in wanted) != (part in self.on):
                self.captured.switch(group, part in wanted)
        self.on = set(wanted)
        self.captured.replay()


@dataclass(slots=True)
class _BucketGraphs:
    """The graphs of a bucket. rows: the buffers that the graphs read and write. of: the graph of each captured part."""

    rows: StaticRows
    of: dict[Part, _Graph] = field(default_factory=dict)

    @property
    def captured(self) -> list[CapturedGraph]:
        return list(dict.fromkeys(graph.captured for graph in self.of.values()))


class StepGraphs:
    """A `Step` that captures buckets and replays them. Parts without a graph run eagerly, within the same pass.

    A bucket is captured at its second pass, or by `warm_up`. Passes with a tap, buckets that are too large, and choices
    other than `full` run eagerly. A part whose capture has failed runs eagerly from then on. by_plan: capture one graph
    per bucket, not one per sublayer.
    """

    def __init__(
        self,
        step: StaticStep,
        driver: GraphDriver,
        *,
        by_plan: bool,
        limits: GraphLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = step
        self._driver = driver
        self._limits = limits or GraphLimits()
        self._clock = clock
        self._by_plan = by_plan
        self._stretches = _stretches(step.parts, by_plan)
        self._graphs: OrderedDict[Bucket, _BucketGraphs] = OrderedDict()
        self._num_passes: Counter[Bucket] = Counter()  # since the bucket was last evicted
        self._num_evictions: Counter[Bucket] = Counter()
        self._is_full = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Captured buckets, the least recently used first."""
        return tuple(self._graphs)

    @property
    def way(self) -> str:
        """Way of capture, as the engine's option names it: "plans" or "sublayers"."""
        return "plans" if self._by_plan else "sublayers"

    @property
    def num_graphs(self) -> int:
        return sum(len(graphs.captured) for graphs in self._graphs.values())

    def hold(self, filling: Filling) -> StaticRows:
        if not self._step.buffers.holds(filling) and self._is_due(filling.bucket):
            self._capture(filling.bucket)
        rows, is_new = self._step.buffers.hold(filling)
        if is_new:
            self._launch(ROTARY, rows)
        return rows

    def embed(self, rows: StaticRows) -> None:
        self._launch(EMBEDDING, rows)

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        graphs = self._graphs_of(rows) if tap is None else {}
        if not graphs:
            return self._step.run(span, rows, choices=choices, tap=tap)
        running = [sublayer for sublayer in span if choices is None or choices[sublayer.index] != SKIP]

        def graph_of(sublayer: Sublayer) -> _Graph | None:
            is_full = choices is None or choices[sublayer.index] == FULL
            return graphs.get(sublayer.index) if is_full else None

        for graph, sublayers in itertools.groupby(running, graph_of):
            if graph is None:
                self._step.run(list(sublayers), rows, choices=choices)
            else:
                graph.replay({sublayer.index for sublayer in sublayers})
        return rows.residual

    @torch.inference_mode()
    def warm_up(self, buckets: Iterable[Bucket]) -> None:
        """Capture the buckets, in this order, until the limits are reached. First evict all other buckets.

        Overwrites the buffers.
        """
        started = self._clock()
        wanted = [bucket for bucket in dict.fromkeys(buckets) if self._may_capture(bucket)][: self._limits.max_buckets]
        for bucket in set(self._graphs).difference(wanted):
            self._evict(bucket)
        for bucket in wanted:
            if self._is_too_much():
                break
            if bucket not in self._graphs:
                self._capture(bucket)
        logger.info(
            "captured %d graphs of %d buckets in %.1f s; they take %.0f MiB",
            self.num_graphs, len(self._graphs), self._clock() - started, self._driver.bytes_held() / 2**20,
        )  # fmt: skip

    def _launch(self, part: Part, rows: StaticRows) -> None:
        graph = self._graphs_of(rows).get(part)
        if graph is None:
            self._work(part, rows)()
        else:
            graph.replay({part})

    def _graphs_of(self, rows: StaticRows) -> Mapping[Part, _Graph]:
        """Return the graphs of the rows' bucket by part; none if they were captured with other buffers."""
        found = self._graphs.get(rows.bucket)
        if found is None or found.rows is not rows:
            return {}
        self._graphs.move_to_end(rows.bucket)
        return found.of

    def _may_capture(self, bucket: Bucket) -> bool:
        is_small = bucket.num_rows <= self._limits.max_rows and bucket.max_rows <= MAX_TREE_ROWS
        return is_small and not self._is_full

    def _is_due(self, bucket: Bucket) -> bool:
        """Count a pass that is about to run, and return whether to capture its bucket now. At first a bucket needs one
        earlier pass; each eviction doubles this number."""
        if bucket in self._graphs or not self._may_capture(bucket):
            return False
        self._num_passes[bucket] += 1
        return self._num_passes[bucket] > 1 << self._num_evictions[bucket]

    def _is_too_much(self) -> bool:
        return self._driver.bytes_held() > self._limits.max_bytes

    def _capture(self, bucket: Bucket) -> None:
        """Capture with a pass without sequences. All its rows are padding and write to the KV cache's spare slot."""
        self._make_room()
        if self._is_full:
            return
        rows, _ = self._step.buffers.hold(Filling(bucket, (), ()))
        residual = rows.residual.clone()  # The next pass may start with these hidden states.
        self._graphs[bucket] = _BucketGraphs(rows)
        try:
            for stretch in tuple(self._stretches):
                self._capture_stretch(stretch, rows)
        except torch.OutOfMemoryError as error:
            self._evict(bucket)
            self._stop(f"out of memory: {str(error).splitlines()[0]}")
        rows.residual.copy_(residual)

    def _capture_stretch(self, stretch: tuple[Part, ...], rows: StaticRows) -> None:
        """Capture a stretch, or each of its parts alone if that fails. A part that fails alone never gets a graph."""
        works = [self._work(part, rows) for part in stretch]
        try:
            self._driver.rehearse(works)
            graph = _Graph(stretch, self._driver.capture(works), set(stretch))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - Triton, CUDA and libraries raise errors of many types
            self._give_up(stretch, error)
            for part in stretch if len(stretch) > 1 else ():
                self._stretches.append((part,))
                self._capture_stretch((part,), rows)
            return
        self._graphs[rows.bucket].of.update(dict.fromkeys(stretch, graph))

    def _give_up(self, stretch: tuple[Part, ...], error: Exception) -> None:
        self._stretches.remove(stretch)
        remedy = "they are captured one by one" if len(stretch) > 1 else "it is launched eagerly from now on"
        reason = str(error).partition("\n")[0] or type(error).__name__
        logger.warning(
            "no CUDA graph of %s: %s; %s (cuda_kernels='off' avoids GPU kernels and graphs)",
            ", ".join(map(_name, stretch)), reason, remedy,
        )  # fmt: skip

    def _make_room(self) -> None:
        while self._graphs and (len(self._graphs) >= self._limits.max_buckets or self._is_too_much()):
            self._evict(next(iter(self._graphs)))
        if self._is_too_much():
            self._stop(f"those that were released have left {self._driver.bytes_held() / 2**20:.0f} MiB in use")

    def _evict(self, bucket: Bucket) -> None:
        self._driver.release(self._graphs.pop(bucket).captured)
        self._num_passes[bucket] = 0
        self._num_evictions[bucket] += 1

    def _stop(self, reason: str) -> None:
        self._is_full = True
        logger.warning("no more CUDA graphs are captured, %s", reason)

    def _work(self, part: Part, rows: StaticRows) -> Work:
        if isinstance(part, int):
            sublayers = self._step.parts.sublayers
            return partial(_in_place, sublayers[part - sublayers[0].index], rows)
        return partial(self._step.rotate if part == ROTARY else self._step.embed, rows)


def is_capturable(sublayer: Sublayer) -> bool:
    """Return whether the sublayer's launches depend on the bucket only. They do not if hooks fetch weights or sum over
    ranks, nor in a mixture of experts, where the number of rows per expert depends on the data."""
    blocks = [block for block in (sublayer.pre_norm, sublayer.block, sublayer.post_norm) if block is not None]
    return not sublayer.has_experts and not any(map(_has_hooks, blocks))


def _has_hooks(block: nn.Module) -> bool:
    return any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") for module in block.modules()
    )


def _stretches(parts: Decomposition, by_plan: bool) -> list[tuple[Part, ...]]:
    """Return the parts that each graph captures: with `by_plan`, all capturable neighbours in one graph, else each
    sublayer alone."""
    found: list[tuple[Part, ...]] = [(ROTARY,)] if parts.embedding is None else [(ROTARY,), (EMBEDDING,)]
    for can_capture, neighbours in itertools.groupby(parts.sublayers, is_capturable):
        indices = tuple(sublayer.index for sublayer in neighbours)
        if can_capture:
            found.extend([indices] if by_plan else [(index,) for index in indices])
    return found


def _in_place(sublayer: Sublayer, rows: StaticRows) -> None:
    """Run a sublayer on the residual's buffer. Raises RuntimeError if its result is a tensor outside the buffer."""
    left = sublayer(rows.residual, rows)
    if left.data_ptr() != rows.residual.data_ptr():
        raise RuntimeError("its result is not in the buffer")


def _name(part: Part) -> str:
    return part if isinstance(part, str) else f"sublayer {part}"
