"""Rows of a job as Ray Data reads them: documents are read in tasks, and the driver takes the rows."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data
from ray.exceptions import RayError

from rayspec.batch.documents import Columns, Piece, expand, num_rows_of, pieces, read_piece, see_piece
from rayspec.batch.rows import Row
from rayspec.batch.survey import SEEN_SCHEMA, Seen
from rayspec.types import ConfigError

_READ_CPUS = 0.5
_BYTES_PER_PIECE = 2**26
_MAX_READ_TASKS = 64  # a task takes Ray Data 0.2 s, however little it does: small files share one
_ROWS_PER_TASK = 32
_ROWS_SEEN_AT_ONCE = 2**16
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # Ray Data's, in this process
_READERS_END_WITHIN_S = 10.0

_SEEN_WITH_ERRORS = pa.schema([*SEEN_SCHEMA, pa.field("is_taken", pa.bool_()), pa.field("error", pa.string())])
_KEY = "order"
_PREFIX_CHARS = 4096

Takes = Callable[[str], bool]
"""Which rows are wanted, by their id."""

Order = Literal["input", "longest", "prefix"]

logger = logging.getLogger(__name__)


def takes_all(_row_id: str) -> bool:
    return True


def check_order(value: str) -> Order:
    """Raises ConfigError."""
    for known in get_args(Order):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"option 'order' is {value!r}: give {', '.join(get_args(Order))}")


def pieces_of(inputs: Sequence[str]) -> list[Piece]:
    """What files, folders and patterns hold, in pieces that tasks read. Few Parquet files are cut at row groups.

    Relative paths are those of this process: where a task runs, the current folder is another one.
    """
    files = expand(inputs).files
    if len(files) < _MAX_READ_TASKS:
        return [piece for file in files for piece in pieces(file, _BYTES_PER_PIECE)]
    return [Piece(path=file.path, name=file.name) for file in files]


def read_dataset(
    found: Sequence[Piece],
    columns: Columns,
    *,
    takes: Takes = takes_all,
    wanted: Mapping[int, Sequence[int]] | None = None,
    order: Order = "input",
) -> ray.data.Dataset:
    """The rows of pieces; in Ray Data a row is a dict with the fields of `Row`.

    takes: which ids. wanted: the numbers of the rows that are read, by the index of their piece; None reads all.
    order: of the rows, see `ordered`.
    """
    numbers = dict.fromkeys(range(len(found)), None) if wanted is None else wanted
    items = [{"piece": found[index], "wanted": numbers[index]} for index in sorted(numbers)]
    blocks = ray.data.from_items(items, override_num_blocks=max(1, min(len(items), _MAX_READ_TASKS)))
    how = {"columns": columns, "takes": takes}
    return ordered(blocks.flat_map(_read, fn_kwargs=how, num_cpus=_READ_CPUS), order)  # type: ignore[arg-type]


def ordered(rows: ray.data.Dataset, order: Order) -> ray.data.Dataset:
    """longest: long inputs first, so that no long row is the last. prefix: inputs that begin alike are neighbours and
    meet in the KV cache. Both sort all rows before the first is done; Ray Data puts on disk what memory does not hold.
    """
    if order == "input":
        return rows
    keyed = rows.map(partial(_with_key, order=order), num_cpus=_READ_CPUS)
    return keyed.sort(_KEY).drop_columns([_KEY])


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


def seen_rows(found: Sequence[Piece], columns: Columns, *, takes: Takes = takes_all, limit: int | None = None) -> Seen:
    """What is seen of the rows of pieces, in order, of which tasks keep neither texts nor messages. limit: only so many
    rows, the first; of these, those that are taken."""
    tables, num_left = [_SEEN_WITH_ERRORS.empty_table()], limit
    with closing(_seen_tables(found, columns, takes)) as seen:
        for table in seen:
            tables.append(table if num_left is None else table.slice(0, num_left))
            if num_left is not None:
                num_left -= len(tables[-1])
                if num_left == 0:
                    break
    rows = pa.concat_tables(tables)
    rows = rows.filter(rows["is_taken"])
    is_error = pc.is_valid(rows["error"])
    errors = [Row(**json.loads(error)) for error in rows["error"].filter(is_error).to_pylist()]
    good = rows.filter(pc.invert(is_error)).select(SEEN_SCHEMA.names).combine_chunks()
    return Seen(rows=good, names=[piece.name for piece in found], errors=errors)


def _seen_tables(found: Sequence[Piece], columns: Columns, takes: Takes) -> Generator[pa.Table]:
    items = [{"piece": piece, "index": index} for index, piece in enumerate(found)]
    num_cpus: float = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    num_tasks = max(1, min(len(items), _MAX_READ_TASKS, int(num_cpus / _READ_CPUS)))  # all of them at once
    blocks = ray.data.from_items(items, override_num_blocks=num_tasks)
    how = {"columns": columns, "takes": takes}
    options = ray.data.DataContext.get_current().execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        seen = blocks.map_batches(_see, batch_size=None, fn_kwargs=how, num_cpus=_READ_CPUS)  # type: ignore[arg-type]
        batches = iter(seen.iter_batches(batch_size=None, batch_format="pyarrow"))
        with closing(batches):  # type: ignore[type-var]
            yield from batches
    finally:
        options.preserve_order = before


class CountedRows:
    """Counts the rows of pieces in a task of its own, while other work goes on."""

    def __init__(self, found: Sequence[Piece]) -> None:
        self._counting: Any = ray.remote(_count).options(num_cpus=0).remote(found)
        self._num_rows: int | None = None

    def __call__(self) -> int | None:
        """About how many rows there are; None while they are being counted, and where they cannot be."""
        if self._counting is not None and ray.wait([self._counting], timeout=0)[0]:
            with suppress(RayError):
                self._num_rows = ray.get(self._counting)
            self._counting = None
        return self._num_rows

    def stop(self) -> None:
        if self._counting is not None:
            ray.cancel(self._counting, force=True)
            self._counting = None


def _count(found: Sequence[Piece]) -> int:
    return sum(map(num_rows_of, found))


def seen_of(rows: Sequence[Row], takes: Takes = takes_all) -> Seen:
    """What is seen of rows that are here: each is a piece."""
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


def rows_of(dataset: ray.data.Dataset) -> Generator[Row]:
    """Runs the dataset until it is closed; rows come as their blocks do."""
    with closing(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:  # type: ignore[type-var]
        batch: Any
        for batch in batches:
            yield from (Row(**fields) for fields in batch.to_pylist())


def _read(item: dict[str, Any], columns: Columns, takes: Takes) -> Iterator[dict[str, Any]]:
    wanted = None if item["wanted"] is None else frozenset(item["wanted"])
    yield from (asdict(row) for _, row in read_piece(item["piece"], columns, wanted) if takes(row.id))


def _see(batch: dict[str, Any], columns: Columns, takes: Takes) -> Iterator[pa.Table]:
    for piece, index in zip(batch["piece"], batch["index"], strict=True):
        rows = see_piece(piece, columns)
        while some := list(itertools.islice(rows, _ROWS_SEEN_AT_ONCE)):
            yield _seen(some, int(index), takes)


def _seen(rows: Sequence[tuple[int, tuple[str, str] | Row]], piece: int, takes: Takes) -> pa.Table:
    numbers, seen = zip(*rows, strict=True)
    identities = [(each.id, None) if isinstance(each, Row) else each for each in seen]
    ids, hashes = zip(*identities, strict=True)
    columns = {
        "id": ids,
        "input_hash": hashes,
        "piece": [piece] * len(seen),
        "number": numbers,
        "is_taken": [takes(row_id) for row_id in ids],
        "error": [json.dumps(asdict(each)) if isinstance(each, Row) else None for each in seen],
    }
    return pa.table(columns, schema=_SEEN_WITH_ERRORS)


def _with_key(fields: dict[str, Any], order: Order) -> dict[str, Any]:
    text = fields["messages"] or fields["document"] or ""
    return fields | {_KEY: -len(text) if order == "longest" else text[:_PREFIX_CHARS]}
