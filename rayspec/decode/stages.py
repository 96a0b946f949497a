"""The interface between engine and model. The engine sends `Stages` one message per round; `LocalStages` runs the whole
model in this process. `SpanRunner` takes passes through the sublayers of one process, in a pipeline too."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from rayspec.config import Verification
from rayspec.decode.rounds import Head, script
from rayspec.decode.runner import PackedBatch, Runner, Stopwatch, integers, on_device, passes_of, pieces_of
from rayspec.decode.search import Answer, PlanSearch, Question, answer
from rayspec.decode.work import Move, Pass, Result, RoundResult, SamplerSpec, TappedToken, TapsGoneError, Work
from rayspec.errors import reason_of
from rayspec.model.load_check import lack_of_memory
from rayspec.model.rows import RowSpan
from rayspec.planning.knapsack import Steps
from rayspec.types import OutOfMemoryError, RayspecError

logger = logging.getLogger(__name__)

LEAST_S = 60.0
_MARGIN = 20.0
_UNPREDICTED_S, _MOST_UNPREDICTED_S = 1200.0, 7200.0
_IDLE_SHARE = 0.01
_LONGEST_LOOK_S = 2.5  # if the judge looks later than that, the whole process was not running
_DECAY = 0.5

CpuClock = Callable[[], float]


def cpu_clock_of_this_thread() -> CpuClock:
    """Return a clock of this thread's CPU seconds for any thread; of all seconds where the system has none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock_id = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock_id)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """expected_s: None if nothing is known about its duration. cpu: of the thread that runs it."""

    started_s: float
    expected_s: float | None
    cpu: CpuClock


