"""Where a job reads and completes its rows: in this process, with one engine and without Ray.

The input is first scanned for ids, places and hashes, and compared with the rows that are done.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayspec.batch.documents import Piece, as_duplicate, pieces_of, read_piece
from rayspec.batch.rows import Columns, Row
from rayspec.decode.engine_loop import LoopThread
from rayspec.types import ConfigError, EngineStats

if TYPE_CHECKING:
    from rayspec.pool.supervisor import EnginePool
    from rayspec.pool.worker import EngineFactory, LoadedEngine

Changed = Literal["keep", "redo", "fail"]
"""What to do about rows whose text has changed since they were done: keep their results, do them again, or fail."""
Order = Literal["input", "longest", "prefix"]
"""The order of the rows. longest: long inputs first, so that no long row is the last. prefix: inputs that begin alike
are neighbours and share keys and values in the KV cache. Both orders sort all rows before an engine gets the first."""

SCAN_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "input_hash": pa.string(),
        "piece": pa.int32(),
        "number": pa.int64(),
        "error": pa.string(),
    }
)
_ROWS_AT_ONCE = 2**16
_ROWS_PER_PIECE = 32  # of rows in memory
_PREFIX_CHARS = 4096
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a job: those in `files`, or else `rows`. refused: rows that failed before they could be
    read. limit: number of rows to take from the beginning. sample: share of these rows to take, chosen by a hash of
    their ids, so that every run takes the same rows."""

    files: Sequence[Piece] = ()
    columns: Columns = field(default_factory=Columns)
    rows: Sequence[Row] = ()
    refused: Sequence[Row] = ()
    limit: int | None = None
    sample: float | None = None

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the input, for read tasks."""
        starts = range(0, len(self.rows), _ROWS_PER_PIECE)
        return pieces_of(self.files) or [Piece(rows=tuple(self.rows[n : n + _ROWS_PER_PIECE])) for n in starts]

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the input are wanted."""
        return self.limit is None and self.sample is None


def in_sample(row_id: str, share: float) -> bool:
    digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * 2**32


def sort_key(row: Row, order: Order) -> int | str:
    """Return the key by which rows are sorted for an order that is not that of the input."""
    text = row.messages or row.document or ""
    return -len(text) if order == "longest" else text[:_PREFIX_CHARS]


