"""Passes in static buffers, whose launches and addresses depend on the bucket only: eager, or as captured CUDA graphs.

A pass has graphs for the rotary embedding, the embedding, and each stretch of sublayers that can be captured: one for a
model without experts or hooks. A stretch is captured for each plan that runs often enough. A replay writes only the
buffers, the KV cache, and temporaries, whose memory all graphs share: passes never overlap in time, because a
`StepBuffers` serves one pass at a time on one stream.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from rayspec.choices import FULL, SKIP, Choice, Choices, keys_of, weights_of
from rayspec.model.rows import MAX_TREE_ROWS, Bucket
from rayspec.model.static_rows import BatchMetadata, StaticRows, StepBuffers
from rayspec.model.sublayers import Decomposition, Sublayer, Tap, run

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], object]
Stretch: TypeAlias = tuple[tuple[int, Choice], ...]
"""Consecutive sublayers that run, each with its choice."""
Part: TypeAlias = str | Stretch
"""What one graph holds: a stretch, or the name of a part outside the sublayers."""

ROTARY: Part = "the rotary embedding"
EMBEDDING: Part = "the embedding"


class StaticStep:
    """Runs one pass at a time in static buffers: `hold` the pass, then `embed` and `run` its rows. Launches its parts
    one by one, without graphs."""

    def __init__(self, parts: Decomposition, buffers: StepBuffers) -> None:
        self.parts = parts
        self.buffers = buffers

    def hold(self, metadata: BatchMetadata) -> StaticRows:
        """Write the pass to the buffers, with its rotary embedding, and return its rows."""
        rows, is_new = self.buffers.hold(metadata)
        if is_new:
            self.launch(ROTARY, rows)
        return rows

    def embed(self, rows: StaticRows) -> None:
        """Write the embedding of `rows.tokens` to `rows.residual`."""
        self.launch(EMBEDDING, rows)

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Do as `sublayers.run`, on `rows.residual`. Changes and returns this buffer: [1, N, hidden_size]."""
        return run(span, rows.residual, rows, choices=choices, tap=tap)

    def launch(self, part: Part, rows: StaticRows) -> None:
        """Run a part outside the sublayers. Its results are in the buffers."""
        if part == EMBEDDING:
            rows.residual.copy_(self.parts.embed(rows.tokens))
            return
        before = dict(rows.rope)
        try:
            self.parts.rotate(rows.residual, rows)
        except BaseException:  # a capture that fails has computed some types in memory that others use later
            rows.rope.clear()
            rows.rope.update(before)
            raise
        self.buffers.keep_rope(rows)


# Eager passes of a draft's plan, or of a bucket of prompt chunks, before it is captured: as many as a capture costs.
_NUM_EAGER_RARE = 8
_MAX_COUNTED = 4096


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


