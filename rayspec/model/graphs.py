"""Captured CUDA graphs in place of eager launches, for passes in static buffers.

A bucket has a graph for the rotary embedding, one for the embedding, and one for every sublayer that can be captured. A
plan is the list of graphs that are replayed. A replay writes only the buffers, the KV cache, and temporaries, whose
memory all graphs share: passes never overlap in time, because a `StepBuffers` serves one pass at a time on one stream.
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
from torch import Tensor

from rayspec.choices import FULL, SKIP, Choice
from rayspec.model.buckets import MAX_TREE_ROWS, Bucket
from rayspec.model.static_rows import BatchMetadata, StaticRows
from rayspec.model.static_step import StaticStep
from rayspec.model.sublayers import Sublayer, Tap

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], object]
Part: TypeAlias = str | int
"""Index of a sublayer, or the name of a part outside the sublayers."""

ROTARY: Part = "rotary embedding"
EMBEDDING: Part = "embedding"


class CapturedGraph(Protocol):
    def replay(self) -> None:
        """Launch what was captured."""


class GraphDriver(Protocol):
    """Captures graphs on a device. Graphs of one driver share memory for temporaries."""

    def rehearse(self, work: Work) -> None:
        """Run the work where captures run, so that kernels get compiled and libraries allocate their workspace."""

    def capture(self, work: Work) -> CapturedGraph:
        """Record the launches without running them. Raises an error of any type for an operation that a graph cannot
        hold."""

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


@dataclass(slots=True)
class _BucketGraphs:
    """The graphs of a bucket. rows: the buffers that the graphs read and write. of: the graph of each captured part."""

    rows: StaticRows
    of: dict[Part, CapturedGraph] = field(default_factory=dict)


class StepGraphs:
    """A `StaticStep` that captures buckets and replays them. Parts without a graph run eagerly, within the same pass.

    A bucket is captured at its second pass, or by `warm_up`. Passes with a tap, buckets that are too large, and choices
    other than `full` run eagerly. A part whose capture has failed runs eagerly from then on.
    """

    def __init__(
        self,
        step: StaticStep,
        driver: GraphDriver,
        *,
        limits: GraphLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step = step
        self._driver = driver
        self._limits = limits or GraphLimits()
        self._clock = clock
        self._capturable: list[Part] = [ROTARY] if step.parts.embedding is None else [ROTARY, EMBEDDING]
        self._capturable += [sublayer.index for sublayer in step.parts.sublayers if is_capturable(sublayer)]
        self._graphs: OrderedDict[Bucket, _BucketGraphs] = OrderedDict()
        self._num_passes: Counter[Bucket] = Counter()  # since the bucket was last evicted
        self._num_evictions: Counter[Bucket] = Counter()
        self._is_full = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Captured buckets, the least recently used first."""
        return tuple(self._graphs)

    @property
    def num_graphs(self) -> int:
        return sum(len(graphs.of) for graphs in self._graphs.values())

    def hold(self, metadata: BatchMetadata) -> StaticRows:
        if not self._step.buffers.holds(metadata) and self._is_due(metadata.bucket):
            self._capture(metadata.bucket)
        rows, is_new = self._step.buffers.hold(metadata)
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
        for sublayer in span:
            choice = FULL if choices is None else choices[sublayer.index]
            graph = graphs.get(sublayer.index) if choice == FULL else None
            if graph is not None:
                graph.replay()
            elif choice != SKIP:
                self._step.run([sublayer], rows, choices=choices)
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
            graph.replay()

    def _graphs_of(self, rows: StaticRows) -> Mapping[Part, CapturedGraph]:
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
        """Capture with a pass without sequences. All its rows are padding and write to the KV cache's spare slot. A
        part that fails never gets a graph."""
        while self._graphs and (len(self._graphs) >= self._limits.max_buckets or self._is_too_much()):
            self._evict(next(iter(self._graphs)))
        if self._is_too_much():
            self._stop(f"those that were released have left {self._driver.bytes_held() / 2**20:.0f} MiB in use")
            return
        rows, _ = self._step.buffers.hold(BatchMetadata(bucket, (), ()))
        residual = rows.residual.clone()  # The next pass may start with these hidden states.
        graphs = self._graphs[bucket] = _BucketGraphs(rows)
        for part in tuple(self._capturable):
            work = self._work(part, rows)
            try:
                self._driver.rehearse(work)
                graphs.of[part] = self._driver.capture(work)
            except torch.OutOfMemoryError as error:
                self._evict(bucket)
                self._stop(f"out of memory: {str(error).splitlines()[0]}")
                break
            except Exception as error:  # noqa: BLE001 - Triton, CUDA and libraries raise errors of many types
                self._capturable.remove(part)
                logger.warning(
                    "no CUDA graph of %s: %s; it is launched eagerly from now on (cuda_kernels='off' avoids GPU "
                    "kernels and graphs)",
                    f"sublayer {part}" if isinstance(part, int) else part,
                    str(error).partition("\n")[0] or type(error).__name__,
                )
        rows.residual.copy_(residual)

    def _evict(self, bucket: Bucket) -> None:
        self._driver.release(self._graphs.pop(bucket).of.values())
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
    modules = itertools.chain.from_iterable(each.modules() for each in sublayer.modules)
    return not sublayer.has_experts and not any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") for module in modules
    )


def _in_place(sublayer: Sublayer, rows: StaticRows) -> None:
    """Run a sublayer on the residual's buffer. Raises RuntimeError if its result is a tensor outside the buffer."""
    left = sublayer(rows.residual, rows)
    if left.data_ptr() != rows.residual.data_ptr():
        raise RuntimeError("its result is not in the buffer")
