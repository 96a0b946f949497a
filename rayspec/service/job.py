"""A dataset of documents through one engine into an output folder, resumed where an earlier run of it ended."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import operator
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.data
import yaml
from ray.exceptions import RayError

from rayspec.decode.engine_loop import EngineDeadError
from rayspec.pipeline.session import ray_session
from rayspec.service.data import (
    Arrival,
    DoneRows,
    arrivals,
    complete_dataset,
    dataset_of,
    quieten,
    read_dataset,
    reading,
    without_rows,
)
from rayspec.service.documents import Columns, Document, DuplicateIdError
from rayspec.service.drain import Drain
from rayspec.service.engine_actor import DrainingError, Recipe, call, death_of, start_engine
from rayspec.service.locations import Location
from rayspec.service.progress import showing_progress
from rayspec.service.report import PLOT_NAME, RunReport
from rayspec.service.results import FileFormat, ResultRow
from rayspec.service.run_folder import RunFolder, is_final
from rayspec.service.suspects import EngineKilledError, Suspects
from rayspec.service.tally import EXIT_TERMINATED
from rayspec.service.terminal import error_console, exit_on_sigterm
from rayspec.types import EngineStats

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
_REPORT_FILES = (CONFIG_NAME, "report.md", "report.html", PLOT_NAME)


@dataclass(frozen=True, slots=True)
class Share:
    """Some of the rows, always the same: which ones is a matter of their ids. None takes all."""

    of_rows: float | None

    def __call__(self, row_id: str) -> bool:
        if self.of_rows is None:
            return True
        digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
        return int.from_bytes(digest, "big") < self.of_rows * 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the documents of a job are: in files, or `documents` themselves. refused: rows that failed before they
    could be documents. limit: the first so many rows. sample: the share of them that is taken."""

    inputs: Sequence[str] = ()
    columns: Columns = field(default_factory=Columns)
    documents: Sequence[Document] = ()
    refused: Sequence[ResultRow] = ()
    limit: int | None = None
    sample: float | None = None
    references: Mapping[str, str] = field(default_factory=dict)

    def dataset(self) -> ray.data.Dataset:
        """Of all rows, or the first ones."""
        if not self.inputs:
            return dataset_of(self.documents[: self.limit])
        return read_dataset(self.inputs, self.columns, limit=self.limit)


class JobTask(Recipe, Protocol):
    """What is done with the rows of a job."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides what the rows say, as JSON has it: rows made with another one do not belong in the
        same output."""