class Progress:
    """The tasks of one thread, mostly forward passes, and a judgement whether the present task is stuck.

    A task is stuck if it has lasted `least_s` and 20 times as long as expected from earlier tasks of its kind. A busy
    machine is no reason: only seconds count in which the thread has used CPU time for this task, or the latest seconds
    in which it has used none. A task without an expectation (the first of its kind, a plan search, a measurement) is
    stuck after 20 minutes without any CPU time, or two hours of it: a thread that waits for a GPU may spin.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], CpuClock] = cpu_clock_of_this_thread,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._longest_s: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._task: _Task | None = None
        self._worked_s = 0.0
        self._watched: _Task | None = None
        self._began_cpu_s = self._cpu_s = self._idle_s = 0.0
        self._looked_s = clock()

    @contextmanager
    def of(self, kind: str, size: int | None = None) -> Iterator[None]:
        """Run a task on this thread. size: its amount of work, for the expectation; None: it has no expectation."""
        # The smallest bound that the longest earlier tasks give, by powers of two of their sizes: a task of half the
        # size takes no longer, and a task of twice the size twice as long at most.
        longest_s, step = self._longest_s[kind], max(size or 0, 1).bit_length() - 1
        bounds = (seconds * max(1.0, (size or 0) / 2**at) for at, seconds in longest_s.items())
        expected_s = None if size is None else min(bounds, default=None)
        self._task = task = _Task(self._clock(), expected_s, self._cpu_clock())
        try:
            yield
        finally:
            self._task = None
            took_s = self._clock() - task.started_s
            self._worked_s += took_s
            if size is not None:
                longest_s[step] = max(took_s, _DECAY * longest_s.get(step, 0.0))

    @property
    def worked_s(self) -> float:
        """Seconds of all tasks so far. Any thread may read it."""
        task = self._task
        return self._worked_s + (self._clock() - task.started_s if task is not None else 0.0)

    def problem(self, least_s: float = LEAST_S) -> str | None:
        """Return why the present task is stuck; None if it is not. Only one thread may call it, every second or two."""
        now_s, task = self._clock(), self._task
        passed_s = min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        if task is None:
            return None
        cpu_s = task.cpu()
        if task is not self._watched:
            self._watched, self._began_cpu_s, self._cpu_s, self._idle_s = task, cpu_s, cpu_s, 0.0
            passed_s = 0.0
        is_idle = cpu_s - self._cpu_s <= _IDLE_SHARE * passed_s
        self._idle_s = self._idle_s + passed_s if is_idle else 0.0
        self._cpu_s = cpu_s
        lasted_s = now_s - task.started_s
        if task.expected_s is None:
            used_s = cpu_s - self._began_cpu_s
            is_asleep = self._idle_s >= max(least_s, _UNPREDICTED_S)
            if not is_asleep and used_s < max(least_s, _MOST_UNPREDICTED_S):
                return None
            why = f"no CPU time for the last {self._idle_s:.0f} s" if is_asleep else f"{used_s:.0f} s of CPU time"
            return f"has not finished a task for {lasted_s:.0f} s, and used {why}"
        if max(self._idle_s, cpu_s - self._began_cpu_s) < max(least_s, _MARGIN * task.expected_s):
            return None
        why = f"the pass was expected to take {task.expected_s:.2g} s"
        return f"has not finished a pass for {lasted_s:.0f} s, and {why}"


_MAX_ROUNDS_SAVED = 256


class SpanRunner:
    """Runs passes through the sublayers of one process. The first span embeds; the output of the last span goes to the
    head. The saved rows of an abandoned round are dropped once 256 later rounds have saved rows."""

    def __init__(self, runner: Runner, *, num_taps: int) -> None:
        self.runner = runner
        self._num_taps = num_taps
        self._saved: dict[int, list[Tensor]] = {}
        self._taps: dict[TappedToken, Tensor] = {}

    @torch.inference_mode()
    def run(self, work: Pass, hidden: Tensor | None = None, *, drawn: Tensor | None = None) -> Tensor:
        """Run the pass through this span. Return the states after it, [1, N', hidden_size]; N' differs from N if rows
        are merged here. hidden: [1, N, hidden_size] from the previous span; None at the embedding. drawn: the tokens of
        a pass without `token_ids`.

        After an error, run the pass again as long as `Runner.recover` finds a safer way, and say so in one warning.
        Raises the last error.
        """
        ways, reason = list[str](), ""
        while True:
            most = self.runner.most_rows
            try:
                is_large = most is not None and _num_divisible(work, drawn) > most
                left = self._in_parts(work, hidden, most) if most and is_large else self._run(work, hidden, drawn)
            except Exception as error:
                num_rows = _num_divisible(work, drawn)
                way = self.runner.recover(error, min(num_rows, most or num_rows))
                if way is None:
                    raise
                ways, reason = [*ways, way] if way else ways, reason_of(error)
            else:
                if ways:
                    logger.warning("passes run %s from now on, after an error: %s", " and ".join(ways), reason)
                return left

    def _in_parts(self, work: Pass, hidden: Tensor | None, most: int) -> Tensor:
        parts, first = [], 0
        for some in passes_of([piece for span in work.rows for piece in pieces_of(span, most)], most):
            rows = [span for span, _ in some]
            own = slice(first, first + sum(span.num_rows for span in rows))
            part = replace(work, rows=rows, token_ids=work.token_ids[own])
            parts.append(self._run(part, None if hidden is None else hidden[:, own], None).clone())
            first = own.stop
        return torch.cat(parts, 1)

    def _run(self, work: Pass, hidden: Tensor | None, drawn: Tensor | None) -> Tensor:
        runner = self.runner
        cut = work.merge.at if work.merge else work.save_at
        is_merged = work.merge is not None and work.merge.at <= runner.first_sublayer
        batch = self._batch(work, work.merge.rows if is_merged and work.merge else work.rows, drawn)
        if hidden is None:
            hidden = runner.embed(batch)
        if not runner.first_sublayer < cut <= runner.end_sublayer:
            return self._through(work, batch, hidden, runner.first_sublayer, runner.end_sublayer)
        hidden = self._through(work, batch, hidden, runner.first_sublayer, cut)
        # What is saved changes only after the pass has succeeded, because a pass that fails may run again.
        if work.merge is None:
            saved = hidden.clone()  # it may lie in a buffer
            left = self._through(work, batch, hidden, cut, runner.end_sublayer)
            self._saved.setdefault(work.round_id, []).append(saved)
            for abandoned in sorted(self._saved)[:-_MAX_ROUNDS_SAVED]:
                del self._saved[abandoned]
            return left
        rows = torch.cat([*self._saved[work.round_id], hidden], 1)
        hidden = rows[:, integers(work.merge.order, hidden.device)]
        left = self._through(work, self._batch(work, work.merge.rows, None), hidden, cut, runner.end_sublayer)
        del self._saved[work.round_id]
        return left

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Copy slots of the KV cache. All sources are read first."""
        for in_windowed_store in (False, True):
            chosen = [(move.source, move.destination) for move in moves if move.in_windowed_store == in_windowed_store]
            if chosen:
                sources, destinations = (integers(slots, self.runner.device) for slots in zip(*chosen, strict=True))
                self.runner.cache.move(sources, destinations, in_windowed_store=in_windowed_store)

    def forget_round(self, round_id: int) -> None:
        """Drop the saved rows of a round, which starts again."""
        self._saved.pop(round_id, None)

    def forget(self) -> None:
        """Drop the saved rows of all rounds, and all taps."""
        self._saved.clear()
        self._taps.clear()

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], next_tokens: Tensor | None) -> PlanSearch:
        """Return the plan search over this span's taps. rows: the row of each token. Raises TapsGoneError."""
        if any(token not in self._taps for token in tokens):
            raise TapsGoneError("the captured hidden states of some tokens are not kept any more")
        states = torch.stack([self._taps[token] for token in tokens], 1)
        return PlanSearch(self.runner, states, rows, next_tokens)

    def _batch(self, work: Pass, rows: Sequence[RowSpan], drawn: Tensor | None) -> PackedBatch:
        own = work.token_ids if drawn is None else drawn
        token_ids = own if rows is work.rows else ()
        return self.runner.batch(
            rows, token_ids=token_ids, fixed_shape=work.fixed_shape, scores_pages=work.scores_pages
        )

    def _through(self, work: Pass, batch: PackedBatch, hidden: Tensor, begin: int, end: int) -> Tensor:
        if not work.taps:
            return self.runner.run(batch, hidden, begin=begin, end=end, choices=work.choices)
        hidden = hidden.clone()  # it may lie in the buffer that the sublayers add to
        boundaries: dict[int, list[Tensor]] = {}
        out = self.runner.run(
            batch, hidden, begin=begin, end=end, choices=work.choices,
            tap=lambda index, states: boundaries.setdefault(index, []).append(states),
        )  # fmt: skip
        rows = integers([row for row, _ in work.taps], self.runner.device)
        whole = (hidden, *(torch.cat(pieces, 1) for pieces in boundaries.values()))
        states = torch.stack([boundary[0, rows] for boundary in whole])
        for at, (_, token) in enumerate(work.taps):
            self._taps.pop(token, None)
            self._taps[token] = states[:, at]
        for token in list(self._taps)[: -self._num_taps]:
            del self._taps[token]
        return out


