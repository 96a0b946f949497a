"""Run packed rows through spans of sublayers, and the threads and the marks of time of these passes.

By default the rows are one batch. In deterministic mode they are split into passes whose row counts do not change the
result. With static buffers they run in the shape of a bucket.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from rayspec.choices import FULL, SKIP, Choice
from rayspec.errors import reason_of
from rayspec.machine import waited_for_core_s
from rayspec.model.attention import Division, PackedRows, pack
from rayspec.model.cuda import operations, reference
from rayspec.model.graphs import StaticStep, StepGraphs
from rayspec.model.kv_cache import KVCache
from rayspec.model.load_check import lack_of_memory
from rayspec.model.row_counts import RowCounts
from rayspec.model.rows import SPLIT_BORDER, Path, RowSpan, bucket_of
from rayspec.model.static_rows import BatchMetadata, StepBuffers
from rayspec.model.sublayers import Decomposition, Sublayer, Tap, run

T = TypeVar("T")

# A pass that runs out of memory is not divided into passes of fewer rows than this.
_LEAST_DIVIDED_ROWS = 64
_MOST_THREADS = 4096  # as of the option
# Shares of its time that a thread waits for a core: above the first the cores are busy, below the second they are not.
_BUSY, _IDLE = 0.2, 0.05
_LOOK_EVERY_S, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 1.0, 30.0
_MAX_OPERATOR_S, _INTERRUPT_AGAIN_S = 10.0, 0.5  # how long, and how often, an interrupt waits for the work to end
# Rows from which on a pass has work for all cores: chunks of prompts, and plan searches.
_MANY_ROWS = 64


@dataclass(slots=True)
class Threads:
    """Numbers of threads. few: for passes of few rows, where threads may wait more than work. many: for others."""

    few: int
    many: int

    def use(self, num_rows: int) -> None:
        """Set torch's number of threads for the next pass of this thread."""
        torch.set_num_threads(self.few if num_rows < _MANY_ROWS else self.many)


class YieldingThreads(Threads):
    """Halves the threads for passes of few rows while other programs keep the cores busy, down to one: threads that
    have no core keep the others waiting in every product. Tries more again when this thread waits for no core, later
    each time in vain. clock, waited_s: in seconds, of this thread; see `waited_for_core_s`."""

    def __init__(
        self,
        threads: Threads,
        clock: Callable[[], float] = time.perf_counter,
        waited_s: Callable[[], float] = waited_for_core_s,
    ) -> None:
        super().__init__(threads.few, threads.many)
        self._most, self._clock, self._waited_s = threads.few, clock, waited_s
        self._looked = (-math.inf, 0.0)  # when, and how long this thread had waited by then
        self._again_s, self._pause_s = 0.0, _SHORTEST_PAUSE_S

    def use(self, num_rows: int) -> None:
        now_s = self._clock()
        if now_s - self._looked[0] >= _LOOK_EVERY_S:
            before, self._looked = self._looked, (now_s, self._waited_s())
            self._adapt(now_s, (self._looked[1] - before[1]) / (now_s - before[0]))
        super().use(num_rows)

    def _adapt(self, now_s: float, share: float) -> None:
        """share: of the time since the last look that this thread waited for a core."""
        if share > _BUSY and self.few > 1:
            self.few //= 2
            self._again_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif share < _IDLE and now_s > self._again_s:
            if self.few < self._most:
                self.few = min(2 * self.few, self._most)
                self._again_s = now_s + self._pause_s
            else:
                self._pause_s = _SHORTEST_PAUSE_S


def asked_threads(option: int | None) -> int | None:
    """Return the number of threads that the option asks for, or else OMP_NUM_THREADS; None if neither does."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return option or (int(first) if first.isdecimal() and 0 < int(first[:9]) <= _MOST_THREADS else None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device, where Triton launches its kernels. Does nothing for a CPU.

    Without it, a thread launches on cuda:0, also for tensors of cuda:1.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_lost(device: torch.device) -> bool:
    """Return whether an error has made the GPU unusable for this process: then every later call fails, too."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:  # noqa: BLE001 - of any type: the error is known
        return True
    return False