# Writes files of its own from the rows, which it may ask for more than once, into the output folder.
Export = Callable[[Callable[[], Iterable[ResultRow]], Location], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """name, text_column, file_format: of the output. max_engine_restarts: how often an engine that died for no reason
    that is known is started again within a run; rows that kill it are found out, and fail. drain_s: how long rows under
    way may take to end after SIGTERM. export: writes more files in the end, of the names `export_names`.
    """

    task: JobTask
    output: str
    name: str
    title: str
    text_column: str
    file_format: FileFormat = "parquet"
    overwrite: bool = False
    max_engine_restarts: int = 3
    drain_s: float = 2.0
    export: Export | None = None
    export_names: Sequence[str] = ()

    def run(self, source: Source) -> RunReport:
        """Returns when every row is in the output. Rows of an earlier run of the same job are not done again; of a run
        that ends early, the rows so far are kept, and the next run goes on with the others.

        Raises ConfigError before anything is started, if the output folder is of another job; EngineDeadError when the
        engine died too often; CheckpointError; SystemExit on SIGTERM.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Death:
    """The end of an engine. under_way: ids of the rows that it had, where they are known. source: of one of them."""

    error: EngineDeadError
    under_way: frozenset[str] = frozenset()
    source: str | None = None


class _Run:
    """One run of a job's driver."""

    def __init__(self, job: Job, source: Source, folder: RunFolder) -> None:
        self._job, self._source, self._folder = job, source, folder
        self._report = RunReport(references=source.references)
        self._drain = Drain(job.drain_s)
        self._suspects = Suspects(job.max_engine_restarts)
        self._engine: Any = None
        self._config: dict[str, Any] = {}

    def finish(self) -> RunReport:
        with self._drain.watching(self._stop_engine):
            try:
                self._catch_up()
                self._complete()
                self._conclude()
            finally:
                self._end_engine()
        return self._report

    def _catch_up(self) -> None:
        """With the rows of earlier runs, and those that failed before they could be documents."""
        for row in self._folder.rows():
            if is_final(row):
                self._report.add(row, earlier=True)
        done = _done_rows(self._folder)
        for row in self._source.refused:
            if row.id not in done.sources:
                self._take(row)
        if self._report.tally.num_earlier:
            message = f"going on with a run that has {self._report.tally.num_earlier} rows"
            error_console().print(message, highlight=False)

    def _complete(self) -> None:
        """The rows that are not done yet. Raises EngineDeadError if engines die too often; SystemExit at SIGTERM."""
        while True:
            death = self._stream()
            if self._drain.requested:
                raise SystemExit(EXIT_TERMINATED)
            if death is not None:
                self._end_engine()
                self._judge(death)
            elif self._suspects.on_trial:
                self._suspects.acquit()
            else:
                return

    def _judge(self, death: _Death) -> None:
        """Raises the death if there are too many; otherwise another engine can go on."""
        guilty = self._suspects.died(death.under_way)
        if guilty is not None:
            error = EngineKilledError(
                f"the engine died three times with this row under way, the last time with nothing else: {death.error}"
            )
            self._take(replace(ResultRow.of_error(guilty, error), source=death.source))
        if self._suspects.too_many_deaths:
            raise death.error
        logger.warning("%s; it is started again and goes on with the rows that are left", death.error)

    def _stream(self) -> _Death | None:
        """The rows that are not done yet, or those on trial, as far as one engine gets; how it died, if it did."""
        loading = None
        if self._engine is None:
            self._engine = start_engine(self._job.task)
            loading = self._engine.load.remote()
        try:
            with contextlib.closing(self._started(self._dataset(), loading)) as rows:
                return self._take_rows(rows)
        except RayError:
            error = death_of(self._engine)
            if error is None:
                raise
            return _Death(error=error)

    def _started(self, results: ray.data.Dataset, loading: Any) -> Generator[Arrival]:
        """The dataset's rows. Ray Data starts its workers while the engine is loading; the first row waits for it."""
        with contextlib.closing(arrivals(results)) as rows:
            first = list(itertools.islice(rows, 1))
            if loading is not None:
                self._config = call(loading)
                self._folder.location.join(CONFIG_NAME).write(yaml.safe_dump(self._config, sort_keys=False).encode())
            yield from itertools.chain(first, rows)

    def _dataset(self) -> ray.data.Dataset:
        self._folder.commit()
        on_trial, engine = self._suspects.on_trial, self._job.task.settings.engine
        takes = partial(operator.contains, on_trial) if on_trial else Share(self._source.sample)
        left = without_rows(self._source.dataset(), _done_rows(self._folder), takes)
        num_replicas = engine.parallel.replicas if engine.parallel is not None else 1
        wanted = 2 * engine.max_num_seqs * num_replicas
        return complete_dataset(left, self._engine, num_wanted=wanted, one_at_a_time=bool(on_trial))

    def _take_rows(self, rows: Iterator[Arrival]) -> _Death | None:
        """Until there are no more; of an engine that drains, until every row that it took is here; of one that died,
        until every row that it had is."""
        num_from_engine, num_to_come = 0, None
        with showing_progress(self._report.tally, error_console()) as show:
            for arrival in rows:
                if arrival.under_way is not None:
                    return self._take_finished(arrival, rows)
                num_from_engine += arrival.by_engine
                if not arrival.by_engine and arrival.row.error_kind == DrainingError.kind:
                    num_to_come = call(self._engine.num_taken.remote())
                else:
                    self._take(arrival.row)
                    show()
                if arrival.by_engine and arrival.row.error_kind is None:
                    self._suspects.succeeded()
                if num_from_engine == num_to_come:
                    break
        return None

    def _take_finished(self, lost: Arrival, rows: Iterator[Arrival]) -> _Death:
        """What shares blocks with rows that an engine had when it died."""
        assert lost.under_way is not None
        missing = set(lost.under_way) - {lost.row.id}
        while missing and (arrival := next(rows, None)) is not None:
            missing.discard(arrival.row.id)
            if arrival.under_way is None and is_final(arrival.row):
                self._take(arrival.row)
        error = death_of(self._engine) or EngineDeadError(f"the engine cannot be reached: {lost.row.error}")
        return _Death(error=error, under_way=lost.under_way, source=lost.row.source)

    def _take(self, row: ResultRow) -> None:
        self._folder.add(row)
        self._report.add(row)

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.drain.remote()

    def _conclude(self) -> None:
        stats: EngineStats = call(self._engine.stats.remote())
        tally = self._report.tally
        counts = {
            "prompt_tokens": tally.num_prompt_tokens,
            "output_tokens": tally.num_output_tokens,
            "seconds": tally.elapsed_s,
            "errors": dict(tally.errors),
        }
        self._folder.finish(counts, {"config": self._config})
        if self._job.export is not None:
            self._job.export(self._folder.rows, self._folder.location)
        with tempfile.TemporaryDirectory() as scratch:
            self._report.write(Path(scratch), stats=stats, config=self._config, title=self._job.title)
            for path in Path(scratch).iterdir():
                self._folder.location.join(path.name).write(path.read_bytes())
        call(self._engine.stop.remote())

    def _end_engine(self) -> None:
        """At once: the CPUs and GPUs that it holds are wanted, if only by the next job of this process."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            with contextlib.suppress(RayError):
                ray.kill(engine)


def _done_rows(folder: RunFolder) -> DoneRows:
    sources, duplicates = {}, set()
    for row in folder.rows():
        if row.error_kind == DuplicateIdError.kind:
            duplicates.add((row.id, row.source))
        elif is_final(row):
            sources[row.id] = row.source
    return DoneRows(sources=sources, duplicates=frozenset(duplicates))
