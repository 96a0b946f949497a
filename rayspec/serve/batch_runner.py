"""Runs batches in a deployment of one replica. All state is in the store, from which the next runner goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import reprlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Literal

import msgspec
from ray.serve.exceptions import DeploymentUnavailableError

from rayspec.errors import reason_of
from rayspec.machine import return_large_blocks
from rayspec.openai.answer import end_tasks
from rayspec.openai.batch import (
    FINAL,
    LARGE_LINE,
    Batch,
    BatchError,
    BatchErrors,
    BatchLine,
    BatchResult,
    RequestCounts,
)
from rayspec.openai.places import Places
from rayspec.openai.protocol import ApiError, InvalidRequestError
from rayspec.openai.responses import json_body
from rayspec.serve.access import BUSY, Refused
from rayspec.serve.batch_store import STORE_ERRORS, BatchStore
from rayspec.serve.calls import Deadline, fetch
from rayspec.serve.options import ServeOptions
from rayspec.serve.watch import replicas_of
from rayspec.types import ConfigError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_SAVE_AFTER_S = 1.0
_SAVE_SHARE = 0.01  # of a batch's run time so far: results have few parts, and few lines run again after a loss
_SWEPT_AGE_S = 3600.0
_MOST_RUNS = 4  # batches at once; the others wait
_MOST_CLIENTS = 16  # batches at once if each is the only one of its client, and one more that only has to be ended
_LINES_AT_ONCE = 1024
_BYTES_AT_ONCE = 8 * 2**20  # of a batch's lines, of its results that are not saved yet, and of all large lines
_MOST_LOSSES = 3  # of a line, while no other lost line runs; then the line fails
_MOST_ERRORS = 100  # reported for an input file


class BatchRunner:
    """Runs all batches of the folder `options.batches`, a few at once, until its event loop ends. While the runner of
    another server has the folder's lock, it waits. models: Serve's handles, by the ids that lines use."""

    def __init__(self, options: ServeOptions, models: Mapping[str, Any]) -> None:
        assert options.batches is not None
        return_large_blocks()
        self._max_lines, self._models = options.max_batch_lines, dict(models)
        self._model_of = options.model_of
        self._store = BatchStore.at(options.batches)
        self._num_places = {one.model_id: one.engine.num_seqs for one in options.llm_configs}
        self._places = {name: Places(most, least=1) for name, most in self._num_places.items()}
        self._large = Places(_BYTES_AT_ONCE)  # parsed, a line takes several times as much memory
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, tuple[Batch, str]] = {}  # that wait or run, by id, with their clients
        self._ended: set[str] = set()  # the ids of batches
        self._lock: IO[bytes] | None = None
        self._is_waiting, self._has_told = True, False
        self._woken = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def wake(self) -> None:
        self._woken.set()

    def __del__(self) -> None:
        for task in (self._task, *self._runs.values()) if hasattr(self, "_task") else ():
            task.cancel()

    async def _keep(self) -> None:
        """Lock the folder, and start its batches that have not ended."""
        while True:
            try:
                if self._is_waiting:
                    self._lock = await asyncio.to_thread(self._store.lock)
                    self._is_waiting = False
                    await asyncio.to_thread(self._store.sweep, _SWEPT_AGE_S)
                self._start(await asyncio.to_thread(self._waiting))
            except ConfigError as error:
                logger.log(logging.DEBUG if self._has_told else logging.WARNING, "the batches wait: %s", error)
                self._has_told = True
            except STORE_ERRORS as error:  # tried again, as below
                logger.warning("the batches cannot be looked at now: %s", reason_of(error))
            except Exception:
                logger.exception("the batches cannot be looked at now")
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK_EVERY_S)
            self._woken.clear()

    def _start(self, waiting: Iterable[tuple[Batch, bool]]) -> None:
        """Start batches: the cancelled and expired, then in turn those of clients with the fewest, the oldest first.
        Each of up to `_MOST_CLIENTS` clients has one at once."""
        held = Counter(self._known[name][1] for name in self._runs)
        ranked = []
        for batch, is_over in waiting:
            client = self._known[batch.id][1]
            ranked.append((not is_over, held[client], batch))
            held[client] += 1
        for waits, rank, batch in sorted(ranked, key=lambda one: one[:2]):
            if len(self._runs) < (_MOST_RUNS if waits and rank else _MOST_CLIENTS + (not waits)):
                self._runs[batch.id] = asyncio.create_task(self._run(batch))

    def _waiting(self) -> list[tuple[Batch, bool]]:
        """Return the batches that have not ended and do not run, and whether they only have to be ended."""
        waiting = []
        for name in self._store.batch_ids():
            if name in self._runs or name in self._ended:
                continue
            with suppress(InvalidRequestError):  # deleted, or its first state is not written yet
                if name not in self._known:
                    self._known[name] = self._store.saved(name), self._store.client(name)
                batch = self._known[name][0]
                if batch.status in FINAL:
                    self._ended.add(name)
                    del self._known[name]
                else:
                    is_over = batch.expires_at <= self._store.clock() or self._store.cancel_asked_at(name) is not None
                    waiting.append((batch, is_over))
        return waiting

    async def _run(self, batch: Batch) -> None:
        try:
            batch = await asyncio.to_thread(self._store.saved, batch.id)  # another server may have ended it meanwhile
            if batch.status not in FINAL:
                await BatchRun(batch, self._store, self._max_lines, partial(self._answer, batch.id)).run()
            self._woken.set()
        except STORE_ERRORS as error:  # tried again, as below
            logger.warning("batch %s cannot go on now: %s", batch.id, reason_of(error))
        except Exception:
            logger.exception("batch %s cannot go on now", batch.id)
        finally:
            self._known.pop(batch.id, None)  # first: the thread of `_waiting` looks at `_runs` before
            self._runs.pop(batch.id, None)

    async def _answer(self, batch_id: str, line: BatchLine) -> BatchResult | ApiError:
        """Return a line's result, or an ApiError if it was lost. Wait while the model is busy; batches take turns."""
        model = self._model_of.get(line.model or "") or next(iter(self._models))
        handle, places = self._models[model], self._places[model]
        num_running = len(replicas_of(handle.app_name, handle.deployment_name))
        places.resize(self._num_places[model] * max(1, num_running))
        size = len(line.text)
        large = self._large.take(batch_id, size) if size > LARGE_LINE else nullcontext()
        async with large, places.take(batch_id):
            while True:
                try:
                    found: BatchResult = await fetch(handle.answer.remote(line, batch_id), Deadline(None))
                except Refused as refused:  # noqa: PERF203
                    if refused.error is not BUSY and not isinstance(refused.__cause__, DeploymentUnavailableError):
                        return refused.error
                    await asyncio.sleep(1.0)
                else:
                    return found