def numbers_by_piece(left: pa.Table) -> dict[int, frozenset[int]]:
    """Return the numbers of the rows of a scan, by the index of their piece."""
    grouped = left.group_by("piece").aggregate([("number", "list")])
    return dict(zip(grouped["piece"].to_pylist(), map(frozenset, grouped["number_list"].to_pylist()), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The wanted rows of an input, in order. rows: a table of SCAN_SCHEMA without errors; `piece` and `number` say
    where a row is, and `number` is 0 where the piece is one row. errors: rows that could not be read.

    A row takes the memory of its id and about 40 bytes.
    """

    rows: pa.Table
    pieces: Sequence[Piece]
    errors: Sequence[Row] = ()

    def row(self, index: int) -> Row:
        """Return the row with this index, without its text."""
        fields = self.rows.slice(index, 1).to_pylist()[0]
        source = self.pieces[fields["piece"]].source(fields["number"])
        return Row(id=fields["id"], source=source, input_hash=fields["input_hash"])


def scan_pieces(pieces: Sequence[Piece], first: int, columns: Columns, limit: int | None) -> Iterator[pa.Table]:
    """Yield tables of the rows of some pieces, up to `limit` rows. first: the index of the first of these pieces."""
    num_left = sys.maxsize if limit is None else limit
    for index, piece in enumerate(pieces, start=first):
        rows = ((number, row.without_input()) for number, row in read_piece(piece, columns, with_text=False))
        while some := list(itertools.islice(rows, min(_ROWS_AT_ONCE, num_left))):
            num_left -= len(some)
            fields = {
                "id": [row.id for _, row in some],
                "input_hash": [row.input_hash for _, row in some],
                "piece": np.full(len(some), index, np.int32),
                "number": [number for number, _ in some],
                "error": [json.dumps(asdict(row)) if row.error_kind is not None else None for _, row in some],
            }
            yield pa.table(fields, schema=SCAN_SCHEMA)


def scan_of(tables: Iterable[pa.Table], source: Source) -> Scan:
    """Return the wanted rows of tables of `scan_pieces`, which are in order."""
    found, num_left = [SCAN_SCHEMA.empty_table()], sys.maxsize if source.limit is None else source.limit
    for table in tables:
        found.append(table.slice(0, num_left))
        num_left -= len(found[-1])
        if num_left == 0:
            break
    rows = pa.concat_tables(found)
    if (share := source.sample) is not None:
        rows = rows.filter(pa.array([in_sample(row_id, share) for row_id in rows["id"].to_pylist()], pa.bool_()))
    errors = [Row(**json.loads(error)) for error in rows["error"].drop_null().to_pylist()]
    return Scan(rows=rows.filter(pc.is_null(rows["error"])).combine_chunks(), pieces=source.pieces, errors=errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An input compared with the rows that are done.

    left: indices of the scanned rows that are not done. errors: rows that could not be read, and rows with the id of
    another row. changed: indices of the scanned rows that are done and now have another text, by their ids. absent: ids
    of done rows that the input no longer has.
    """

    left: Sequence[int]
    errors: Sequence[Row]
    changed: Mapping[str, int]
    absent: Sequence[str]

    def check(self, changed: Changed) -> None:
        """Check the input for changes. Raises ConfigError if it has changed and `changed` is "fail"."""
        if changed == "fail" and (self.changed or self.absent):
            raise ConfigError(
                f"option 'changed' is 'fail', and {self.describe()}: pass --changed keep or redo, or choose another "
                "output folder"
            )

    def describe(self) -> str:
        """Return the changes in words, with some of the ids. The text is empty if there are none."""
        parts = (
            (list(self.changed), "have other text than when they were done"),
            (self.absent, "of the output are no longer in the input"),
        )
        return ", and ".join(
            f"{len(ids)} rows {what} ({', '.join(map(repr, ids[:_NUM_NAMED]))}{', ...' * (len(ids) > _NUM_NAMED)})"
            for ids, what in parts
            if ids
        )


def compared(scan: Scan, done: pa.Table, *, is_whole: bool = True) -> Comparison:
    """Compare an input with the rows that are done.

    done: `id` and `input_hash` of rows; an unknown hash is null. is_whole: `scan` is of the whole input, so that a done
    row that is not in `scan` is absent from the input.

    Of several rows with the same id, one keeps the id: the row with the text that was done, or else the first. A row
    that stands twice is one row.
    """
    ids, hashes = scan.rows["id"].to_pylist(), scan.rows["input_hash"].to_pylist()
    done_hashes: dict[str, str | None] = dict(zip(done["id"].to_pylist(), done["input_hash"].to_pylist(), strict=True))
    kept: dict[str, int] = {}
    errors = list(scan.errors)
    for index, row_id in enumerate(ids):
        first = kept.setdefault(row_id, index)
        if first == index:
            continue
        row, other = scan.row(index), scan.row(first)
        if row.source == other.source:
            continue
        if row_id in done_hashes and hashes[index] == done_hashes[row_id] != hashes[first]:
            kept[row_id], row, other = index, other, row
        errors.append(as_duplicate(row, other.source))
    changed = {row_id: index for row_id, index in kept.items() if done_hashes.get(row_id) not in (None, hashes[index])}
    return Comparison(
        left=sorted(index for row_id, index in kept.items() if row_id not in done_hashes),
        errors=errors,
        changed=changed,
        absent=[row_id for row_id in done_hashes if row_id not in kept] if is_whole else [],
    )


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
        self._thread.close(self._stop_engine, 10.0)

    kill = stop

    async def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
