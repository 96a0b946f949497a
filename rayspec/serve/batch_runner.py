"""Runs batches on the endpoint's models: a plain class that `app.py` makes a deployment of one replica.

The runner keeps all its state in the store. After a loss, the next runner continues: it skips lines whose answers are
stored, and runs the other lines again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any

from rayspec.openai.batch import BatchError, BatchLine, BatchResult
from rayspec.openai.batches import FINAL, Batch, BatchErrors, RequestCounts
from rayspec.openai.errors import ApiError, InvalidRequestError
from rayspec.serve.batch_store import BatchStore
from rayspec.serve.calls import fetch
from rayspec.serve.options import ServeOptions
from rayspec.serve.replies import BUSY, Refused
from rayspec.types import ConfigError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_STOP_POLL_S = 0.5
_SAVE_AFTER_S = 1.0
_SAVE_SHARE = 0.01  # of a batch's run time so far: results have few parts, and few lines run again after a loss
_BUSY_WAIT_S = 1.0
_SWEEP_EVERY_S = 3600.0  # also the age of what is swept
_MOST_RUNS = 4  # batches at once; the others wait
_MOST_ENDING = 2  # more for batches that only have to be ended
_LINES_AT_ONCE = 1024
_LINES_READ, _CHARACTERS_READ = 256, 2**20
_BYTES_AT_ONCE = 8 * 2**20  # of a batch's lines, and of its results that are not saved yet
_MOST_LOSSES = 3  # of a line, while no other lost line runs; then the line fails
_MOST_ERRORS = 100  # reported for an input file


class BatchRunner:
    """Runs all batches, a few at once, until its event loop ends. options: of the endpoint, with a folder of `batches`.
    models: Serve's handles, by the ids that lines use.

    While the runner of another server has the folder's lock, this runner waits for it.
    """

    def __init__(self, options: ServeOptions, models: Mapping[str, Any]) -> None:
        assert options.batches is not None
        self._max_lines, self._models = options.max_batch_lines, dict(models)
        self._store = BatchStore.at(options.batches)
        self._places = {
            one.model_id: asyncio.Semaphore(one.num_places * one.num_replicas) for one in options.llm_configs
        }
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, Batch] = {}  # as they were when they began to wait, or ended
        self._lock: IO[bytes] | None = None
        self._is_waiting, self._has_told, self._swept_s = True, False, -math.inf
        self._woken = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def wake(self) -> None:
        """Look for new batches at once."""
        self._woken.set()

    def __del__(self) -> None:
        for task in (self._task, *self._runs.values()) if hasattr(self, "_task") else ():
            task.cancel()

    async def _keep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._take_folder)
                await self._look()
            except ConfigError as error:
                logger.log(logging.DEBUG if self._has_told else logging.WARNING, "the batches wait: %s", error)
                self._has_told = True
            except Exception:  # logged, and tried again
                logger.exception("the batches cannot be looked at now")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK_EVERY_S)
            self._woken.clear()

    def _take_folder(self) -> None:
        """Lock the folder, and delete what interrupted uploads have left there. Raises ConfigError."""
        if self._is_waiting:
            self._lock, self._is_waiting = self._store.lock(), False
        if time.monotonic() - self._swept_s >= _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self._store.sweep(_SWEEP_EVERY_S)

    async def _look(self) -> None:
        """Start batches that have not ended: those that are cancelled or expired, then the oldest."""
        for batch, is_over in sorted(await asyncio.to_thread(self._waiting), key=lambda one: not one[1]):
            if len(self._runs) < _MOST_RUNS + (_MOST_ENDING if is_over else 0):
                self._runs[batch.id] = asyncio.create_task(self._run(batch))

    def _waiting(self) -> list[tuple[Batch, bool]]:
        """Return the batches that have not ended and do not run, and whether they only have to be ended."""
        waiting = []
        names = self._store.batch_ids()
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names:
            if name not in self._known:
                with suppress(InvalidRequestError):  # deleted, or its first state is not written yet
                    self._known[name] = self._store.saved(name)
            batch = self._known.get(name)
            if batch is not None and batch.status not in FINAL and name not in self._runs:
                is_over = batch.expires_at <= self._store.clock() or self._store.cancel_asked_at(name) is not None
                waiting.append((batch, is_over))
        return waiting

    async def _run(self, batch: Batch) -> None:
        try:
            run = BatchRun(batch, self._store, self._max_lines, self._answer)
            await run.run()
            self._known[batch.id] = run.batch
            self._woken.set()
        except Exception:  # logged, and tried again
            logger.exception("batch %s cannot go on now", batch.id)
            self._known.pop(batch.id)
        finally:
            self._runs.pop(batch.id, None)

    async def _answer(self, line: BatchLine) -> BatchResult | ApiError:
        """Return the result of a line, or an ApiError if it was lost with a replica. Wait while the model is busy."""
        model = line.model if line.model in self._models else next(iter(self._models))
        async with self._places[model]:
            while (found := await self._ask(model, line)) is BUSY:
                await asyncio.sleep(_BUSY_WAIT_S)
            return found

    async def _ask(self, model: str, line: BatchLine) -> BatchResult | ApiError:
        try:
            found: BatchResult = await fetch(self._models[model].answer.remote(line), None)
        except Refused as refused:
            return refused.error
        return found


@dataclass(slots=True)
class BatchRun:
    """Runs one batch to its end, from any saved state.

    answer: returns the result of a line, or an ApiError where the line was lost with its replica.
    """

    batch: Batch
    store: BatchStore
    max_lines: int
    answer: Callable[[BatchLine], Any]
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_characters: int = 0  # of the lines that run
    _answered: set[str] = field(default_factory=set)
    _unsaved: list[bytes] = field(default_factory=list)
    _num_unsaved_bytes: int = 0
    _must_save: asyncio.Event = field(default_factory=asyncio.Event)
    _has_ended: bool = False
    _counts: RequestCounts = field(default_factory=RequestCounts)

    async def run(self) -> None:
        steps = {"validating": self._validated, "in_progress": self._progress, "finalizing": self._finalized}
        while self.batch.status not in FINAL:
            try:
                changes = await steps[self.batch.status]()
            except InvalidRequestError as gone:
                errors = [BatchError(code="file_not_found", message=f"input_file_id: {gone}", param="input_file_id")]
                changes = self._failed(errors)
            await self._save(**changes)

    async def _validated(self) -> dict[str, Any]:
        """Read all lines once, and collect the errors of the first lines that are not requests of this batch."""

        def inspected() -> dict[str, Any]:
            errors: list[BatchError] = []
            total = 0
            try:
                for line in self.store.lines(self.batch, self.max_lines):
                    total += 1
                    error = line.error if isinstance(line, BatchResult) else None
                    if isinstance(line, BatchLine) and line.url != self.batch.endpoint:
                        which = f"custom_id {reprlib.repr(line.custom_id)}: its url is {line.url}"
                        message = f"{which}, the batch's endpoint {self.batch.endpoint}"
                        error = BatchError(code="mismatched_endpoint", message=message, param="url")
                    if error is not None and len(errors) < _MOST_ERRORS:
                        errors.append(error)
            except InvalidRequestError as error:
                if error.code != "too_many_lines":
                    raise
                return self._failed([BatchError(code=error.code, message=str(error))])
            if not total:
                errors = [BatchError(code="empty_file", message="the file has no line: write a request a line")]
            if errors:
                return self._failed(errors)
            counts = RequestCounts(total=total)
            return {"status": "in_progress", "in_progress_at": self._now(), "request_counts": counts}

        return await asyncio.to_thread(inspected)

    def _failed(self, errors: list[BatchError]) -> dict[str, Any]:
        return {"status": "failed", "failed_at": self._now(), "errors": BatchErrors(data=errors)}

    async def _progress(self) -> dict[str, Any]:
        """Run lines until all are answered, the batch is cancelled, or its completion window ends."""
        await asyncio.to_thread(self._read_results)
        work, stop = asyncio.create_task(self._answer_all()), asyncio.create_task(self._stop_asked())
        saving = asyncio.create_task(self._keep_saving())
        try:
            await asyncio.wait([work, stop, saving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end([work, stop])
            self._has_ended = True
            self._must_save.set()
            await saving
        for task in (work, stop):
            if not task.cancelled():
                task.result()
        return {"status": "finalizing", "finalizing_at": self._now()}

    def _read_results(self) -> None:
        failed = {name: has_failed for name, has_failed, _ in self.store.results(self.batch.id)}
        self._answered = set(failed)
        num_failed = sum(failed.values())
        total = self.batch.request_counts.total
        self._counts = RequestCounts(total=total, completed=len(failed) - num_failed, failed=num_failed)

    async def _answer_all(self) -> None:
        """Run the lines without an answer, many at once."""
        lines = self.store.lines(self.batch, self.max_lines)
        running: set[asyncio.Task[None]] = set()
        try:
            while few := await asyncio.to_thread(_next_few, lines):
                for line in few:
                    if isinstance(line, BatchResult) or line.id in self._answered:
                        continue
                    self._num_characters += len(line.text)
                    running.add(asyncio.create_task(self._answer_one(line)))
                    while len(running) >= _LINES_AT_ONCE or (running and self._num_characters > _BYTES_AT_ONCE):
                        running = await _first_done(running)
            while running:
                running = await _first_done(running)
        finally:
            await _end(running)

    async def _answer_one(self, line: BatchLine) -> None:
        """Run a line. A line that is lost with a replica runs again while no other lost line does, so that only the
        line that crashes replicas fails."""
        found = await self.answer(line)
        if isinstance(found, ApiError):
            async with self._alone:
                for _ in range(_MOST_LOSSES):
                    found = await self.answer(line)
                    if not isinstance(found, ApiError):
                        break
        self._num_characters -= len(line.text)
        self._keep(line.result(found.status, found.body) if isinstance(found, ApiError) else found)

    def _keep(self, result: BatchResult) -> None:
        self._answered.add(result.id)
        self._unsaved.append(result.json_line().encode())
        self._num_unsaved_bytes += len(self._unsaved[-1])
        if self._num_unsaved_bytes > _BYTES_AT_ONCE:
            self._must_save.set()
        completed, failed = self._counts.completed + (not result.failed), self._counts.failed + result.failed
        self._counts = replace(self._counts, completed=completed, failed=failed)

    async def _keep_saving(self) -> None:
        """Save new results until the work has ended, and then the last results. Do not cancel this: a cancelled write
        goes on in its thread, and may end after later writes."""
        start_s = time.monotonic()
        while not self._has_ended:
            pause_s = max(_SAVE_AFTER_S, _SAVE_SHARE * (time.monotonic() - start_s))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._must_save.wait(), pause_s)
            self._must_save.clear()
            await self._save_results()
        await self._save_results()

    async def _save_results(self) -> None:
        """Save new results first, then the counts: the next runner counts results and ignores the saved counts."""
        if self._unsaved:
            results, self._unsaved, self._num_unsaved_bytes = self._unsaved, [], 0
            await asyncio.to_thread(self.store.add_results, self.batch.id, results)
            await self._save(request_counts=self._counts)

    async def _stop_asked(self) -> None:
        while self._now() < self.batch.expires_at:
            if await asyncio.to_thread(self.store.cancel_asked_at, self.batch.id) is not None:
                return
            await asyncio.sleep(_STOP_POLL_S)

    async def _finalized(self) -> dict[str, Any]:
        """Write the output and the error file. A repetition writes the same files."""

        def written() -> dict[str, Any]:
            self._read_results()
            now, cancelling_at = self._now(), self.store.cancel_asked_at(self.batch.id)
            left: Iterable[bytes] = ()
            if len(self._answered) >= self.batch.request_counts.total:
                ended: dict[str, Any] = {"status": "completed", "completed_at": now}
            elif cancelling_at is None:
                ended = {"status": "expired", "expired_at": now}
                left = self._unanswered("batch_expired", "the completion window ended")
            else:
                ended = {"status": "cancelled", "cancelling_at": cancelling_at, "cancelled_at": now}
                left = self._unanswered("batch_cancelled", "the batch was cancelled")
            answers = (line for _, failed, line in self.store.results(self.batch.id) if not failed)
            failures = (line for _, failed, line in self.store.results(self.batch.id) if failed)
            ended["output_file_id"] = self._write("output", answers)
            ended["error_file_id"] = self._write("errors", itertools.chain(failures, left))
            return ended | {"request_counts": self._counts}

        return await asyncio.to_thread(written)

    def _unanswered(self, code: str, reason: str) -> Iterator[bytes]:
        """Yield the error lines of requests that were not answered."""
        for line in self.store.lines(self.batch, self.max_lines):
            if isinstance(line, BatchLine) and line.id not in self._answered:
                yield line.unanswered(code, f"This request was not answered before {reason}.").json_line().encode()

    def _write(self, kind: Any, lines: Iterable[bytes]) -> str | None:
        """Write the lines to a file and return its id; return None where there are no lines."""
        lines = iter(lines)
        first = next(lines, None)
        if first is None:
            return None
        file_id = self.store.output_file_id(self.batch.id, kind)
        name = f"{self.batch.id}_{kind}.jsonl"
        with self.store.new_file(name, "batch_output", file_id=file_id) as file:
            file.content.writelines(itertools.chain([first], lines))
        return file_id

    async def _save(self, **changes: Any) -> None:
        self.batch = replace(self.batch, **changes)
        await asyncio.to_thread(self.store.save, self.batch)

    def _now(self) -> int:
        return int(self.store.clock())


def _next_few(lines: Iterator[BatchLine | BatchResult]) -> list[BatchLine | BatchResult]:
    """Read some lines, of about a megabyte in all or a single longer line."""
    few: list[BatchLine | BatchResult] = []
    num_characters = 0
    for line in lines:
        few.append(line)
        num_characters += len(line.text) if isinstance(line, BatchLine) else 0
        if num_characters >= _CHARACTERS_READ or len(few) >= _LINES_READ:
            break
    return few


async def _first_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a task is done, and return the others. Raises the error of a task."""
    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
