"""Runs a job on Ray: Ray Data tasks read the documents, and a pool of actors completes them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError, RayTaskError

from rayspec.batch.documents import read_piece
from rayspec.batch.job import LocalBackend, Order, Source, numbers_by_piece, scan_pieces, sort_key
from rayspec.batch.rows import Columns, Row
from rayspec.command.terminal import say
from rayspec.config import EngineConfig, ParallelOptions
from rayspec.pipeline.placement import errors_of_actor, first_line, gpus_per_shard, reserving_nothing
from rayspec.pool.supervisor import EnginePool
from rayspec.pool.worker import NO_ROOM, EngineFactory, saying_if_late
from rayspec.ray_session import ray_session, refuse_client
from rayspec.types import RayspecError

_MAX_READ_TASKS = 64  # Ray Data needs 0.2 s for even the smallest task: small files share a task
_READER_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")  # name prefixes

_KEY = "order"

logger = logging.getLogger(__name__)


class ReadingError(RayspecError):
    """Ray could not read the input of a job."""

    kind = "reading"


class RayBackend(LocalBackend):
    """Ray Data tasks read the rows of a job, and a pool of actors completes them."""

    @contextmanager
    def session(self, parallel: ParallelOptions | None) -> Iterator[None]:
        refuse_client()
        with ray_session(parallel.num_cpus if parallel is not None else 0, say), reading():
            yield

    def _scanned(self, source: Source) -> Iterable[pa.Table]:
        """Scan the files in tasks of a whole CPU, which end after `limit` rows: `ray.cancel` can crash the driver."""
        if not source.files:
            yield from super()._scanned(source)
            return
        pieces = source.pieces
        num_tasks = min(len(pieces), _num_readers())
        scan: Any = ray.remote(scan_pieces).options(num_returns="streaming")
        bounds = itertools.pairwise(len(pieces) * task // num_tasks for task in range(num_tasks + 1))
        tasks = [scan.remote(pieces[start:end], start, source.columns, source.limit) for start, end in bounds]
        late = "no task has begun to scan the input: the job waits for a free CPU or a process that starts"
        with errors_of_reading():
            with saying_if_late(late):
                ray.wait(tasks)
            yield from map(ray.get, itertools.chain.from_iterable(tasks))

    def rows(self, source: Source, left: pa.Table, order: Order) -> Generator[Row]:
        """Read and yield the rows of a scan. For an order, Ray Data sorts them now, spilling to disk what is too much.

        Read tasks reserve nothing: they would wait for CPUs that the engines of several jobs hold, which wait for rows.
        """
        wanted = sorted(numbers_by_piece(left).items())
        items = [{"piece": source.pieces[index], "wanted": sorted(numbers)} for index, numbers in wanted]
        num_blocks = max(1, min(len(items), _MAX_READ_TASKS))
        blocks = ray.data.from_items(items, override_num_blocks=num_blocks)
        dataset = blocks.flat_map(
            partial(_read, columns=source.columns, order=order),
            compute=ray.data.TaskPoolStrategy(size=min(num_blocks, _num_readers())),
            **reserving_nothing(),
        )
        if order != "input":  # a sort reserves CPUs, so it ends before the engines start
            late = "the rows are not in their order: the sort takes long, or waits for a free CPU"
            with errors_of_reading(), saying_if_late(late):
                dataset = patient(dataset.sort(_KEY).drop_columns([_KEY])).materialize()
        return rows_of(dataset)

    def pool(self, factory: EngineFactory, *, max_restarts: int) -> EnginePool:
        if told := idle_gpus(factory.engine):
            say(told)
        return EnginePool(factory, max_restarts=max_restarts)


def idle_gpus(config: EngineConfig) -> str | None:
    """Return what to tell a user whose engines leave GPUs of the cluster to nobody; None if more engines do not fit."""
    options = config.parallel or ParallelOptions()
    of_replica = options.stages * options.tensor * gpus_per_shard(config, options)
    there: float = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if of_replica == 0 or there < of_replica * (options.replicas + 1):
        return None
    used, most = of_replica * options.replicas, int(there / of_replica)
    return f"{used:g} of the {there:g} GPUs here run the model; --replicas {most} uses all of them"


def patient(dataset: ray.data.Dataset) -> ray.data.Dataset:
    """Return the dataset, to be run without a limit for the time between two steps of its execution.

    Ray Data ends an execution without a step for 30 minutes, although nothing is wrong: rows wait in the object store
    while engines load, or while they take hours for a block of long documents. The given dataset is not changed.
    """
    own = ray.data.Dataset.copy(dataset, _deep_copy=True)
    own.context.execution_no_progress_timeout_s = -1
    return own


@contextmanager
def reading() -> Iterator[None]:
    """Switch off Ray Data's progress bars and log lines below ERROR, which share the terminal with ours. At the end of
    the block, wait until Ray Data's reader threads have ended, for at most 10 s.

    The threads outlive a dataset's iterator by a moment. A thread that calls Ray during the shutdown of Ray ends the
    process at once, with an exit code of its own. Inside the block, close datasets that were not read to their end.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        deadline = time.monotonic() + 10.0
        for thread in reader_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := reader_threads():
            logger.warning("Ray Data has not ended: %s", ", ".join(sorted(thread.name for thread in left)))


def reader_threads() -> list[threading.Thread]:
    """Return the threads with which Ray Data reads datasets in this process at the moment."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(_READER_THREADS)]


@contextmanager
def errors_of_reading() -> Iterator[None]:
    """Raise ReadingError where Ray lost a task or its result. Errors of our own code keep their traceback."""
    try:
        with errors_of_actor():
            yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(error, RayTaskError) and not isinstance(cause, NO_ROOM):
            raise
        raise ReadingError(
            f"Ray could not read the input ({first_line(cause)}): was a process killed, or out of memory or disk? What "
            "is written is kept, and the same command, without --overwrite, goes on from there"
        ) from error


def rows_of(dataset: ray.data.Dataset) -> Generator[Row]:
    """Run the dataset and yield its rows, block by block. Closing the generator ends the run. The caller may take any
    time for a row. Raises ReadingError."""
    run = iter(patient(dataset).iter_batches(batch_size=None, batch_format="pyarrow"))
    with errors_of_reading(), closing(run) as batches:  # type: ignore[type-var]
        batch: Any
        for batch in batches:
            yield from (Row(**fields) for fields in batch.to_pylist())


def _num_readers() -> int:
    num_cpus: float = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    return max(1, int(num_cpus))


def _read(item: dict[str, Any], columns: Columns, order: Order) -> Iterator[dict[str, Any]]:
    for _, row in read_piece(item["piece"], columns, frozenset(item["wanted"])):
        yield asdict(row) | ({_KEY: sort_key(row, order)} if order != "input" else {})
