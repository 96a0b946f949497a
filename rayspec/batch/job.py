"""Streams rows through a pool of engines into an output folder, and resumes where an earlier run ended."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import yaml
from pydantic import Field

from rayspec.batch.columns import Columns
from rayspec.batch.documents import Piece, pieces_of, row_counts
from rayspec.batch.feeding import completing
from rayspec.batch.input_files import InputFiles
from rayspec.batch.parts import FileFormat
from rayspec.batch.progress import TimeLeft, showing_progress
from rayspec.batch.report import PLOT_NAME, RunReport
from rayspec.batch.row_engine import RowEngineFactory, RowTask
from rayspec.batch.rows import Row
from rayspec.batch.run_folder import RunFolder, output_places
from rayspec.batch.scan import Changed, Scan, Share, compared, scan_rows
from rayspec.command.locations import Location
from rayspec.command.terminal import EXIT_TERMINATED, error_console, exit_on_sigterm, say
from rayspec.config import DType, Options
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.types import EngineStats, RayspecError

if TYPE_CHECKING:
    from rayspec.pool.worker import EngineFactory

CONFIG_NAME = "config.yaml"
_PREFIX_CHARS = 4096
_REPORT_FILES = (CONFIG_NAME, "report.md", PLOT_NAME)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a job: those in the files `inputs`, or else `rows`. refused: rows that failed before they could be
    read. limit: number of rows to take from the beginning. sample: share of these rows to take."""

    inputs: Sequence[str] | InputFiles = ()
    columns: Columns = field(default_factory=Columns)
    rows: Sequence[Row] = ()
    refused: Sequence[Row] = ()
    limit: int | None = None
    sample: float | None = None

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

    @contextmanager
    def counting(self) -> Iterator[Callable[[], int | None]]:
        """Count the rows of the files in a thread while the block runs. Give the block a function that returns about
        how many are wanted; None while that is not known."""
        ended, total = threading.Event(), 0
        num_rows: int | None = None

        def count() -> None:
            nonlocal num_rows, total
            for number in chain.from_iterable(map(row_counts, self.pieces)):
                if ended.is_set():
                    return
                total += number
            num_rows = total if self.sample is None else round(self.sample * total)

        threading.Thread(target=count, name="rayspec-counter").start()
        try:
            yield lambda: num_rows
        finally:
            ended.set()

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