def _num_divisible(work: Pass, drawn: Tensor | None) -> int:
    """Return the rows of a pass that may run as several passes; 0 for a pass that may not."""
    is_whole = drawn is not None or work.merge or work.taps or work.save_at or any(span.parents for span in work.rows)
    return 0 if is_whole else sum(span.num_rows for span in work.rows)


T = TypeVar("T")

# Draft steps between two copies of the drawn tokens to the host; a copy waits for the device. 1 on other devices.
_DRAFT_LOOK_INTERVAL = {"cuda": 4}
# Steps of a round without drafts on a GPU, where the host prepares each step while the device runs the one before.
MAX_STEPS = 4


class StagesReplacedError(RayspecError):
    """The stages have lost their state and are ready again: all work under way is void, no sequence is open, and the KV
    cache is empty. The caller must open the sequences again and prefill their committed tokens."""

    kind = "stages_replaced"


class StageLostError(RayspecError):
    """A stage is lost and could not be brought back: nothing more can be run."""

    kind = "stage_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """How busy a stage was since the last query. num_passes: 0 if unknown."""

    name: str
    busy_s: float
    elapsed_s: float
    num_passes: int = 0

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Stages(ABC):
    """The model, in one process or many. Sequences are opened once, then prefilled and taken through rounds. Methods
    that are not abstract are right for a model in this process, where `start` does the work at once.

    Any call may raise StagesReplacedError, or StageLostError if the model is lost for good. A future fails with the
    error of its work. After OutOfMemoryError the work has changed nothing, unless `keeps_state`.

    progress: the tasks that the caller's thread runs in these calls. num_cohorts: how many batches of sequences should
    have work under way at once, so that no stage waits. num_steps: the most steps that a round without drafts should
    have, at most `MAX_STEPS`. takes_trees: whether drafts may branch. keeps_state: whether sequences of work that
    failed must begin again at position 0. searches_apart: whether other processes search, while rounds go on.
    is_recovering: whether lost processes of the model are being replaced; any thread may read it.
    """

    num_cohorts: int = 1
    num_steps: int = 1
    takes_trees: bool = True
    keeps_state: bool = False
    searches_apart: bool = False
    is_recovering: bool = False

    def __init__(self) -> None:
        self.progress = Progress()

    @property
    @abstractmethod
    def num_sublayers(self) -> int: ...

    @abstractmethod
    def open(self, spec: SamplerSpec) -> None: ...

    @abstractmethod
    def close(self, sequence_id: str) -> None:
        """Close a sequence. Only allowed while none of its work is under way."""

    @abstractmethod
    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values in the KV cache, before any work that is started later. No destination occurs twice."""

    @abstractmethod
    def start(self, work: Work) -> Future[Result]: ...

    @abstractmethod
    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        """Answer a question about tapped tokens. rows: of each; the slots that they see must keep their content."""

    def continue_search(self, seconds: float) -> None:  # noqa: B027 - other processes go on by themselves
        """Work on the oldest search for about so many seconds, at least one step of about a sublayer."""

    def wait(self) -> None:  # noqa: B027 - an engine in one process needs none
        """Wait until another future is done, `wake` is called, or a short time has passed."""

    def wake(self) -> None:  # noqa: B027 - an engine in one process needs none
        """Let `wait` return at once. Any thread may call it."""

    def check(self) -> None:  # noqa: B027 - an engine in one process needs none
        """Return when all processes of the model have answered. Only allowed while no work is under way."""

    def recent_use(self) -> Sequence[StageUse]:
        """Return how busy each process was since the last call; empty for a model in this process."""
        return ()

    def shutdown(self) -> None:  # noqa: B027 - an engine in one process needs none
        """End the processes of the model."""