@dataclass(slots=True)
class BatchRun:
    """Runs one batch to its end, from any saved state. answer: returns the result of a line, or an ApiError where the
    line was lost with its replica."""

    batch: Batch
    store: BatchStore
    max_lines: int
    answer: Callable[[BatchLine], Awaitable[BatchResult | ApiError]]
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_bytes: int = 0  # of the lines that run
    _answered: set[str] = field(default_factory=set)
    _num_failed: int = 0
    _unsaved: list[bytes] = field(default_factory=list)
    _num_unsaved_bytes: int = 0

    async def run(self) -> None:
        try:
            if self.batch.status == "validating":
                await self._save(**await asyncio.to_thread(self._validated))
            if self.batch.status == "in_progress":
                await self._answer_lines()
                await self._save(status="finalizing", finalizing_at=self._now())
            if self.batch.status == "finalizing":
                await self._save(**await asyncio.to_thread(self._finalized))
        except InvalidRequestError as error:  # the file, or this batch, was deleted
            gone = BatchError(code="file_not_found", message=f"input_file_id: {error}", param="input_file_id")
            await self._save(**await asyncio.to_thread(self._written), **self._failed([gone]))

    def _validated(self) -> dict[str, Any]:
        """Read all lines once, and collect the errors of the first lines that are not requests of this batch."""
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

    def _failed(self, errors: list[BatchError]) -> dict[str, Any]:
        return {"status": "failed", "failed_at": self._now(), "errors": BatchErrors(data=errors)}

    async def _answer_lines(self) -> None:
        """Run the unanswered lines, many at once, until all are answered or the batch is cancelled or out of time."""
        await asyncio.to_thread(self._read_results)
        lines, running, has_more = self._unanswered(), set[asyncio.Task[None]](), True
        stop = asyncio.create_task(self._stop_asked())
        start_s = saved_s = time.monotonic()
        try:
            while (has_more or running) and not stop.done():
                is_full = len(running) >= _LINES_AT_ONCE or self._num_bytes > _BYTES_AT_ONCE
                if has_more and not (running and is_full):
                    line = await asyncio.to_thread(next, lines, None)
                    has_more = line is not None
                    if line is not None:
                        self._num_bytes += len(line.text)
                        running.add(asyncio.create_task(self._answer_one(line)))
                else:
                    waits = {*running, stop}
                    done, _ = await asyncio.wait(waits, timeout=_SAVE_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    running -= done
                pause_s = max(_SAVE_AFTER_S, _SAVE_SHARE * (saved_s - start_s))
                if self._num_unsaved_bytes > _BYTES_AT_ONCE or time.monotonic() - saved_s > pause_s:
                    await self._save_results()
                    saved_s = time.monotonic()
        finally:
            await end_tasks([*running, stop])
            await self._save_results()
        if stop.done() and not stop.cancelled():
            stop.result()

    async def _answer_one(self, line: BatchLine) -> None:
        """Run a line. Lines that are lost with a replica run again one by one, so that only the culprit fails."""
        found = await self.answer(line)
        if isinstance(found, ApiError):
            async with self._alone:
                for _ in range(_MOST_LOSSES):
                    found = await self.answer(line)
                    if not isinstance(found, ApiError):
                        break
        self._num_bytes -= len(line.text)
        result = line.result(found.status, json_body(found)) if isinstance(found, ApiError) else found
        self._answered.add(result.id)
        self._num_failed += result.failed
        self._unsaved.append(result.json_line().encode())
        self._num_unsaved_bytes += len(self._unsaved[-1])

    async def _stop_asked(self) -> None:
        while self._now() < self.batch.expires_at:
            if await asyncio.to_thread(self.store.cancel_asked_at, self.batch.id) is not None:
                return
            await asyncio.sleep(0.5)

    async def _save_results(self) -> None:
        """Save new results first, then the counts: the next runner counts results and ignores the saved counts."""
        if self._unsaved:
            results, self._unsaved, self._num_unsaved_bytes = self._unsaved, [], 0
            await asyncio.to_thread(self.store.add_results, self.batch.id, results)
            await self._save(request_counts=self._counts)

    def _read_results(self) -> None:
        failed = {name: has_failed for name, has_failed, _ in self.store.results(self.batch.id)}
        self._answered, self._num_failed = set(failed), sum(failed.values())

    @property
    def _counts(self) -> RequestCounts:
        completed = len(self._answered) - self._num_failed
        return RequestCounts(total=self.batch.request_counts.total, completed=completed, failed=self._num_failed)

    def _unanswered(self) -> Iterator[BatchLine]:
        for line in self.store.lines(self.batch):  # the limit may be lower now than when the batch began
            if isinstance(line, BatchLine) and line.id not in self._answered:
                yield line

    def _finalized(self) -> dict[str, Any]:
        """Return how the batch ends, with its answers."""
        self._read_results()
        now, cancelling_at = self._now(), self.store.cancel_asked_at(self.batch.id)
        code, reason = "batch_cancelled", "the batch was cancelled"
        if len(self._answered) >= self.batch.request_counts.total:
            ended: dict[str, Any] = {"status": "completed", "completed_at": now}
        elif cancelling_at is None:
            ended = {"status": "expired", "expired_at": now}
            code, reason = "batch_expired", "the completion window ended"
        else:
            ended = {"status": "cancelled", "cancelling_at": cancelling_at, "cancelled_at": now}
        message = f"This request was not answered before {reason}."
        lines = self._unanswered() if ended["status"] != "completed" else ()
        return ended | self._written(line.unanswered(code, message).json_line().encode() for line in lines)

    def _written(self, left: Iterable[bytes] = ()) -> dict[str, Any]:
        """Write the output and the error file, the same each time. left: errors of lines without an answer."""
        answers = (line for _, failed, line in self.store.results(self.batch.id) if not failed)
        failures = (line for _, failed, line in self.store.results(self.batch.id) if failed)
        return {
            "output_file_id": self._write("output", answers),
            "error_file_id": self._write("errors", itertools.chain(failures, left)),
            "request_counts": self._counts,
        }

    def _write(self, kind: Literal["output", "errors"], lines: Iterator[bytes]) -> str | None:
        """Write the lines to a file and return its id; return None where there are no lines."""
        first = next(lines, None)
        if first is None:
            return None
        file_id = self.store.output_file_id(self.batch.id, kind)
        with self.store.new_file(file_id, f"{self.batch.id}_{kind}.jsonl", "batch_output") as content:
            content.writelines(itertools.chain([first], lines))
        return file_id

    async def _save(self, **changes: Any) -> None:
        self.batch = msgspec.structs.replace(self.batch, **changes)
        await asyncio.to_thread(self.store.save, self.batch)

    def _now(self) -> int:
        return int(self.store.clock())