class Drain:
    """The end of a job on SIGTERM: rows under way may finish within a grace period, and no new rows begin. A second
    signal, or the end of the grace period, ends the process at once. requested: the signal has come. on_request: called
    then."""

    def __init__(self, grace_s: float) -> None:
        self.requested = False
        self._grace_s = grace_s
        self.on_request: Callable[[], None] = lambda: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call `on_request` at the first SIGTERM inside the block. Enter the block after Ray has started, because Ray
        replaces the signal handler."""
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
        self.on_request()

    def _end(self, number: int, frame: object) -> None:
        raise SystemExit(EXIT_TERMINATED)


class JobOptions(Options):
    """Options of a job over rows. changed: how rows are treated whose text has changed, see `scan.Changed`."""

    overwrite: bool = Field(False, description="begin again, in place of what an earlier run has left there")
    changed: Changed = Field("keep", description="what becomes of rows with other text than when they were done")
    max_engine_restarts: int = Field(
        3, ge=0, description="on Ray: engines started again in a row, without a row completed in between"
    )
    format: FileFormat | None = Field(None, description="of an output folder: parquet or jsonl; None: parquet")
    drain_s: float = Field(2.0, ge=0, description="seconds for rows under way, after SIGTERM")
    order: Order = Field(
        "input", description="of the rows: longest (first), or prefix (rows that begin alike are neighbours)"
    )
    accept_failed_rows: bool = Field(
        False, description="exit code 0 when every row has its result, also an error: the same command would do nothing"
    )


# Writes additional files into the output folder. The first argument returns an iterator over the rows at each call.
Export = Callable[[Callable[[], Iterable[Row]], Location], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job over rows.

    output: a folder; or a .parquet or .jsonl file, beside which a folder with ".run" after its name is made. name: stem
    of the file of all rows in a folder. text_column: of the output. export: writes more files at the end, with the
    names `export_names`.
    """

    backend: Backend
    task: JobTask
    output: str
    name: str
    title: str
    text_column: str
    options: JobOptions = field(default_factory=JobOptions)
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
        location, merged, file_format = output_places(self.output, self.options.format)
        report, drain = RunReport(), Drain(self.options.drain_s)
        with (
            RunFolder(
                location,
                merged=merged or location.join(f"{self.name}.{file_format}"),
                identity=self.task.identity,
                overwrite=self.options.overwrite,
                text_column=self.text_column,
                file_format=file_format,
                report_files=(*_REPORT_FILES, *self.export_names),
            ) as folder,
            self.backend.session(),
        ):
            exit_on_sigterm()  # like Ray's own handler, but with our exit code
            with drain.watching():
                left, stats = self._catch_up(source, folder, report), EngineStats()
                if left is None or len(left):
                    stats = self._complete(source, left, folder, report, drain)
                self._conclude(folder, report, stats)
        return report

    def _catch_up(self, source: Source, folder: RunFolder, report: RunReport) -> pa.Table | None:
        """Take all rows that need no engine: rows of earlier runs, unreadable rows, duplicates. Return the scanned rows
        that are left; None if all are, which are then not scanned. Raises ConfigError."""
        left, refused = None, source.refused
        if not source.inputs or source.limit is not None or len(folder.done):
            scan = self.backend.scan(source) if source.inputs else scan_rows(source.rows[: source.limit], source.share)
            found = compared(scan, folder.done, is_whole=source.is_whole)
            found.check(self.options.changed)
            redone = found.redoable if self.options.changed == "redo" else found.redoable[:0]
            folder.redo(scan.rows["id"].take(redone))
            if kinds := folder.kinds:
                report.add_earlier(kinds, folder.rows)
                say(f"going on with a run that has {kinds.total()} rows")
            if changes := found.describe():
                done_again = f"{len(redone)} are done again" if len(redone) else "the earlier results are kept"
                say(f"{changes}: {done_again}")
            refused = [*refused, *found.errors]
            left = scan.rows.take(np.sort(np.concatenate([found.left, redone])))
        for row in refused:
            folder.add(row)
            report.add(row)
        return left

    def _complete(
        self, source: Source, left: pa.Table | None, folder: RunFolder, report: RunReport, drain: Drain
    ) -> EngineStats:
        """Complete the rows that are left. Raises EngineDeadError if engines die too often; SystemExit on SIGTERM."""
        # `auto` may choose another data type on another machine. All rows of a folder have the same.
        dtype = folder.manifest.extra.get("config", {}).get("dtype")
        pool = self.backend.pool(self.factory(dtype), max_restarts=self.options.max_engine_restarts)
        drain.on_request = pool.drain
        if drain.requested:  # SIGTERM came before the pool existed
            pool.drain()
        engine, failure = self.task.settings.engine, None
        num_wanted = 2 * engine.max_num_seqs * (engine.parallel.replicas if engine.parallel is not None else 1)
        rows = self.backend.rows(source, left, self.options.order)
        try:
            with (
                completing(pool.submit, rows, num_wanted=num_wanted) as completed,
                nullcontext(lambda: len(left)) if left is not None else source.counting() as num_left,
            ):
                config = pool.begin()
                folder.location.join(CONFIG_NAME).write(yaml.safe_dump(config, sort_keys=False).encode())
                folder.note({"config": config})
                time_left = TimeLeft(
                    num_left=num_left, num_under_way=num_wanted, is_bound=self.options.order == "longest"
                )
                with showing_progress(report.tally, error_console(), time_left) as show:
                    for row in completed:
                        if not row.is_final:
                            failure = row
                            continue
                        folder.add(row)
                        report.add(row)
                        time_left.add(row)
                        show()
        except RayspecError as error:
            if drain.requested and error.kind == "aborted":  # no engine takes rows any more
                raise SystemExit(EXIT_TERMINATED) from None
            raise
        else:
            if drain.requested:
                raise SystemExit(EXIT_TERMINATED)
            if failure is not None:
                raise EngineDeadError(str(failure.error))
            stats = pool.stats()
            pool.stop()
            return stats
        finally:
            pool.kill()  # at once, so that the next job of this process can use their CPUs and GPUs

    def _conclude(self, folder: RunFolder, report: RunReport, stats: EngineStats) -> None:
        """Merge the rows and write the report, unless an earlier run has done so and no row has changed since."""
        folder.commit()
        if stats.num_lost_replicas:
            say(f"{stats.num_lost_replicas} replicas were lost for good, and the others did their rows; see the log")
        if folder.is_merged:
            folder.finish(folder.manifest.counts)
            return
        tally = report.tally
        counts = {
            "prompt_tokens": tally.num_prompt_tokens,
            "output_tokens": tally.num_output_tokens,
            "seconds": tally.elapsed_s,
            "errors": dict(tally.errors),
        }
        folder.finish(counts)
        if self.export is not None:
            self.export(folder.rows, folder.location)
        config = folder.manifest.extra.get("config", {})
        with tempfile.TemporaryDirectory() as scratch:
            report.write(Path(scratch), stats=stats, config=config, title=self.title)
            for path in Path(scratch).iterdir():
                folder.location.join(path.name).write(path.read_bytes())
