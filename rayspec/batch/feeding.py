"""Streams rows through a pool of engines: one thread reads them, the engines complete them in any order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import partial

from rayspec.batch.documents import DuplicateCheck
from rayspec.batch.rows import Row
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import RayspecError, RequestError

_JOIN_S = 10.0

Submit = Callable[[Row], Future[Row]]


@contextmanager
def completing(submit: Submit, rows: Iterator[Row], *, num_wanted: int) -> Iterator[Iterator[Row]]:
    """Give the block an iterator over completed rows, in no particular order. Reading begins with the block. If several
    rows have the same id, the first is completed and the others become errors.

    submit: gives a row to the engines. num_wanted: number of rows under way at a time. When the engines take no more
    rows, reading ends. The iterator still yields the rows under way, some of which are not final (`Row.is_final`). It
    raises the errors of reading.
    """
    feeder = _Feeder(submit, rows, num_wanted)
    thread = threading.Thread(target=feeder.feed, name="rayspec-feeder", daemon=True)
    thread.start()
    try:
        yield feeder.completed()
    finally:
        feeder.end()
        thread.join(_JOIN_S)


class _Feeder:
    """Reads rows and submits them to the pool while fewer than `num_wanted` rows are under way."""

    def __init__(self, submit: Submit, rows: Iterator[Row], num_wanted: int) -> None:
        self._submit, self._rows = submit, rows
        self._room = threading.Semaphore(num_wanted)
        self._done: queue.SimpleQueue[Row | Exception | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_ended = False
        self._num_given = 0

    def feed(self) -> None:
        check = DuplicateCheck()
        try:
            for row in self._rows:
                self._room.acquire()
                with self._lock:
                    if self._is_ended:
                        return
                    self._num_given += 1
                checked = row if row.error_kind is not None else check(row)
                if checked.error_kind is not None:
                    self._done.put(checked)
                else:
                    self._submit(row).add_done_callback(partial(self._take, row))
        except Exception as error:  # noqa: BLE001 - raised where rows are taken
            self._done.put(error)
        finally:
            self._done.put(None)
            with suppress(AttributeError, RuntimeError):
                self._rows.close()  # type: ignore[attr-defined]

    def _take(self, row: Row, done: Future[Row]) -> None:
        try:
            result = done.result()
        except RequestError as error:
            result = row.failed(error)
        except (RayspecError, CancelledError) as error:
            result = row.failed(EngineDeadError(str(error)))
        except Exception as error:  # noqa: BLE001 - raised where rows are taken
            self._done.put(error)
            return
        if not result.is_final:
            self.end()
        self._done.put(result)

    def completed(self) -> Iterator[Row]:
        num_taken = 0
        while not self._is_ended or num_taken < self._num_given:
            match self._done.get():
                case None:
                    self.end()
                case Exception() as error:
                    raise error
                case row:
                    num_taken += 1
                    self._room.release()
                    yield row

    def end(self) -> None:
        """Give no more rows to the pool."""
        with self._lock:
            self._is_ended = True
        self._room.release()
