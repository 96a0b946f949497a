"""Streams rows through a pool of engines into an output folder, and resumes where an earlier run ended."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import yaml

from rayspec.batch.columns import Columns
from rayspec.batch.documents import Piece, pieces_of
from rayspec.batch.feeding import completing
from rayspec.batch.input_files import InputFiles
from rayspec.batch.parts import FileFormat
from rayspec.batch.progress import TimeLeft, showing_progress
from rayspec.batch.report import PLOT_NAME, RunReport
from rayspec.batch.row_engine import RowEngineFactory, RowTask
from rayspec.batch.rows import Row
from rayspec.batch.run_folder import RunFolder, output_places
from rayspec.batch.scan import Changed, Scan, compared, scan_rows
from rayspec.command.locations import Location
from rayspec.command.terminal import EXIT_TERMINATED, error_console, exit_on_sigterm, say
from rayspec.config import DType
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import EngineStats, RayspecError

if TYPE_CHECKING:
    from rayspec.pool.worker import EngineFactory

CONFIG_NAME = "config.yaml"
_PREFIX_CHARS = 4096
_REPORT_FILES = (CONFIG_NAME, "report.md", PLOT_NAME)


@dataclass(frozen=True, slots=True)
class Share:
    """Selects a share of the rows by a hash of their ids, so that every run selects the same rows. None selects all."""

    of_rows: float | None

    def __call__(self, row_id: str) -> bool:
        if self.of_rows is None:
            return True
        digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
        return int.from_bytes(digest, "big") < self.of_rows * 2**32


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a job: those in the files `inputs`, or else `rows`. refused: rows that failed before they could be
    read. limit: number of rows to take from the beginning. sample: share of these rows to take. references: right texts
    by row id, for the report."""

    inputs: Sequence[str] | InputFiles = ()
    columns: Columns = field(default_factory=Columns)
    rows: Sequence[Row] = ()
    refused: Sequence[Row] = ()
    limit: int | None = None
    sample: float | None = None
    references: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the files, for read tasks."""
        return pieces_of(self.inputs)

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the input are wanted."""
        return self.limit is None and self.sample is None

    @property
    def share(self) -> Share:
        return Share(self.sample)

    def given(self, left: pa.Table | None) -> list[Row]:
        """Return those of `rows` that are wanted. left: a table of SCAN_SCHEMA; None: all."""
        if left is None:
            return [row for row in self.rows[: self.limit] if self.share(row.id)]
        return [self.rows[index] for index in left["piece"].to_pylist()]

    def wanted(self, left: pa.Table | None) -> dict[int, list[int]] | None:
        """Return the numbers of the rows in `left`, by the index of their piece; None: all rows."""
        if left is None:
            return None
        grouped = left.group_by("piece").aggregate([("number", "list")])
        return dict(zip(grouped["piece"].to_pylist(), grouped["number_list"].to_pylist(), strict=True))


Order = Literal["input", "longest", "prefix"]
"""The order of the rows. longest: long inputs first, so that no long row is the last. prefix: inputs that begin alike
are neighbours and share keys and values in the KV cache. Both orders sort all rows before an engine gets the first."""


def sort_key(row: Row, order: Order) -> int | str:
    """Return the key by which rows are sorted for an order that is not that of the input."""
    text = row.messages or row.document or ""
    return -len(text) if order == "longest" else text[:_PREFIX_CHARS]


