"""Ray tasks that scan an input before the job: they list its rows without texts, or count them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.exceptions import RayError

from rayspec.batch.columns import Columns
from rayspec.batch.documents import Piece, num_rows_of, scan_piece
from rayspec.batch.rows import Row
from rayspec.batch.survey import SEEN_SCHEMA, Seen

_ROWS_AT_ONCE = 2**16
_SEEN_WITH_ERRORS = pa.schema([*SEEN_SCHEMA, pa.field("is_taken", pa.bool_()), pa.field("error", pa.string())])

Takes = Callable[[str], bool]
"""Decides by a row's id whether the row is wanted."""


def takes_all(_row_id: str) -> bool:
    return True


def seen_rows(found: Sequence[Piece], columns: Columns, *, takes: Takes = takes_all, limit: int | None = None) -> Seen:
    """Scan the rows of pieces, in order, without keeping texts or messages. limit: number of rows from the beginning;
    `takes` then selects among these."""
    tables, num_left = [_SEEN_WITH_ERRORS.empty_table()], sys.maxsize if limit is None else limit
    for table in _scanned(found, columns, takes, num_left):
        tables.append(table.slice(0, num_left))
        num_left -= len(tables[-1])
        if num_left == 0:
            break
    rows = pa.concat_tables(tables)
    rows = rows.filter(rows["is_taken"])
    is_error = pc.is_valid(rows["error"])
    errors = [Row(**json.loads(error)) for error in rows["error"].filter(is_error).to_pylist()]
    good = rows.filter(pc.invert(is_error)).select(SEEN_SCHEMA.names).combine_chunks()
    return Seen(rows=good, names=[piece.name for piece in found], errors=errors)


def seen_of(rows: Sequence[Row], takes: Takes = takes_all) -> Seen:
    """Return the same as `seen_rows`, for rows in memory. Each row is a piece."""
    taken = [index for index, row in enumerate(rows) if takes(row.id) and row.error_kind is None]
    columns = {
        "id": [rows[index].id for index in taken],
        "input_hash": [rows[index].input_hash for index in taken],
        "piece": taken,
        "number": [0] * len(taken),
    }
    errors = [row.without_input() for row in rows if takes(row.id) and row.error_kind is not None]
    names = [row.source or "" for row in rows]
    return Seen(rows=pa.table(columns, schema=SEEN_SCHEMA), names=names, errors=errors)


class CountedRows:
    """Counts the rows of pieces in a separate task, while other work goes on."""

    def __init__(self, found: Sequence[Piece]) -> None:
        self._counting: Any = ray.remote(_count).options(num_cpus=0).remote(found)
        self._num_rows: int | None = None

    def __call__(self) -> int | None:
        """Return about how many rows there are; None while the task counts, and if the task failed."""
        if self._counting is not None and ray.wait([self._counting], timeout=0)[0]:
            with suppress(RayError):
                self._num_rows = ray.get(self._counting)
            self._counting = None
        return self._num_rows


def _count(found: Sequence[Piece]) -> int:
    return sum(map(num_rows_of, found))


def _scanned(found: Sequence[Piece], columns: Columns, takes: Takes, limit: int) -> Iterator[pa.Table]:
    """Return the rows in order. Each task scans some of the pieces, and all tasks run at once. A task has a whole CPU:
    more tasks would only start more processes. A task ends itself after `limit` rows: `ray.cancel` can crash the
    driver.
    """
    num_cpus: float = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    num_tasks = max(1, min(len(found), int(num_cpus)))
    scan: Any = ray.remote(_scan).options(num_returns="streaming")
    bounds = itertools.pairwise(len(found) * task // num_tasks for task in range(num_tasks + 1))
    tasks = [scan.remote(found[start:end], start, columns, takes, limit) for start, end in bounds]
    return map(ray.get, itertools.chain.from_iterable(tasks))


def _scan(found: Sequence[Piece], first: int, columns: Columns, takes: Takes, limit: int) -> Iterator[pa.Table]:
    """Yield tables of the rows of some pieces, up to `limit` rows. first: the index of the first of these pieces."""
    for index, piece in enumerate(found, start=first):
        rows = scan_piece(piece, columns)
        while some := list(itertools.islice(rows, min(_ROWS_AT_ONCE, limit))):
            limit -= len(some)
            yield _seen(some, index, takes)


def _seen(rows: Sequence[tuple[int, tuple[str, str] | Row]], piece: int, takes: Takes) -> pa.Table:
    # Not zip(*...): it holds an iterator a row, which the garbage collector visits.
    identities = [(each.id, None) if isinstance(each, Row) else each for _, each in rows]
    ids = [row_id for row_id, _ in identities]
    columns = {
        "id": ids,
        "input_hash": [input_hash for _, input_hash in identities],
        "piece": np.full(len(rows), piece, np.int32),
        "number": np.fromiter((number for number, _ in rows), np.int64, len(rows)),
        "is_taken": np.fromiter(map(takes, ids), bool, len(rows)),
        "error": [json.dumps(asdict(each)) if isinstance(each, Row) else None for _, each in rows],
    }
    return pa.table(columns, schema=_SEEN_WITH_ERRORS)