class StepGraphs(StaticStep):
    """A step that captures parts of passes and replays them. Other parts run eagerly, within the same pass.

    A part of a bucket is captured at its second pass, or by `warm_up`; a stretch that is a draft's, and parts of prompt
    chunks, after a few more. Passes with a tap and buckets that are too large run eagerly. A sublayer that cannot be
    captured runs eagerly and divides the stretch around it.

    max_rows: the largest number of rows in a captured bucket. max_graphs: the most graphs at a time. max_bytes: the
    most device memory of all graphs. Above the last two limits, the least recently used graphs are released. agree:
    whether a condition holds on every rank of a tensor-parallel stage. All ranks must capture the same parts: NCCL
    requires of a sum that either all ranks have it in a graph or none (its user guide, "Using NCCL with CUDA Graphs").

    num_unready: parts so far that ran slower than they will later, because they were captured or will be, and passes
    with a tap.
    """

    def __init__(
        self,
        parts: Decomposition,
        buffers: StepBuffers,
        driver: GraphDriver,
        *,
        max_rows: int = 512,
        max_graphs: int = 384,
        max_bytes: int = 2**30,
        agree: Callable[[bool], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(parts, buffers)
        self._driver = driver
        self._has_ranks, self._agree = agree is not None, agree or bool
        self._max_rows, self._max_graphs, self._max_bytes = max_rows, max_graphs, max_bytes
        self._clock = clock
        self._sublayers = {sublayer.index: sublayer for sublayer in parts.sublayers}
        self._eager: set[Part | int] = {index for index, each in self._sublayers.items() if not is_capturable(each)}
        self._graphs: OrderedDict[tuple[Bucket, Part], CapturedGraph] = OrderedDict()  # the least recently used first
        self._num_passes: Counter[tuple[Bucket, Part]] = Counter()  # since the graph was last released
        self._num_releases: Counter[tuple[Bucket, Part]] = Counter()
        self.num_unready = 0
        self._is_full = False
        self._is_trial = False
        self._running: Part | int = ROTARY  # what is being captured
        self._divisions: dict[tuple[int, int, tuple[Choice, ...] | None], list[Stretch]] = {}  # see `_stretches`
        self._all = (parts.sublayers[0].index, parts.sublayers[-1].index, None)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets with a graph, the least recently used first."""
        return tuple(dict.fromkeys(bucket for bucket, _ in self._graphs))

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        if tap is not None or not self._may_capture(rows.bucket):
            self.num_unready += tap is not None
            return super().run(span, rows, choices=choices, tap=tap)
        if span:
            whole = None if choices is None else tuple(choices)
            for stretch in self._stretches(span[0].index, span[-1].index, whole):
                self.launch(stretch, rows)
        return rows.residual

    @torch.inference_mode()
    def warm_up(self, buckets: Iterable[Bucket], drafts: Collection[Choices] = ()) -> None:
        """Capture the pass without a plan for each bucket, in this order, until half of the limit is reached; later
        plans have the other half. With one row for each sequence, also capture these drafts. First release all other
        graphs. Overwrites the buffers: all rows are padding and write to the KV cache's spare slot."""
        started = self._clock()
        self.release_all()
        for bucket in filter(self._may_capture, dict.fromkeys(buckets)):
            parts: list[Part] = [ROTARY, *([] if self.parts.embedding is None else [EMBEDDING])]
            first, last, _ = self._all
            for choices in (None, *(drafts if bucket.max_rows == 1 else ())):
                parts += self._stretches(first, last, choices)
            if self._is_full or len(self._graphs) + len(parts) > self._max_graphs // 2 or self._is_too_much():
                break
            rows, _ = self.buffers.hold(BatchMetadata(bucket, (), ()))
            try:
                for part in dict.fromkeys(parts):
                    self._capture(part, rows)
            except torch.OutOfMemoryError as error:
                self._stop(f"out of memory: {str(error).splitlines()[0]}")
        logger.info(
            "captured %d graphs of %d buckets in %.1f s; they take %.0f MiB",
            self.num_graphs, len(self.buckets), self._clock() - started, self._driver.bytes_held() / 2**20,
        )  # fmt: skip

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Capture every part at its first pass, to time passes as they run later. These graphs are released at the
        end."""
        before, self._is_trial = set(self._graphs), True
        try:
            yield
        finally:
            self._is_trial = False
            self._driver.release([self._graphs.pop(key) for key in set(self._graphs) - before])

    def release_all(self) -> bool:
        """Release all graphs, which then need more passes before they are captured again. Return whether there were
        any."""
        found = list(self._graphs)
        self._release(found)
        return bool(found)

    def _stretches(self, first: int, last: int, choices: tuple[Choice, ...] | None) -> list[Stretch]:
        """Return the sublayers `first` to `last` that run, in stretches. One that cannot be captured stands alone."""
        if (known := self._divisions.get((first, last, choices))) is not None:
            return known
        chosen = [(index, FULL if choices is None else choices[index]) for index in range(first, last + 1)]
        running = [one for one in chosen if one[1] != SKIP]
        stretches: list[Stretch] = []
        for is_eager, some in itertools.groupby(running, key=lambda one: one[0] in self._eager):
            stretch = tuple(some)
            stretches += [(one,) for one in stretch] if is_eager else [stretch]
        if len(self._divisions) > _MAX_COUNTED:
            self._divisions.clear()
        self._divisions[first, last, choices] = stretches
        return stretches

    def launch(self, part: Part, rows: StaticRows) -> None:
        """Replay the part's graph, or run the part, and capture it if that is due."""
        key = (rows.bucket, part)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        self.num_unready += self._may_capture(rows.bucket) and not (self._is_full or self._is_eager(part))
        if self._is_due(key):
            self._capture(part, rows)
        else:
            self._run(part, rows)

    def _may_capture(self, bucket: Bucket) -> bool:
        return bucket.num_rows <= self._max_rows

    def _is_due(self, key: tuple[Bucket, Part]) -> bool:
        """Count a pass that is about to run, and return whether to capture this part now. At first it needs one earlier
        pass, or a few if it is a draft's or a chunk's; each release doubles this number."""
        bucket, part = key
        if self._is_full or not self._may_capture(bucket) or self._is_eager(part):
            return False
        if self._is_trial:
            return True
        for counts in (self._num_passes, self._num_releases):
            if len(counts) > _MAX_COUNTED:  # plans come and go for days
                counts.clear()
        self._num_passes[key] += 1
        is_draft = not isinstance(part, str) and part not in self._stretches(*self._all)
        is_rare = is_draft or bucket.max_rows > MAX_TREE_ROWS
        return self._num_passes[key] > (_NUM_EAGER_RARE if is_rare else 1) << self._num_releases[key]

    def _is_eager(self, part: Part) -> bool:
        return part in self._eager if isinstance(part, str) else part[0][0] in self._eager

    def _is_too_much(self) -> bool:
        fits = len(self._graphs) < self._max_graphs and self._driver.bytes_held() <= self._max_bytes
        return not self._agree(fits)

    def _capture(self, part: Part, rows: StaticRows) -> None:
        """Run the part, which is also the rehearsal, and capture it. What fails in a capture never gets a graph. Raises
        what the run raises."""
        while self._graphs and self._is_too_much():
            self._release([next(iter(self._graphs))])
        if self._is_too_much():
            self._stop(f"those that were released have left {self._driver.bytes_held() / 2**20:.0f} MiB in use")
        if self._is_full or self._is_eager(part):
            self._run(part, rows)
            return
        self._driver.rehearse(partial(self._run, part, rows))
        rows.forget_few()  # what the rehearsal has computed is not in the graph's memory
        graph, failure = None, None
        try:
            graph = self._driver.capture(partial(self._run, part, rows))
        except Exception as error:  # noqa: BLE001 - Triton, CUDA and libraries raise errors of many types
            failure = error
        finally:
            rows.forget_few()
        is_captured = self._agree(graph is not None)
        if graph is not None:
            self._graphs[rows.bucket, part] = graph
        if not is_captured:
            self._do_without(rows.bucket, part, failure)

    def _do_without(self, bucket: Bucket, part: Part, failure: Exception | None) -> None:
        """Go on after a capture that has failed here, or only on another rank."""
        reason = "another rank cannot" if failure is None else str(failure).partition("\n")[0] or type(failure).__name__
        if isinstance(failure, torch.OutOfMemoryError):
            self._stop(f"out of memory: {reason}")
        elif self._has_ranks:
            self._stop(reason)
        else:
            failed = self._running
            self._eager.add(failed)
            self._divisions.clear()
            logger.warning(
                "no CUDA graph of %s: %s; it is launched eagerly from now on (cuda_kernels='off' avoids GPU kernels "
                "and graphs)",
                f"sublayer {failed}" if isinstance(failed, int) else failed,
                reason,
            )
        if failure is None:
            self._release([(bucket, part)])

    def _release(self, keys: Sequence[tuple[Bucket, Part]]) -> None:
        self._driver.release([self._graphs.pop(key) for key in keys])
        for key in keys:
            self._num_passes[key] = 0
            self._num_releases[key] += 1

    def _stop(self, reason: str) -> None:
        self._is_full = True
        logger.warning("no more CUDA graphs are captured, %s", reason)

    def _run(self, part: Part, rows: StaticRows) -> None:
        if isinstance(part, str):
            self._running = part
            super().launch(part, rows)
            return
        for index, choice in part:
            self._running = index
            left = self._sublayers[index](rows.residual, rows.seeing(keys_of(choice)), weights_of(choice))
            if left.data_ptr() != rows.residual.data_ptr():
                rows.residual.copy_(left)


def is_capturable(sublayer: Sublayer) -> bool:
    """Return whether the sublayer's launches depend on the bucket only. They do not if hooks fetch weights, nor in a
    mixture of experts, where the number of rows per expert depends on the data."""
    modules = itertools.chain.from_iterable(each.modules() for each in sublayer.modules)
    return not sublayer.has_experts and not any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") for module in modules
    )
