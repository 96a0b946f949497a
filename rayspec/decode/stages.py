"""The interface between engine and model. The engine sends `Stages` one message per round; `LocalStages` runs the whole
model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from rayspec.config import Verification
from rayspec.decode.head import Head
from rayspec.decode.passes import SpanRunner
from rayspec.decode.plan_search import PlanSearch
from rayspec.decode.progress import Progress
from rayspec.decode.questions import Answer, Question, answer
from rayspec.decode.rounds import script
from rayspec.decode.runner import Runner
from rayspec.decode.stopwatch import Stopwatch
from rayspec.decode.work import Move, Result, SamplerSpec, TappedToken, TapsGoneError, Work
from rayspec.model.load_check import lack_of_memory
from rayspec.model.rows import RowSpan
from rayspec.model.threads import on_device
from rayspec.types import OutOfMemoryError, RayspecError

T = TypeVar("T")

# Draft steps between two copies of the drawn tokens to the host; a copy waits for the device. 1 on other devices.
_DRAFT_LOOK_INTERVAL = {"cuda": 4}


class StagesReplacedError(RayspecError):
    """The stages have lost their state and are ready again. All work under way is void, no sequence is open, and the KV
    cache is empty. The caller must open the sequences again and prefill their committed tokens."""

    kind = "stages_replaced"


class StageLostError(RayspecError):
    """A stage of the model is lost and could not be brought back: nothing more can be run."""

    kind = "stage_lost"


class Stages(Protocol):
    """The model, in one process or many. Sequences are opened once, then prefilled and taken through rounds.

    Any call may raise StagesReplacedError, or StageLostError if the model is lost for good. A future fails with the
    error of its work. After OutOfMemoryError the work has changed nothing.
    """

    @property
    def progress(self) -> Progress:
        """The tasks that the caller's thread runs in these calls. Other processes judge their own tasks."""

    @property
    def num_sublayers(self) -> int: ...

    @property
    def num_cohorts(self) -> int:
        """How many batches of sequences should have work under way at once, so that no stage waits."""

    def open(self, spec: SamplerSpec) -> None: ...

    def close(self, sequence_id: str) -> None:
        """Close a sequence. Only allowed while none of its work is under way."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copy keys and values in the KV cache, before any work that is started later."""

    def start(self, work: Work) -> Future[Result]: ...

    def wait(self) -> None:
        """Wait until another future is done, or a short time has passed."""

    def check(self) -> None:
        """Return when all processes of the model have answered. Only allowed while no work is under way."""

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        """Answer a question about tapped tokens. rows: the row of each token. The slots that it sees must keep their
        content until the future is done."""

    def shutdown(self) -> None: ...


def done(work: Callable[[], T]) -> Future[T]:
    """Run `work` now and return a future with its result. The future fails if memory runs out or taps are gone; other
    errors are raised."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except TapsGoneError as error:
        future.set_exception(error)
    except RuntimeError as error:
        future.set_exception(out_of_memory(error))
    return future


def out_of_memory(error: RuntimeError) -> OutOfMemoryError:
    """Return `error` as an OutOfMemoryError. Raise `error` again if it is not about memory."""
    reason = lack_of_memory(error)
    if reason is None:
        raise error
    return OutOfMemoryError(f"{reason}: lower max_num_batched_tokens, max_num_seqs or kv_cache_tokens")


class LocalStages:
    """The whole model in this process."""

    num_cohorts = 1

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        verification: Verification,
        num_tap_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.progress = Progress()
        self._stopwatch = Stopwatch.of(runner.device, clock)
        self.span = SpanRunner(runner, num_taps=num_tap_tokens)
        self.head = Head(
            runner.head,
            vocab_size=vocab_size,
            device=runner.device,
            verification=verification,
            num_taps=num_tap_tokens,
            draft_look_interval=_DRAFT_LOOK_INTERVAL.get(runner.device.type, 1),
        )

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

    def wait(self) -> None:
        """Return at once: `start` has already done the work."""

    def check(self) -> None:
        """Return at once: there is no other process to ask."""

    def search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan], question: Question) -> Future[Answer]:
        started, num_sublayers = time.perf_counter(), self.num_sublayers
        with self.progress.of("search"), on_device(self.runner.device):
            return done(
                lambda: answer(question, self.plan_search(tokens, rows), num_sublayers=num_sublayers, started=started)
            )

    def plan_search(self, tokens: Sequence[TappedToken], rows: Sequence[RowSpan]) -> PlanSearch:
        """Return the plan search over these tapped tokens. Raises TapsGoneError."""
        return self.span.search(tokens, rows, self.head.next_tokens(tokens))

    def shutdown(self) -> None:
        """Do nothing: there are no processes to end."""

    @torch.inference_mode()
    def _run(self, work: Work) -> Result:
        passes = script(work, self.head, self._stopwatch)
        try:
            one = next(passes)
            while True:
                one = passes.send(self.span.run(one, drawn=None if one.token_ids else self.head.drawn))
        except StopIteration as end:
            result: Result = end.value
            return result
