"""Streams a dataset of documents through one engine into an output folder, and resumes where an earlier run ended."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.data
import yaml
from ray.exceptions import RayError

from rayspec.batch.data import (
    Remaining,
    complete_dataset,
    completed_rows,
    dataset_of,
    quieten,
    read_dataset,
    reading,
    remaining_rows,
    seen_rows,
)
from rayspec.batch.documents import Columns
from rayspec.batch.drain import Drain
from rayspec.batch.engine_actor import Recipe, call
from rayspec.batch.progress import showing_progress
from rayspec.batch.report import PLOT_NAME, RunReport
from rayspec.batch.results import FileFormat
from rayspec.batch.rows import Row
from rayspec.batch.run_folder import RunFolder
from rayspec.batch.supervisor import start_supervisor
from rayspec.batch.survey import Changed, survey
from rayspec.command.exit_codes import EXIT_TERMINATED
from rayspec.command.locations import Location
from rayspec.command.terminal import error_console, exit_on_sigterm, say
from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.session import ray_session
from rayspec.types import EngineStats

CONFIG_NAME = "config.yaml"
_REPORT_FILES = (CONFIG_NAME, "report.md", "report.html", PLOT_NAME)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the rows, always the same rows: the ids decide. None takes all."""

    of_rows: float | None

    def __call__(self, row_id: str) -> bool:
        if self.of_rows is None:
            return True
        digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
        return int.from_bytes(digest, "big") < self.of_rows * 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rows of a job: those in the files `inputs`, or else `rows`. refused: rows that failed before they could be
    read. limit: only so many rows, the first. sample: the share of these that is taken."""

    inputs: Sequence[str] = ()
    columns: Columns = field(default_factory=Columns)
    rows: Sequence[Row] = ()
    refused: Sequence[Row] = ()
    limit: int | None = None
    sample: float | None = None
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """All rows of the input are wanted."""
        return self.limit is None and self.sample is None

    @property
    def share(self) -> Share:
        return Share(self.sample)

    def dataset(self) -> ray.data.Dataset:
        """Of all rows, or the first ones."""
        if not self.inputs:
            return dataset_of(self.rows[: self.limit])
        return read_dataset(self.inputs, self.columns, limit=self.limit)

    def seen(self) -> Iterator[Row]:
        """The wanted rows without their documents and messages, in order."""
        rows = seen_rows(self.dataset()) if self.inputs else (row.without_input() for row in self.rows[: self.limit])
        return (row for row in rows if self.share(row.id))


class JobTask(Recipe, Protocol):
    """What is done with the rows of a job."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides what the rows say, as JSON has it: rows made with another one do not belong in the
        same output."""


# Writes files of its own from the rows, which it may ask for more than once, into the output folder.
Export = Callable[[Callable[[], Iterable[Row]], Location], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """name, text_column, file_format: of the output. changed: what becomes of rows whose text has changed since an
    earlier run did them, see `survey.Changed`. max_engine_restarts: how often in a row an engine that died is started
    again without a row completed in between. drain_s: how long rows under way may take to end after SIGTERM. export:
    writes more files in the end, of the names `export_names`.
    """

    task: JobTask
    output: str
    name: str
    title: str
    text_column: str
    file_format: FileFormat = "parquet"
    overwrite: bool = False
    changed: Changed = "keep"
    max_engine_restarts: int = 3
    drain_s: float = 2.0
    export: Export | None = None
    export_names: Sequence[str] = ()

    def run(self, source: Source) -> RunReport:
        """Returns when every row is in the output. Rows of an earlier run of the same job are not done again; of a run
        that ends early, the rows so far are kept, and the next run goes on with the others.

        Raises ConfigError before anything is started, if the output folder is of another job, and if the input has
        changed and `changed` is "fail"; EngineDeadError when the engine died too often; OutputError when rows cannot be
        written; CheckpointError; SystemExit on SIGTERM.
        """
        with (
            RunFolder.open(
                Location.parse(self.output),
                identity=self.task.identity,
                overwrite=self.overwrite,
                text_column=self.text_column,
                file_format=self.file_format,
                name=self.name,
                report_files=(*_REPORT_FILES, *self.export_names),
            ) as folder,
            ray_session(),
            reading(),
        ):
            exit_on_sigterm()  # as Ray's own handler does, but with our code
            quieten()
            return _Run(self, source, folder).finish()


class _Run:
    """One run of a job's driver."""

    def __init__(self, job: Job, source: Source, folder: RunFolder) -> None:
        self._job, self._source, self._folder = job, source, folder
        self._report = RunReport(references=source.references)
        self._drain = Drain(job.drain_s)
        self._sources: dict[str, str | None] = {}  # of the rows that are done
        self._refused: frozenset[tuple[str, str | None]] = frozenset()  # id and source
        self._supervisor: Any = None
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
        """Takes all that needs no engine: rows of earlier runs, rows that cannot be read, duplicates. Returns whether
        rows are left. Raises ConfigError."""
        if self._source.inputs and not self._folder.done:
            self._refuse(self._source.refused)
            return True
        found = survey(self._source.seen(), self._folder.done, is_whole=self._source.is_whole)
        found.check(self._job.changed)
        redone = found.changed if self._job.changed == "redo" else []
        self._folder.redo(redone)
        self._show_earlier(found.describe(), num_redone=len(redone))
        self._sources = {row_id: found.sources.get(row_id) for row_id in self._folder.done}
        self._refuse([*self._source.refused, *found.errors])
        return found.num_left + len(redone) > 0

    def _show_earlier(self, changes: str, *, num_redone: int) -> None:
        counts = self._folder.counts
        if counts.total:
            self._report.add_earlier(counts.total, counts.failed, self._folder.rows)
            say(f"going on with a run that has {counts.total} rows")
        if changes:
            say(f"{changes}: {num_redone} are done again" if num_redone else f"{changes}: the earlier results are kept")

    def _complete(self) -> None:
        """Does the rows that are left. Raises EngineDeadError if engines die too often; SystemExit at SIGTERM."""
        self._folder.commit()
        self._supervisor = start_supervisor(self._job.task, max_restarts=self._job.max_engine_restarts)
        with contextlib.closing(self._started(self._supervisor.begin.remote())) as rows:
            failure = self._take_rows(rows)
        if self._drain.requested:
            raise SystemExit(EXIT_TERMINATED)
        if failure is not None:
            raise EngineDeadError(str(failure.error))

    def _started(self, loading: Any) -> Generator[Row]:
        """The rows as they come. Ray Data starts its workers while the engine is loading; the first row waits."""
        with contextlib.closing(completed_rows(self._results())) as rows:
            first = list(itertools.islice(rows, 1))
            self._config = call(loading)
            self._folder.location.join(CONFIG_NAME).write(yaml.safe_dump(self._config, sort_keys=False).encode())
            yield from itertools.chain(first, rows)

    def _results(self) -> ray.data.Dataset:
        remaining = Remaining(takes=self._source.share, sources=self._sources, refused=self._refused)
        engine = self._job.task.settings.engine
        num_replicas = engine.parallel.replicas if engine.parallel is not None else 1
        return complete_dataset(
            remaining_rows(self._source.dataset(), remaining),
            self._supervisor,
            num_wanted=2 * engine.max_num_seqs * num_replicas,
        )

    def _take_rows(self, rows: Iterator[Row]) -> Row | None:
        """Takes all rows. Once no more are begun, ends when every row that an engine was given is here, and returns a
        row that says why."""
        num_from_engine, num_to_come, failure = 0, None, None
        with showing_progress(self._report.tally, error_console()) as show:
            for row in rows:
                num_from_engine += row.is_from_engine
                if row.is_final:
                    self._take(row)
                    show()
                else:
                    failure, num_to_come = row, call(self._supervisor.num_given.remote())
                if num_from_engine == num_to_come:
                    break
        return failure

    def _refuse(self, rows: Sequence[Row]) -> None:
        """Takes rows that no engine is asked about."""
        self._refused = frozenset((row.id, row.source) for row in rows)
        for row in rows:
            self._take(row)

    def _take(self, row: Row) -> None:
        self._folder.add(row)
        self._report.add(row)

    def _begin_draining(self) -> None:
        if self._supervisor is not None:
            self._supervisor.drain.remote()

    def _conclude(self) -> None:
        """Merges the rows and writes the report, unless nothing has changed since an earlier run did."""
        self._folder.commit()
        is_unchanged = self._folder.is_merged
        stats = EngineStats() if self._supervisor is None else call(self._supervisor.stats.remote())
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
        if self._supervisor is not None:
            call(self._supervisor.stop.remote())

    def _write_report(self, stats: EngineStats) -> None:
        if self._job.export is not None:
            self._job.export(self._folder.rows, self._folder.location)
        with tempfile.TemporaryDirectory() as scratch:
            self._report.write(Path(scratch), stats=stats, config=self._config, title=self._job.title)
            for path in Path(scratch).iterdir():
                self._folder.location.join(path.name).write(path.read_bytes())

    def _end_engine(self) -> None:
        """At once: the CPUs and GPUs that it holds are wanted, if only by the next job of this process."""
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            with contextlib.suppress(RayError):
                ray.kill(supervisor)
