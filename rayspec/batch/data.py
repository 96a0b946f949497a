"""Rows of a job as Ray Data reads them: documents are read in tasks, and the driver takes the rows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, get_args

import ray
import ray.data

from rayspec.batch.documents import Columns, Piece, expand, pieces, read_piece
from rayspec.batch.rows import Row
from rayspec.batch.scan import Takes, takes_all
from rayspec.types import ConfigError

_READ_CPUS = 0.5
_BYTES_PER_PIECE = 2**26
_MAX_READ_TASKS = 64  # a task takes Ray Data 0.2 s, however little it does: small files share one
_ROWS_PER_TASK = 32
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # Ray Data's, in this process
_READERS_END_WITHIN_S = 10.0

_KEY = "order"
_PREFIX_CHARS = 4096

Order = Literal["input", "longest", "prefix"]

logger = logging.getLogger(__name__)


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


def rows_of(dataset: ray.data.Dataset) -> Generator[Row]:
    """Runs the dataset until it is closed; rows come as their blocks do."""
    with closing(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:  # type: ignore[type-var]
        batch: Any
        for batch in batches:
            yield from (Row(**fields) for fields in batch.to_pylist())


def _read(item: dict[str, Any], columns: Columns, takes: Takes) -> Iterator[dict[str, Any]]:
    wanted = None if item["wanted"] is None else frozenset(item["wanted"])
    yield from (asdict(row) for _, row in read_piece(item["piece"], columns, wanted) if takes(row.id))


def _with_key(fields: dict[str, Any], order: Order) -> dict[str, Any]:
    text = fields["messages"] or fields["document"] or ""
    return fields | {_KEY: -len(text) if order == "longest" else text[:_PREFIX_CHARS]}
