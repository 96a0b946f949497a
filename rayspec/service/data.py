"""Ray Data around an engine: documents are read in tasks, and thin clients carry them to the engine's actor.

The engine is never placed by Ray Data: its actor exists before the dataset runs and outlives it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.data

from rayspec.service.documents import Columns, Document, expand, read_file
from rayspec.service.results import ResultRow

_READ_CPUS = 0.5
_CLIENT_CPUS = 0.1
_ROWS_PER_BLOCK = 4  # a block leaves a client when its last row is done: small blocks keep results coming
_BLOCKS_IN_FLIGHT = 8


def read_dataset(inputs: Sequence[str], columns: Columns, *, limit: int | None = None) -> ray.data.Dataset:
    """Documents of files, folders and patterns as rows id, source, text, error_kind, error.

    Relative paths are those of this process: where a task runs, the current folder is another one.
    """
    paths = [{"name": name, "path": str(Path(name).absolute())} for name in expand(inputs)]
    files = ray.data.from_items(paths, override_num_blocks=len(paths))
    rows = files.flat_map(_read, fn_kwargs={"columns": columns}, num_cpus=_READ_CPUS)  # type: ignore[arg-type]
    return rows if limit is None else rows.limit(limit)


def quieten() -> None:
    """Ray Data's own progress and log lines, which go to the terminal that ours are on."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False


def complete_dataset(documents: ray.data.Dataset, engine: Any) -> ray.data.Dataset:
    """The rows of `documents` completed by an engine's actor, as the fields of ResultRow, in no particular order."""
    blocks = documents.repartition(target_num_rows_per_block=_ROWS_PER_BLOCK)
    pool = ray.data.ActorPoolStrategy(
        size=1, max_tasks_in_flight_per_actor=_BLOCKS_IN_FLIGHT, max_concurrent_calls_per_actor=_BLOCKS_IN_FLIGHT
    )
    client: Any = EngineClient  # Ray's annotations do not know of async classes
    return blocks.map(client, fn_constructor_args=[engine], compute=pool, num_cpus=_CLIENT_CPUS)


def result_rows(results: ray.data.Dataset) -> Iterator[ResultRow]:
    """Runs the dataset; rows come as their blocks finish."""
    for row in results.iter_rows():
        yield ResultRow(**row)


class EngineClient:
    """Waits for the engine on behalf of a dataset's rows."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return asdict(await self._complete(row))

    async def _complete(self, row: Mapping[str, Any]) -> ResultRow:
        if row["error_kind"] is not None:
            return ResultRow(id=row["id"], finish_reason="error", error_kind=row["error_kind"], error=row["error"])
        document = Document(id=row["id"], source=row["source"], text=row["text"])
        result: ResultRow = await self._engine.handle.remote(document)
        return result


def _read(row: dict[str, Any], columns: Columns) -> Iterator[dict[str, Any]]:
    for document in read_file(row["path"], columns, name=row["name"]):
        yield {
            "id": document.id,
            "source": document.source,
            "text": document.text,
            "error_kind": document.error.kind if document.error is not None else None,
            "error": str(document.error) if document.error is not None else None,
        }
