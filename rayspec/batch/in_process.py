"""Runs a job in this process: it reads the rows and completes them with one engine. Needs no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rayspec.batch.documents import read_piece
from rayspec.batch.rows import Row
from rayspec.batch.scan import Order, Scan, Source, numbers_by_piece, scan_of, scan_pieces, sort_key
from rayspec.decode.engine_loop import LoopThread
from rayspec.types import EngineStats

if TYPE_CHECKING:
    from rayspec.pool.supervisor import EnginePool
    from rayspec.pool.worker import EngineFactory, LoadedEngine

_JOIN_S = 10.0


class LocalBackend:
    """Where a job reads and completes its rows: in this process, one row after another."""

    def session(self) -> AbstractContextManager[None]:
        """Return the block in which all other methods are called."""
        return nullcontext()

    def scan(self, source: Source) -> Scan:
        """Return the wanted rows of the input, in order, without their documents and messages."""
        return scan_of(scan_pieces(source.pieces, 0, source.columns, source.limit), source)

    def rows(self, source: Source, left: pa.Table, order: Order) -> Generator[Row]:
        """Read and yield the rows of a scan. An order other than that of the input needs memory for all of them."""
        rows = (
            row
            for index, numbers in sorted(numbers_by_piece(left).items())
            for _, row in read_piece(source.pieces[index], source.columns, numbers)
        )
        yield from rows if order == "input" else sorted(rows, key=lambda row: sort_key(row, order))

    def pool(self, factory: EngineFactory, *, max_restarts: int) -> LocalPool | EnginePool:
        """Return the engines, which are not loaded yet. An engine of this process that dies is not started again."""
        return LocalPool(factory)


class LocalPool:
    """One engine in this process, with the interface of a pool. Rows that come before it is loaded wait for it."""

    def __init__(self, factory: EngineFactory) -> None:
        self._factory = factory
        self._engine: LoadedEngine | None = None
        self._is_draining = False
        self._is_loaded = asyncio.Event()
        self._thread = LoopThread("rayspec-rows")

    def begin(self) -> Any:
        """Load the engine and return all options in force. Raises ConfigError and CheckpointError."""
        self._engine = self._factory.load(self._factory.engine)
        self._thread.call_soon(self._is_loaded.set)
        return self._engine.info

    def submit(self, item: Row) -> Future[Row]:
        """Return a future of the completed row. It is cancelled if the engine takes no more rows."""
        return self._thread.start(self._complete(item))

    async def _complete(self, row: Row) -> Row:
        await self._is_loaded.wait()
        if self._engine is None or self._is_draining:
            raise asyncio.CancelledError
        completed: Row = await self._engine.handle(row, lambda _: None)
        return completed

    def drain(self) -> None:
        """Take no more rows. Rows that the engine has go on."""
        self._is_draining = True

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.client.stats

    def stop(self) -> None:
        """End the engine and the thread. Later calls do nothing."""
        self._thread.close(self._stop_engine, _JOIN_S)

    kill = stop

    async def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
