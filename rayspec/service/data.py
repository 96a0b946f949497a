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
from dataclasses import asdict, dataclass, field
from typing import Any

import ray.data
from ray.exceptions import RayActorError

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.service.documents import Columns, Document, duplicate_id, expand, read_file
from rayspec.service.engine_actor import DrainingError
from rayspec.service.locations import Location
from rayspec.service.results import ResultRow

_READ_CPUS = 0.5
_CLIENT_CPUS = 0.0  # it only waits; and on one CPU there must be a whole one for Ray Data's own tasks
_MAX_READ_TASKS = 64  # a task takes Ray Data 0.2 s, however little it does: small files share one
_ROWS_PER_TASK = 32
_ROWS_PER_BLOCK = 4  # a block leaves a client when its last row is done: small blocks keep results coming
_MIN_ROWS_IN_FLIGHT = 32
_BY_ENGINE, _UNDER_WAY = "by_engine", "under_way"
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # Ray Data's, in this process
_READERS_END_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


def read_dataset(inputs: Sequence[str], columns: Columns, *, limit: int | None = None) -> ray.data.Dataset:
    """Documents of files, folders and patterns as rows id, source, text, error_kind, error.

    Relative paths are those of this process: where a task runs, the current folder is another one.
    """
    paths = [{"name": name, "path": Location.parse(name).absolute().name} for name in expand(inputs)]
    files = ray.data.from_items(paths, override_num_blocks=min(len(paths), _MAX_READ_TASKS))
    rows = files.flat_map(_read, fn_kwargs={"columns": columns}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRows:
    """Rows that need not be done again. sources: where the row of each id came from. duplicates: id and source of the
    rows that failed for having the id of another."""

    sources: Mapping[str, str | None] = field(default_factory=dict)
    duplicates: AbstractSet[tuple[str, str | None]] = frozenset()


def without_rows(documents: ray.data.Dataset, done: DoneRows, takes: Callable[[str], bool]) -> ray.data.Dataset:
    """The rows that are not done, and whose id `takes` likes. A row with the id of a row that is done, but from
    elsewhere, becomes an error row."""
    kept = ray.put(done)  # once, not with every task
    return documents.flat_map(_left, fn_kwargs={"done": kept, "takes": takes}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]


def complete_dataset(
    documents: ray.data.Dataset, engine: Any, *, num_wanted: int = 0, one_at_a_time: bool = False
) -> ray.data.Dataset:
    """The rows of `documents` completed by an engine's actor, as `arrivals` reads them, in no particular order.

    num_wanted: rows that keep the engine busy. one_at_a_time: the engine never has more than one row.
    """
    rows_per_block = 1 if one_at_a_time else _ROWS_PER_BLOCK
    num_blocks = 1 if one_at_a_time else -(-max(num_wanted, _MIN_ROWS_IN_FLIGHT) // _ROWS_PER_BLOCK)
    pool = ray.data.ActorPoolStrategy(
        size=1, max_tasks_in_flight_per_actor=num_blocks, max_concurrent_calls_per_actor=num_blocks
    )
    blocks = documents.repartition(target_num_rows_per_block=rows_per_block)
    client: Any = EngineClient  # Ray's annotations do not know of async classes
    return blocks.map(client, fn_constructor_args=[engine], compute=pool, num_cpus=_CLIENT_CPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A row that has come through a dataset, and what the engine had to do with it.

    by_engine: it is what the engine made of the document: what could not be read never got there, and an engine that
    drains took no more. under_way: where the engine died instead, the ids of the rows that it had then.
    """

    row: ResultRow
    by_engine: bool
    under_way: frozenset[str] | None = None


def arrivals(results: ray.data.Dataset) -> Generator[Arrival]:
    """Runs the dataset until it is closed; rows come as their blocks finish."""
    with closing(iter(results.iter_rows())) as rows:  # type: ignore[type-var]
        for row in rows:
            by_engine, under_way = row.pop(_BY_ENGINE), row.pop(_UNDER_WAY)
            ids = frozenset(json.loads(under_way)) if under_way is not None else None
            yield Arrival(row=ResultRow(**row), by_engine=by_engine, under_way=ids)


class EngineClient:
    """Waits for the engine on behalf of a dataset's rows. When the engine dies, the rows that it had and all that come
    later say so, instead of the dataset's failing: rows of the same blocks that are done are not lost."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._under_way: set[str] = set()
        self._lost: str | None = None

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["error_kind"] is not None:
            return _columns(_failed(row))
        if self._lost is not None:
            return self._dead(row, EngineDeadError("the engine has ended"))
        document = Document(id=row["id"], source=row["source"], text=row["text"], messages=_messages(row["messages"]))
        self._under_way.add(document.id)
        try:
            result: ResultRow = await self._engine.handle.remote(document)
        except DrainingError as error:
            return _columns(ResultRow.of_error(row["id"], error))
        except (RayActorError, EngineDeadError) as error:
            self._lost = self._lost or json.dumps(sorted(self._under_way))
            return self._dead(row, EngineDeadError(str(error)))
        finally:
            self._under_way.discard(document.id)
        return _columns(result) | {_BY_ENGINE: True}

    def _dead(self, row: Mapping[str, Any], error: EngineDeadError) -> dict[str, Any]:
        return _columns(ResultRow.of_error(row["id"], error)) | {"source": row["source"], _UNDER_WAY: self._lost}


def _columns(row: ResultRow) -> dict[str, Any]:
    return asdict(row) | {_BY_ENGINE: False, _UNDER_WAY: None}


def _failed(row: Mapping[str, Any]) -> ResultRow:
    return ResultRow(
        id=row["id"],
        source=row["source"],
        finish_reason="error",
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
        "error_kind": document.error.kind if document.error is not None else None,
        "error": str(document.error) if document.error is not None else None,
    }


def _left(
    row: dict[str, Any], done: DoneRows | ray.ObjectRef[DoneRows], takes: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    if isinstance(done, ray.ObjectRef):
        done = ray.get(done)
    if not takes(row["id"]) or (row["id"], row["source"]) in done.duplicates:
        return
    first = done.sources.get(row["id"])
    if row["id"] not in done.sources:
        yield row
    elif first not in (None, row["source"]):
        error = duplicate_id(row["id"], source=row["source"], first=first)
        yield row | {"text": None, "messages": None, "error_kind": error.kind, "error": str(error)}
