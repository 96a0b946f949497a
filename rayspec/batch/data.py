"""Ray Data around an engine: documents are read in tasks, and thin clients carry them to the engine's actor.

The engine is never placed by Ray Data: its actor exists before the dataset runs and outlives it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import ray.data
from ray.exceptions import RayActorError

from rayspec.batch.documents import Columns, DuplicateCheck, as_duplicate, expand, read_file
from rayspec.batch.engine_actor import answer
from rayspec.batch.quarantine import EngineKilledError
from rayspec.batch.rows import Row
from rayspec.batch.supervisor import DrainingError
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import RayspecError

_READ_CPUS = 0.5
_CLIENT_CPUS = 0.0  # it only waits; and on one CPU there must be a whole one for Ray Data's own tasks
_MAX_READ_TASKS = 64  # a task takes Ray Data 0.2 s, however little it does: small files share one
_ROWS_PER_TASK = 32
_ROWS_PER_BLOCK = 4  # a block leaves a client when its last row is done: small blocks keep results coming
_MIN_ROWS_IN_FLIGHT = 32
_ROWS_SEEN_AT_ONCE = 4096
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # Ray Data's, in this process
_READERS_END_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


def read_dataset(inputs: Sequence[str], columns: Columns, *, limit: int | None = None) -> ray.data.Dataset:
    """The rows of files, folders and patterns; in Ray Data a row is a dict with the fields of `Row`.

    Relative paths are those of this process: where a task runs, the current folder is another one.
    """
    files = [asdict(file) for file in expand(inputs).files]
    blocks = ray.data.from_items(files, override_num_blocks=max(1, min(len(files), _MAX_READ_TASKS)))
    rows = blocks.flat_map(_read, fn_kwargs={"columns": columns}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]
    if limit is None:
        return rows
    ray.data.DataContext.get_current().execution_options.preserve_order = True  # the same rows every time
    return rows.limit(limit)


def dataset_of(rows: Sequence[Row]) -> ray.data.Dataset:
    """Rows that are here, as `read_dataset` would give them."""
    num_blocks = max(1, min(len(rows) // _ROWS_PER_TASK, _MAX_READ_TASKS))
    return ray.data.from_items([asdict(row) for row in rows], override_num_blocks=num_blocks)


def quieten() -> None:
    """Ray Data's own progress and log lines, which go to the terminal that ours are on."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


@contextmanager
def reading() -> Iterator[None]:
    """For a block that reads datasets: at its end the threads that Ray Data reads them with have ended.

    They outlive a dataset's iterator by a moment, and one that comes to Ray while it is shut down ends the process at
    once, with a code of its own. Close what was not read to its end inside the block.
    """
    try:
        yield
    finally:
        deadline = time.monotonic() + _READERS_END_WITHIN_S
        for thread in reader_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := reader_threads():
            logger.warning("Ray Data has not ended: %s", ", ".join(sorted(thread.name for thread in left)))


def reader_threads() -> list[threading.Thread]:
    """Those that Ray Data reads datasets with in this process at the moment."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(_READER_THREADS)]


def seen_rows(documents: ray.data.Dataset) -> Generator[Row]:
    """The rows without their documents and messages, in input order."""
    options = ray.data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        rows = documents.map(_without_text, num_cpus=_READ_CPUS)
        with closing(iter(rows.iter_batches(batch_size=_ROWS_SEEN_AT_ONCE, batch_format="pyarrow"))) as batches:  # type: ignore[type-var]
            batch: Any
            for batch in batches:
                yield from (Row(**fields) for fields in batch.to_pylist())
    finally:
        options.preserve_order = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Which rows of an input are left to do. takes: the ids that are wanted at all. sources: where the rows that are
    done are, by id; another row with such an id becomes an error row. refused: id and source of the rows whose error
    is known already."""

    takes: Callable[[str], bool]
    sources: Mapping[str, str | None] = field(default_factory=dict)
    refused: AbstractSet[tuple[str, str | None]] = frozenset()

    def of(self, row: Row) -> Row | None:
        """The row, as it is or as an error row. None if there is nothing left to do for the row."""
        if not self.takes(row.id) or (row.id, row.source) in self.refused:
            return None
        if row.id not in self.sources or row.error_kind is not None:
            return row
        first = self.sources[row.id]
        return None if first in (None, row.source) else as_duplicate(row, first)