def integers(values: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Return `values` as int64 on `device`, modulo 2**64. Copies from the host without waiting for the device."""
    if not isinstance(values, Tensor):
        try:
            values = torch.tensor(values, dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError):  # some value has more than 64 bits with its sign
            values = torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in values], dtype=torch.int64)
    return values.to(device, torch.int64, non_blocking=True)


def in_thread_of_its_own(work: Callable[[], T]) -> T:
    """Run the work in a new thread, and return its result or raise its error when the thread has ended.

    OpenMP keeps helpers for each thread that has run an operator, until that thread ends; with more helpers than cores,
    decoding takes up to 1.4 times as long. So other work, such as loading, runs in a thread that ends. An interrupt of
    the caller, such as Ctrl-C, ends the work, too, when its current operator is done.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller
            result.set_exception(error)
        else:
            result.set_result(found)

    thread = threading.Thread(target=run, name="rayspec-load", daemon=True)
    try:
        thread.start()
        found = result.result()
    except (KeyboardInterrupt, SystemExit):  # a Python that ends while a thread is inside torch aborts
        until = time.monotonic() + _MAX_OPERATOR_S
        while thread.is_alive() and not result.done() and time.monotonic() < until:
            # Python drops an exception that meets a finalizer. An interrupt of `join` would count the thread as ended.
            with suppress(KeyboardInterrupt, SystemExit):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
                wait([result], _INTERRUPT_AGAIN_S)
        raise
    thread.join()
    return found


TokenIds: TypeAlias = Sequence[int] | Tensor
_Piece: TypeAlias = tuple[RowSpan, Sequence[Path]]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows of one pass. buckets: pairs of a number of real rows and rows as kernels see them. token_ids: to embed."""

    buckets: tuple[tuple[int, PackedRows | BatchMetadata], ...]
    token_ids: TokenIds = ()

    @property
    def num_rows(self) -> int:
        return sum(num_real for num_real, _ in self.buckets)


class Operators(Protocol):
    """Operations of sampling: `rayspec.model.cuda.reference` or `operations`."""

    def gumbel(self, keys: Tensor, vocab_size: int) -> Tensor: ...
    def cut_to_top_p(self, scores: Tensor, top_p: Tensor) -> None: ...


@dataclass(kw_only=True, eq=False)
class Runner:
    """The model of this process with its cache. row_counts: limits the rows of decode passes, so that the bits of a row
    do not depend on the plan or on the batch.

    buffers: passes that fit run in them, and their launches depend on the bucket only. The hidden states that `run`
    returns are then valid only until the next batch is embedded or run; without the head they are a copy. graphs:
    captured from passes in these buffers; without graphs such passes are launched eagerly. choices: by which drafts may
    run sublayers that support them. threads: CPU threads of each pass; None: those that torch has.

    may_retry: whether a pass that failed may run again; not if ranks run it together. most_rows: passes of more rows
    ran out of memory. on_loss: gets the reason when an error has made the GPU unusable for this process.
    """

    parts: Decomposition = field(kw_only=False)
    cache: KVCache = field(kw_only=False)
    device: torch.device
    row_counts: RowCounts | None
    buffers: StepBuffers | None = None
    graphs: StepGraphs | None = None
    choices: InitVar[Sequence[Choice]] = (FULL, SKIP)
    may_retry: bool = True
    threads: Threads | None = None
    most_rows: int | None = None
    on_loss: Callable[[str], None] | None = None

    def __post_init__(self, choices: Sequence[Choice]) -> None:
        # For each curve name, the choices that all its sublayers support, without skip.
        self.choices_by_kind: dict[str, tuple[Choice, ...]] = {}
        for name, sublayer in zip(self.parts.curve_names, self.parts.sublayers, strict=True):
            known = self.choices_by_kind.get(name, tuple(choices))
            self.choices_by_kind[name] = tuple(choice for choice in known if sublayer.can_run(choice))
        self._step = self.graphs or (StaticStep(self.parts, self.buffers) if self.buffers is not None else None)
        self._like_hidden = torch.zeros(1, 1, 1, dtype=self.parts.dtype, device=self.device)

    @property
    def operators(self) -> Operators:
        """The operators of sampling: kernels where passes run by kernels."""
        return reference if self.buffers is None else operations

    @property
    def first_sublayer(self) -> int:
        return self.parts.sublayers[0].index

    @property
    def end_sublayer(self) -> int:
        return self.parts.sublayers[-1].index + 1

    def batch(
        self,
        spans: Sequence[RowSpan],
        *,
        token_ids: TokenIds = (),
        fixed_shape: bool = True,
        scores_pages: bool = False,
    ) -> PackedBatch:
        """Pack rows for `embed` and `run`. fixed_shape: False for a prefill chunk and for a draft, which ignore
        `row_counts`. scores_pages: see `PackedRows`; rows in buffers leave no notes."""
        counts = self.row_counts if fixed_shape else None
        # With a fixed shape, chains only: in buffers a tree's row sums in another order than a chain's.
        if self.buffers is not None and (counts is None or not any(span.parents for span in spans)):
            passes = [_in_buffers(spans, token_ids)] if counts is None else _in_fixed_shape(spans, token_ids, counts)
            if all(map(self.buffers.can_hold, passes)):
                return PackedBatch(tuple((each.num_rows, each) for each in passes), token_ids)
        make = partial(pack, self.cache, device=self.device, scores_pages=scores_pages)
        if counts is None:
            packs = [make(spans, division="runs" if self.row_counts is None else "places")]
        else:
            pieces = [piece for span in spans for piece in pieces_of(span, counts.longest_chain)]
            division: Division = "blocks" if counts.longest_chain > 1 else "places"
            packs = [
                make([span for span, _ in some], paths=[own for _, own in some], pad_to=counts.least, division=division)
                for some in passes_of(pieces, counts.most)
            ]
        for rows in packs:
            self.parts.rotate(self._like_hidden, rows)
        return PackedBatch(tuple((sum(span.num_rows for span in rows.spans), rows) for rows in packs), token_ids)

    def hold(self, batch: PackedBatch) -> None:
        """Write a pass with static shapes to the buffers, as `embed` and `run` do if it is not there yet."""
        _, rows = batch.buckets[0]
        if isinstance(rows, BatchMetadata):
            assert self._step is not None
            self._step.hold(rows)

    def embed(self, batch: PackedBatch) -> Tensor:
        """Return the embeddings of the batch's tokens, [1, N, hidden_size]."""
        (_, rows), *others = batch.buckets
        if isinstance(rows, BatchMetadata) and not others:
            assert self._step is not None
            static = self._step.hold(rows)
            self._step.embed(static)
            return static.residual[:, : rows.num_rows]
        return self.parts.embed(torch.as_tensor(batch.token_ids, device=self.device))

    def run(
        self,
        batch: PackedBatch,
        hidden: Tensor,
        *,
        begin: int | None = None,
        end: int | None = None,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Run sublayers `begin` .. `end` (exclusive), by default all in this process, over [1, N, hidden_size]."""
        if self.threads is not None:
            self.threads.use(hidden.shape[1])
        begin = self.first_sublayer if begin is None else begin
        end = self.end_sublayer if end is None else end
        span = self.parts.sublayers[begin - self.first_sublayer : end - self.first_sublayer]
        parts, at = [], 0
        for num_real, rows in batch.buckets:
            left = self._run(span, rows, hidden[:, at : at + num_real], choices, tap)[:, :num_real]
            parts.append(left.clone() if len(batch.buckets) > 1 else left)  # the next may use the same buffer
            at += num_real
        left = _joined(parts, 1)
        # States in a buffer may go to another stage, while other batches run here.
        leaves_buffer = self.parts.lm_head is None and any(isinstance(rows, BatchMetadata) for _, rows in batch.buckets)
        return left.clone() if leaves_buffer else left

    def head(self, hidden: Tensor, *, drafting: bool = False) -> Tensor:
        """Return the logits [N, V] of states [1, N, hidden_size]; of a draft, by the head's copy if there is one."""
        num_rows = hidden.shape[1]
        if self.threads is not None:
            self.threads.use(num_rows)
        padded = self.buffers.padded(hidden) if self.buffers is not None else None
        if padded is not None:
            return self.parts.head(padded, drafting=drafting)[:num_rows]
        counts = self.row_counts or RowCounts(num_rows, max(num_rows, 1))
        pieces = [
            self.parts.head(_pad_rows(hidden[:, at : at + counts.most], counts.least), drafting=drafting)
            for at in range(0, num_rows, counts.most)
        ]
        return _joined(pieces, 0)[:num_rows]

    def recover(self, error: Exception, num_rows: int) -> str | None:
        """After an error in a pass of so many rows, take a safer way, after which the pass may run again. If memory ran
        out: release the graphs, then divide passes. After another error: give up the graphs, then the buffers. Return
        how passes run from now on, "" if as before; None if no way is left."""
        if not self.may_retry or is_lost(self.device):
            return None
        if lack_of_memory(error) is None:
            return self.give_up()
        if self.free_graphs():
            return ""
        if self.row_counts is not None or num_rows < 2 * _LEAST_DIVIDED_ROWS:
            return None
        self.most_rows = num_rows // 2
        return f"in parts of {self.most_rows} rows (max_num_batched_tokens={self.most_rows} saves the memory)"

    def give_up(self) -> str | None:
        """Run later passes without graphs, or else without buffers. Return it in words; None if neither was left."""
        if self.buffers is None:
            return None
        if self.graphs is not None:
            self.graphs, self._step = None, StaticStep(self.parts, self.buffers)
            return "without CUDA graphs (cuda_graphs='off' avoids them)"
        self.buffers = self._step = None
        return "without static buffers (cuda_kernels='off' avoids them)"

    def free_graphs(self) -> bool:
        """Release the memory of all graphs, which are captured again later. Return whether there were any."""
        found = self.graphs is not None and self.graphs.release_all()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def note_loss(self, error: Exception) -> None:
        """Call `on_loss`, once, if the error has made the GPU unusable for this process."""
        if self.on_loss is not None and is_lost(self.device):
            self.on_loss(reason_of(error))
            self.on_loss = None

    def _run(
        self,
        span: Sequence[Sublayer],
        rows: PackedRows | BatchMetadata,
        hidden: Tensor,
        choices: Sequence[Choice] | None,
        tap: Tap | None,
    ) -> Tensor:
        """Run `span` over the n rows of `hidden`; return [1, n + padding, hidden_size]."""
        num_real = hidden.shape[1]
        if isinstance(rows, PackedRows):
            hidden = _pad_rows(hidden, len(rows.positions))
            return run(span, hidden, rows, choices=choices, tap=_real_rows(tap, num_real, is_copied=False))
        assert self._step is not None
        static = self._step.hold(rows)
        if hidden.data_ptr() != static.residual.data_ptr():
            static.residual[:, :num_real].copy_(hidden)
        return self._step.run(span, static, choices=choices, tap=_real_rows(tap, num_real, is_copied=True))


def _in_buffers(spans: Sequence[RowSpan], token_ids: TokenIds) -> BatchMetadata:
    paths = [span.paths() for span in spans]
    return BatchMetadata(bucket_of(spans, paths), spans, paths, token_ids)


def _in_fixed_shape(spans: Sequence[RowSpan], token_ids: TokenIds, counts: RowCounts) -> list[BatchMetadata]:
    """Divide chains among passes in buffers in which the bits of a row do not depend on others. The attention of a row
    does not, unless its sequence needs longer splits than the row alone."""
    pieces = [(piece, ()) for span in spans for piece in span.divided(counts.most, SPLIT_BORDER)]
    passes = [[piece for piece, _ in some] for some in passes_of(pieces, counts.most)]
    made = [_in_buffers(some, token_ids if len(passes) == 1 else ()) for some in passes]
    return [replace(one, bucket=one.bucket._replace(num_rows=max(one.bucket.num_rows, counts.least))) for one in made]


def ways_of(parts: Decomposition, choices: Sequence[Choice]) -> list[tuple[Choice, ...]]:
    """Return, for each sublayer, the choices that it supports. Every sublayer can be skipped."""
    return [
        tuple(choice for choice in choices if choice == SKIP or sublayer.can_run(choice))
        for sublayer in parts.sublayers
    ]


def pieces_of(span: RowSpan, longest_chain: int) -> Iterator[_Piece]:
    """Yield the rows that may share an attention call: some of a chain, or one of a tree. A row has a path unless it
    sees all slots up to its own."""
    if not span.parents:
        for at in range(0, span.num_rows, longest_chain):
            yield span.chain(at, min(longest_chain, span.num_rows - at)), ()
    for row, path in enumerate(span.paths()):
        yield span.chain(row, 1), () if path.is_straight else (path,)


def passes_of(pieces: Sequence[_Piece], most: int) -> Iterator[list[_Piece]]:
    """Divide the pieces among passes of at most `most` rows."""
    some: list[_Piece] = []
    for piece in pieces:
        if sum(span.num_rows for span, _ in (*some, piece)) > most:
            yield some
            some = []
        some.append(piece)
    if some:
        yield some


def _pad_rows(hidden: Tensor, size: int) -> Tensor:
    return pad(hidden, (0, 0, 0, size - hidden.shape[1])) if hidden.shape[1] < size else hidden


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _real_rows(tap: Tap | None, num_real: int, *, is_copied: bool) -> Tap | None:
    if tap is None:
        return None
    return lambda index, hidden: tap(index, hidden[:, :num_real].clone() if is_copied else hidden[:, :num_real])


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in some work. host_s: when the host reached it. event: a `torch.cuda.Event` that says when the device
    reaches it; None if the host itself does the work."""

    host_s: float
    event: Any = None


class Stopwatch:
    """Sets marks: on a GPU, events in its queue, which are read when the host has waited for the tokens anyway."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock

    def mark(self) -> Mark:
        host_s = self._clock()
        if self._device.type != "cuda":
            return Mark(host_s)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return Mark(host_s, event)


def seconds(first: Mark, last: Mark) -> float:
    """Return the seconds from when the device reached `first` to when it reached `last`; wait until it has."""
    if first.event is None or last.event is None:
        return last.host_s - first.host_s
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event)) / 1000


def queued_s(first: Mark, last: Mark) -> float:
    """Return how long the device was still busy with earlier work when the host set `first`. last: a mark that the
    device reached as soon as the host set it."""
    if first.event is None or last.event is None:
        return 0.0
    return max(0.0, last.host_s - first.host_s - seconds(first, last))
