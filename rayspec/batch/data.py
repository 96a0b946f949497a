"""Ray Data around an engine: documents are read in tasks, and thin clients carry them to the engine's actor.

The engine is never placed by Ray Data: its actor exists before the dataset runs and outlives it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import ray.data
from ray.exceptions import RayActorError

from rayspec.batch.documents import Columns, Document, DuplicateCheck, duplicate_id, expand, read_file
from rayspec.batch.engine_actor import answer
from rayspec.batch.quarantine import EngineKilledError
from rayspec.batch.results import ResultRow
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
_BY_ENGINE = "by_engine"
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # Ray Data's, in this process
_READERS_END_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


def read_dataset(inputs: Sequence[str], columns: Columns, *, limit: int | None = None) -> ray.data.Dataset:
    """Documents of files, folders and patterns as rows id, source, text, messages, input_hash, error_kind, error.

    Relative paths are those of this process: where a task runs, the current folder is another one.
    """
    files = [asdict(file) for file in expand(inputs).files]
    blocks = ray.data.from_items(files, override_num_blocks=max(1, min(len(files), _MAX_READ_TASKS)))
    rows = blocks.flat_map(_read, fn_kwargs={"columns": columns}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]
    if limit is None:
        return rows
    ray.data.DataContext.get_current().execution_options.preserve_order = True  # the same rows every time
    return rows.limit(limit)


def dataset_of(documents: Sequence[Document]) -> ray.data.Dataset:
    """Documents that are here, as rows that `read_dataset` would give."""
    num_blocks = max(1, min(len(documents) // _ROWS_PER_TASK, _MAX_READ_TASKS))
    return ray.data.from_items([_row(document) for document in documents], override_num_blocks=num_blocks)


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


def seen_rows(documents: ray.data.Dataset) -> Generator[ResultRow]:
    """What is known of the rows without an engine, in input order: id, source, input hash, error."""
    options = ray.data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        rows = documents.map(_without_text, num_cpus=_READ_CPUS)
        with closing(iter(rows.iter_batches(batch_size=_ROWS_SEEN_AT_ONCE, batch_format="pyarrow"))) as batches:  # type: ignore[type-var]
            batch: Any
            for batch in batches:
                yield from map(_seen, batch.to_pylist())
    finally:
        options.preserve_order = before


def seen_row(document: Document) -> ResultRow:
    """The same of a document that is here."""
    return _seen(_row(document))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Which rows of an input are left to do. takes: the ids that are wanted at all. sources: where the rows that are
    done are, by id; another row with such an id becomes an error row. refused: id and source of the rows whose error
    is known already."""

    takes: Callable[[str], bool]
    sources: Mapping[str, str | None] = field(default_factory=dict)
    refused: AbstractSet[tuple[str, str | None]] = frozenset()

    def of(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row, as it is or as an error row. None if there is nothing left to do for the row."""
        row_id, source = row["id"], row["source"]
        if not self.takes(row_id) or (row_id, source) in self.refused:
            return None
        if row_id not in self.sources or row["error_kind"] is not None:
            return row
        first = self.sources[row_id]
        return None if first in (None, source) else row | _as_duplicate(row_id, source, first)


def remaining_rows(documents: ray.data.Dataset, remaining: Remaining) -> ray.data.Dataset:
    """The rows that are left to do."""
    kept = ray.put(remaining)  # once, not with every task
    # By row, as the rows are read: Ray Data then does both in one task, which a cluster of one CPU has room for. In a
    # list, or Ray would fetch it for every row.
    return documents.flat_map(_remaining, fn_kwargs={"kept": [kept]}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]


def complete_dataset(documents: ray.data.Dataset, engine: Any, *, num_wanted: int = 0) -> ray.data.Dataset:
    """The rows of `documents` completed by an actor, as `arrivals` reads them, in no particular order.

    engine: an EngineSupervisor's actor, or an EngineWorker's. num_wanted: rows that keep the engine busy.
    """
    num_blocks = -(-max(num_wanted, _MIN_ROWS_IN_FLIGHT) // _ROWS_PER_BLOCK)
    pool = ray.data.ActorPoolStrategy(
        size=1, max_tasks_in_flight_per_actor=num_blocks, max_concurrent_calls_per_actor=num_blocks
    )
    blocks = documents.repartition(target_num_rows_per_block=_ROWS_PER_BLOCK)
    client: Any = EngineClient  # Ray's annotations do not know of async classes
    return blocks.map(client, fn_constructor_args=[engine], compute=pool, num_cpus=_CLIENT_CPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A row that has come through a dataset. by_engine: an engine was given the row, and the result is final."""

    row: ResultRow
    by_engine: bool


def arrivals(results: ray.data.Dataset) -> Generator[Arrival]:
    """Runs the dataset until it is closed; rows come as their blocks finish."""
    with closing(iter(results.iter_rows())) as rows:  # type: ignore[type-var]
        for row in rows:
            by_engine = row.pop(_BY_ENGINE)
            yield Arrival(row=ResultRow(**row), by_engine=by_engine)


class EngineClient:
    """Waits for the engine on behalf of a dataset's rows. Of several rows with one id the first that comes counts; the
    others become errors.

    When no engine can take a row any more, the row says so, and the dataset does not fail: rows of the same blocks that
    are done are not lost.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._check = DuplicateCheck()

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["error_kind"] is not None:
            return _columns(_seen(row))
        document = self._check(
            Document(id=row["id"], source=row["source"], text=row["text"], messages=_messages(row["messages"]))
        )
        if document.error is not None:
            return _columns(replace(ResultRow.of_error(document.id, document.error), source=document.source))
        try:
            result: ResultRow = await answer(self._engine.handle.remote(document))
        except EngineKilledError as error:
            result = ResultRow.of_error(document.id, error)
        except (RayspecError, RayActorError) as error:
            return _columns(_with_input(_refused(document.id, error), row))
        return _columns(_with_input(result, row)) | {_BY_ENGINE: True}


def _refused(row_id: str, error: RayspecError | RayActorError) -> ResultRow:
    return ResultRow.of_error(row_id, error if isinstance(error, DrainingError) else EngineDeadError(str(error)))


def _with_input(result: ResultRow, row: Mapping[str, Any]) -> ResultRow:
    return replace(result, source=row["source"], input_hash=row["input_hash"])


def _columns(row: ResultRow) -> dict[str, Any]:
    return asdict(row) | {_BY_ENGINE: False}


def _seen(row: Mapping[str, Any]) -> ResultRow:
    """What is known of a row before the engine has seen it."""
    return ResultRow(
        id=row["id"],
        source=row["source"],
        input_hash=row["input_hash"],
        finish_reason="error" if row["error_kind"] is not None else None,
        error_kind=row["error_kind"],
        error=row["error"],
    )


def _messages(column: str | None) -> list[dict[str, str]] | None:
    return json.loads(column) if column is not None else None


def _read(row: dict[str, Any], columns: Columns) -> Iterator[dict[str, Any]]:
    yield from map(_row, read_file(row["path"], columns, name=row["name"]))


def _row(document: Document) -> dict[str, Any]:
    return {
        "id": document.id,
        "source": document.source,
        "text": document.text,
        "messages": json.dumps(document.messages) if document.messages is not None else None,
        "input_hash": document.input_hash,
        "error_kind": document.error.kind if document.error is not None else None,
        "error": str(document.error) if document.error is not None else None,
    }


def _without_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("text", "messages")}


def _remaining(row: dict[str, Any], kept: Sequence[ray.ObjectRef[Remaining]]) -> Iterator[dict[str, Any]]:
    left = _fetched(kept[0]).of(row)
    if left is not None:
        yield left


@lru_cache(maxsize=1)
def _fetched(kept: ray.ObjectRef[Remaining]) -> Remaining:
    """Once in a process."""
    remaining: Remaining = ray.get(kept)
    return remaining


def _as_duplicate(row_id: str, source: str, first: str | None) -> dict[str, Any]:
    error = duplicate_id(row_id, source=source, first=str(first))
    return {"text": None, "messages": None, "input_hash": None, "error_kind": error.kind, "error": str(error)}