class Pool(Protocol):
    """Engines that complete rows. EnginePool has this interface."""

    def begin(self) -> Any: ...

    def submit(self, item: Row) -> Future[Row]: ...

    def drain(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Backend(Protocol):
    """Where a job reads and completes its rows: on Ray (`ray_backend`), or in this process (`in_process`)."""

    def session(self) -> AbstractContextManager[None]:
        """Return the block in which all other methods are called."""

    def scan(self, source: Source) -> Scan:
        """Return the wanted rows of the files, in order, without their documents and messages."""

    def counting(self, pieces: Sequence[Piece]) -> Callable[[], int | None]:
        """Return a function that returns about how many rows there are; None while that is not known."""

    def rows(self, source: Source, left: pa.Table | None, order: Order) -> Generator[Row]:
        """Read and yield rows. left: a table of SCAN_SCHEMA; None: all, where `limit` must be None for files."""

    def pool(self, factory: EngineFactory, *, max_restarts: int) -> Pool:
        """Return the engines, which are not loaded yet. max_restarts: as `max_engine_restarts` of the job."""


class JobTask(RowTask, Protocol):
    """The task of a job: how rows are completed, and which options decide their content."""

    @property
    def identity(self) -> dict[str, Any]:
        """The options that decide the content of the rows, as JSON values. All rows of an output folder have the same
        identity."""


# Writes additional files into the output folder. The first argument returns an iterator over the rows at each call.
Export = Callable[[Callable[[], Iterable[Row]], Location], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job over rows.

    output: a folder; or a .parquet or .jsonl file, beside which a folder with ".run" after its name is made. name: stem
    of the file of all rows in a folder. text_column: of the output. file_format: None: parquet, or that of the file.
    changed: how rows are treated whose text has changed since an earlier run, see `scan.Changed`.
    max_engine_restarts: restarts of an engine that died, without a row completed in between. drain_s: seconds that rows
    under way have to finish after SIGTERM. export: writes more files at the end, with the names `export_names`.
    """

    backend: Backend
    task: JobTask
    output: str
    name: str
    title: str
    text_column: str
    file_format: FileFormat | None = None
    overwrite: bool = False
    changed: Changed = "keep"
    order: Order = "input"
    max_engine_restarts: int = 3
    drain_s: float = 2.0
    export: Export | None = None
    export_names: Sequence[str] = ()

    def factory(self, dtype: DType | None) -> EngineFactory:
        """Return the factory of the engines. dtype: of the weights; None: as the task says."""
        return RowEngineFactory(self.task, dtype=dtype)

    def run(self, source: Source) -> RunReport:
        """Run until every row is in the output. Rows of an earlier run of the same job are not done again. A run that
        ends early keeps its rows, and the next run continues with the others.

        Raises ConfigError before an engine starts, if the output folder holds another job, or if the input has changed
        and `changed` is "fail". Raises EngineDeadError if engines died too often, OutputError if rows cannot be
        written, CheckpointError, and SystemExit on SIGTERM.
        """
        location, merged, file_format = output_places(self.output, self.file_format)
        with (
            RunFolder.open(
                location,
                merged=merged or location.join(f"{self.name}.{file_format}"),
                identity=self.task.identity,
                overwrite=self.overwrite,
                text_column=self.text_column,
                file_format=file_format,
                report_files=(*_REPORT_FILES, *self.export_names),
            ) as folder,
            self.backend.session(),
        ):
            exit_on_sigterm()  # like Ray's own handler, but with our exit code
            return _Run(self, source, folder).finish()


class Drain:
    """The end of a job on SIGTERM: rows under way may finish within a grace period, and no new rows begin. A second
    signal, or the end of the grace period, ends the process at once. `requested`: the signal has come."""

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._grace_s = grace_s
        self._on_request: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Call `on_request` at the first SIGTERM inside the block. Enter the block after Ray has started, because Ray
        replaces the signal handler."""
        self._on_request = on_request
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
        signal.signal(signal.SIGTERM, self._take)
        signal.signal(signal.SIGALRM, self._end)
        try:
            yield
        except SystemExit:
            if self.requested:  # Ray gives its own code to an exit that comes while it waits
                raise SystemExit(EXIT_TERMINATED) from None
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: object) -> None:
        again, self.requested = self.requested, True
        if again or self._grace_s <= 0:  # a timer of 0 s would never fire
            self._end(number, frame)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._on_request()

    def _end(self, number: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)


class _Run:
    """One run of a job's driver."""

    def __init__(self, job: Job, source: Source, folder: RunFolder) -> None:
        self._job, self._source, self._folder = job, source, folder
        self._report = RunReport(references=source.references)
        self._drain = Drain(job.drain_s)
        self._left: pa.Table | None = None  # the scanned rows that are still to be done; None: all rows
        self._pool: Pool | None = None
        self._config: dict[str, Any] = dict(folder.manifest.extra.get("config", {}))

    def finish(self) -> RunReport:
        with self._drain.watching(self._begin_draining):
            try:
                if self._catch_up():
                    self._complete()
                self._conclude()
            finally:
                self._end_engine()
        return self._report

    def _catch_up(self) -> bool:
        """Take all rows that need no engine: rows of earlier runs, unreadable rows, duplicates. Return whether rows are
        left. Raises ConfigError."""
        if self._source.inputs and self._source.limit is None and len(self._folder.done) == 0:
            self._refuse(self._source.refused)
            return True
        source = self._source
        scan = self._job.backend.scan(source) if source.inputs else scan_rows(source.rows[: source.limit], source.share)
        found = compared(scan, self._folder.done, is_whole=self._source.is_whole)
        found.check(self._job.changed)
        redone = found.redoable if self._job.changed == "redo" else found.redoable[:0]
        self._folder.redo(scan.rows["id"].take(redone))
        self._show_earlier(found.describe(), num_redone=len(redone))
        self._refuse([*self._source.refused, *found.errors])
        self._left = scan.rows.take(np.sort(np.concatenate([found.left, redone])))
        return len(self._left) > 0

    def _show_earlier(self, changes: str, *, num_redone: int) -> None:
        if kinds := self._folder.kinds:
            self._report.add_earlier(kinds, self._folder.rows)
            say(f"going on with a run that has {kinds.total()} rows")
        if changes:
            say(f"{changes}: {num_redone} are done again" if num_redone else f"{changes}: the earlier results are kept")

    def _complete(self) -> None:
        """Complete the rows that are left. Raises EngineDeadError if engines die too often; SystemExit on SIGTERM."""
        self._folder.commit()
        # `auto` may choose another data type on another machine. All rows of a folder have the same.
        factory = self._job.factory(self._config.get("dtype"))
        self._pool = self._job.backend.pool(factory, max_restarts=self._job.max_engine_restarts)
        if self._drain.requested:  # SIGTERM came before the pool existed
            self._pool.drain()
        failure = None
        try:
            with contextlib.closing(self._completed(self._pool)) as rows:
                failure = self._take_rows(rows)
        except RayspecError as error:
            if not (self._drain.requested and error.kind == "aborted"):  # no engine takes rows any more
                raise
        if self._drain.requested:
            raise SystemExit(EXIT_TERMINATED)
        if failure is not None:
            raise EngineDeadError(str(failure.error))

    def _completed(self, pool: Pool) -> Generator[Row]:
        """Yield the rows as the engines complete them. Reading begins while the engines load."""
        rows = self._job.backend.rows(self._source, self._left, self._job.order)
        with completing(pool.submit, rows, num_wanted=self._num_wanted) as completed:
            self._config = pool.begin()
            self._folder.location.join(CONFIG_NAME).write(yaml.safe_dump(self._config, sort_keys=False).encode())
            self._folder.note({"config": self._config})
            yield from completed

    @property
    def _num_wanted(self) -> int:
        """Number of rows under way that keeps all engines busy."""
        engine = self._job.task.settings.engine
        return 2 * engine.max_num_seqs * (engine.parallel.replicas if engine.parallel is not None else 1)

    def _time_left(self) -> TimeLeft:
        """Make the estimate of the time left. Rows that were not scanned are counted while the job runs."""
        counted = self._job.backend.counting(self._source.pieces) if self._left is None else None
        return TimeLeft(
            num_left=partial(self._num_left, counted),
            num_under_way=self._num_wanted,
            is_bound=self._job.order == "longest",
        )

    def _num_left(self, counted: Callable[[], int | None] | None) -> int | None:
        if counted is None:
            return len(self._left) if self._left is not None else None
        num_rows, share = counted(), self._source.sample
        return num_rows if num_rows is None or share is None else round(share * num_rows)

    def _take_rows(self, rows: Iterable[Row]) -> Row | None:
        """Take all rows that are final. Return the last row that is not final, whose error says why; None if none."""
        failure, time_left = None, self._time_left()
        with showing_progress(self._report.tally, error_console(), time_left) as show:
            for row in rows:
                if row.is_final:
                    self._take(row)
                    time_left.add(row)
                    show()
                else:
                    failure = row
        return failure

    def _refuse(self, rows: Sequence[Row]) -> None:
        """Take rows that failed without an engine."""
        for row in rows:
            self._take(row)

    def _take(self, row: Row) -> None:
        self._folder.add(row)
        self._report.add(row)

    def _begin_draining(self) -> None:
        if self._pool is not None:
            self._pool.drain()

    def _conclude(self) -> None:
        """Merge the rows and write the report, unless an earlier run has done so and no row has changed since."""
        self._folder.commit()
        is_unchanged = self._folder.is_merged
        stats = EngineStats() if self._pool is None else self._pool.stats()
        if stats.num_lost_replicas:
            say(f"{stats.num_lost_replicas} replicas were lost for good, and the others did their rows; see the log")
        tally, before = self._report.tally, self._folder.manifest
        counts = {
            "prompt_tokens": tally.num_prompt_tokens,
            "output_tokens": tally.num_output_tokens,
            "seconds": tally.elapsed_s,
            "errors": dict(tally.errors),
        }
        self._folder.finish(before.counts if is_unchanged else counts, {"config": self._config})
        if not is_unchanged:
            self._write_report(stats)
        if self._pool is not None:
            self._pool.stop()

    def _write_report(self, stats: EngineStats) -> None:
        if self._job.export is not None:
            self._job.export(self._folder.rows, self._folder.location)
        with tempfile.TemporaryDirectory() as scratch:
            self._report.write(Path(scratch), stats=stats, config=self._config, title=self._job.title)
            for path in Path(scratch).iterdir():
                self._folder.location.join(path.name).write(path.read_bytes())

    def _end_engine(self) -> None:
        """Kill the engines at once, so that the next job of this process can use their CPUs and GPUs."""
        if self._pool is not None:
            self._pool.kill()