@torch.inference_mode()
def run_script(script: Generator[Pass, Tensor, Result], run: Callable[[Pass], Tensor]) -> Result:
    """Run the passes that the script yields, here and now, and return its result."""
    try:
        one = next(script)
        while True:
            one = script.send(run(one))
    except StopIteration as end:
        result: Result = end.value
        return result


def done(work: Callable[[], T]) -> Future[T]:
    """Run `work` now. The future fails if memory runs out or taps are gone; other errors are raised."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except TapsGoneError as error:
        future.set_exception(error)
    except Exception as error:  # noqa: BLE001 - errors of Triton are no RuntimeErrors; others than of memory are raised
        future.set_exception(out_of_memory(error))
    return future


def out_of_memory(error: Exception) -> OutOfMemoryError:
    """Return `error` as an OutOfMemoryError, or raise it if it is not about memory."""
    reason = lack_of_memory(error)
    if reason is None:
        raise error
    return OutOfMemoryError(f"{reason}: lower max_num_batched_tokens, max_num_seqs or kv_cache_tokens")


@dataclass(slots=True)
class _SearchUnderWay:
    """A search in this process. spent_s: seconds so far."""

    future: Future[Answer]
    steps: Steps[Answer]
    spent_s: float = 0.0


class LocalStages(Stages):
    """The whole model in this process, cut into sublayers. A search makes one step at first, others on request."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        verification: Verification,
        num_tap_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.runner = runner
        self.span = SpanRunner(runner, num_taps=num_tap_tokens)
        self.head = Head(
            runner.head,
            draft_logits=partial(runner.head, drafting=True),
            operators=runner.operators,
            vocab_size=vocab_size,
            device=runner.device,
            verification=verification,
            num_taps=num_tap_tokens,
            draft_look_interval=_DRAFT_LOOK_INTERVAL.get(runner.device.type, 1),
        )
        self.head.stopwatch = Stopwatch(runner.device, clock)
        self.num_steps = MAX_STEPS if runner.device.type == "cuda" else 1
        self.takes_trees = runner.row_counts is None  # else a row of a tree attends alone
        self._clock = clock
        self._searches: list[_SearchUnderWay] = []

    @property
    def num_sublayers(self) -> int:
        return self.runner.end_sublayer

    def open(self, spec: SamplerSpec) -> None:
        self.head.open(spec)

    def close(self, sequence_id: str) -> None:
        self.head.close(sequence_id)

    def move(self, moves: Sequence[Move]) -> None:
        with on_device(self.runner.device):
            self.span.move(moves)

    def start(self, work: Work) -> Future[Result]:
        with self.progress.of(type(work).__name__, work.num_rows), on_device(self.runner.device):
            return done(lambda: self._run(work))

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        future: Future[Answer] = Future()
        with on_device(self.runner.device):
            tapped = done(lambda: self.plan_search(tokens, rows))
        if (error := tapped.exception()) is not None:
            future.set_exception(error)
            return future
        steps = answer(question, tapped.result(), num_sublayers=self.num_sublayers)
        self._searches.append(_SearchUnderWay(future, steps))
        self.continue_search(0.0)
        return future

    def continue_search(self, seconds: float) -> None:
        started = self._clock()
        self._searches = [one for one in self._searches if not one.future.cancelled()]
        if not self._searches:
            return
        search = self._searches[0]
        with self.progress.of("search"), on_device(self.runner.device):
            try:
                next(search.steps)
                while self._clock() - started < seconds:
                    next(search.steps)
                search.spent_s += self._clock() - started
            except StopIteration as end:
                del self._searches[0]
                spent_s = search.spent_s + self._clock() - started
                search.future.set_result(msgspec.structs.replace(end.value, seconds=spent_s))
            except Exception as error:  # noqa: BLE001 - others than of memory are raised
                del self._searches[0]
                search.future.set_exception(out_of_memory(error))

    def plan_search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan]) -> PlanSearch:
        return self.span.search(tokens, rows, self.head.next_tokens(tokens))

    def _run(self, work: Work) -> Result:
        """Run the work; once more without the memory of graphs if memory ran out, since nothing has changed then."""
        try:
            return self._scripted(work)
        except Exception as error:
            self.runner.note_loss(error)
            if lack_of_memory(error) is None or not self.runner.free_graphs():
                raise
        self.span.forget_round(work.id)
        return self._scripted(work)

    def _scripted(self, work: Work) -> Result:
        span, head, before = self.span, self.head, self._num_unready
        result = run_script(script(work, head), lambda one: span.run(one, drawn=None if one.token_ids else head.drawn))
        if isinstance(result, RoundResult) and self._num_unready > before:
            return msgspec.structs.replace(result, is_unready=True)
        return result

    @property
    def _num_unready(self) -> int:
        return 0 if self.runner.graphs is None else self.runner.graphs.num_unready