def remaining_rows(documents: ray.data.Dataset, remaining: Remaining) -> ray.data.Dataset:
    """The rows that are left to do."""
    kept = ray.put(remaining)  # once, not with every task
    # By row, as the rows are read: Ray Data then does both in one task, which a cluster of one CPU has room for. In a
    # list, or Ray would fetch it for every row.
    return documents.flat_map(_remaining, fn_kwargs={"kept": [kept]}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]


def complete_dataset(documents: ray.data.Dataset, engine: Any, *, num_wanted: int = 0) -> ray.data.Dataset:
    """The rows of `documents` completed by an actor, as `completed_rows` reads them, in no particular order.

    engine: an EngineSupervisor's actor, or an EngineWorker's. num_wanted: rows that keep the engine busy.
    """
    num_blocks = -(-max(num_wanted, _MIN_ROWS_IN_FLIGHT) // _ROWS_PER_BLOCK)
    return through_client(documents, EngineClient, [engine], rows_per_block=_ROWS_PER_BLOCK, num_blocks=num_blocks)


def through_client(
    rows: ray.data.Dataset, client: Any, arguments: Sequence[Any], *, rows_per_block: int, num_blocks: int
) -> ray.data.Dataset:
    """The rows as an asynchronous client returns them, which is made in one actor and waits for many rows at a time.

    client: a class whose instances are called with a row. num_blocks: that are under way at a time.
    """
    pool = ray.data.ActorPoolStrategy(
        size=1, max_tasks_in_flight_per_actor=num_blocks, max_concurrent_calls_per_actor=num_blocks
    )
    blocks = rows.repartition(target_num_rows_per_block=rows_per_block)
    return blocks.map(client, fn_constructor_args=list(arguments), compute=pool, num_cpus=_CLIENT_CPUS)


def completed_rows(results: ray.data.Dataset) -> Generator[Row]:
    """Runs the dataset until it is closed; rows come as their blocks finish."""
    with closing(iter(results.iter_rows())) as rows:  # type: ignore[type-var]
        for fields in rows:
            yield Row(**fields)


class EngineClient:
    """Waits for the engine on behalf of a dataset's rows. Of several rows with one id the first that comes counts; the
    others become errors.

    When no engine can take a row any more, the row says so, and the dataset does not fail: rows of the same blocks that
    are done are not lost.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._check = DuplicateCheck()

    async def __call__(self, fields: dict[str, Any]) -> dict[str, Any]:
        row = Row(**fields)
        if row.error_kind is None:
            row = self._check(row)
        return asdict(row if row.error_kind is not None else await self._completed(row))

    async def _completed(self, row: Row) -> Row:
        try:
            result: Row = await answer(self._engine.handle.remote(row))
        except (EngineKilledError, DrainingError) as error:
            return row.failed(error)
        except (RayspecError, RayActorError) as error:
            return row.failed(EngineDeadError(str(error)))
        return result


def _read(file: dict[str, Any], columns: Columns) -> Iterator[dict[str, Any]]:
    yield from map(asdict, read_file(file["path"], columns, name=file["name"]))


def _without_text(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"document": None, "messages": None}


def _remaining(fields: dict[str, Any], kept: Sequence[ray.ObjectRef[Remaining]]) -> Iterator[dict[str, Any]]:
    left = _fetched(kept[0]).of(Row(**fields))
    if left is not None:
        yield asdict(left)


@lru_cache(maxsize=1)
def _fetched(kept: ray.ObjectRef[Remaining]) -> Remaining:
    """Once in a process."""
    remaining: Remaining = ray.get(kept)
    return remaining
