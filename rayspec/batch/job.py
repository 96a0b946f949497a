"""Streams rows through a pool of engines into an output folder, and resumes where an earlier run ended.

The input is first scanned for ids, places and hashes, and compared with the rows that are done. `LocalBackend` reads
and completes the rows in this process, with one engine and without Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import queue
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from pydantic import Field

from rayspec.batch.documents import Piece, pieces_of, read_piece
from rayspec.batch.report import REPORT_NAMES, RunReport, report_pages, showing_progress
from rayspec.batch.result_cache import ResultCache, files_of
from rayspec.batch.rows import Columns, Row, RowEngineFactory, RowTask
from rayspec.batch.run_folder import FileFormat, RunFolder, output_places
from rayspec.command.locations import Location, UnreadableFileError, error_detail
from rayspec.command.terminal import EXIT_TERMINATED, error_console, exit_on_sigterm, say
from rayspec.config import DType, Options, ParallelOptions
from rayspec.decode.engine_loop import EngineDeadError, LoopThread
from rayspec.types import ConfigError, EngineStats, InputFileError, RayspecError, RequestError

if TYPE_CHECKING:
    from rayspec.pool.supervisor import EnginePool
    from rayspec.pool.worker import EngineFactory, LoadedEngine

CONFIG_NAME = "config.yaml"
_FILES = "model_files"
_CHARACTERS_PER_TOKEN = 4  # about so many
Changed = Literal["keep", "redo", "fail"]
"""What to do about rows whose text has changed since they were done: keep their results, do them again, or fail."""
Order = Literal["input", "longest", "prefix"]
"""The order of the rows. longest: long inputs first, so that no long row is the last. prefix: inputs that begin alike
are neighbours and share keys and values in the KV cache. Both orders sort all rows before an engine gets the first."""

SCAN_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "input_hash": pa.large_string(),
        "piece": pa.int32(),
        "number": pa.int64(),
        "error": pa.string(),
    }
)
_ROWS_AT_ONCE = 2**16
_ROWS_PER_PIECE = 32  # of rows in memory
_PREFIX_CHARS = 4096
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a job: those in `files`, or else `rows`, error rows among them. limit: number of rows to take from
    the beginning. sample: share of these rows to take, chosen by a hash of their ids, so that every run takes the same
    rows."""

    files: Sequence[Piece] = ()
    columns: Columns = field(default_factory=Columns)
    rows: Sequence[Row] = ()
    limit: int | None = None
    sample: float | None = None

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the input, for read tasks."""
        starts = range(0, len(self.rows), _ROWS_PER_PIECE)
        return pieces_of(self.files) or [Piece(rows=tuple(self.rows[n : n + _ROWS_PER_PIECE])) for n in starts]

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the input are wanted."""
        return self.limit is None and self.sample is None


def in_sample(row_id: str, share: float) -> bool:
    digest = hashlib.blake2b(row_id.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") < share * 2**32


def sort_key(row: Row, order: Order) -> int | str:
    """Return the key by which rows are sorted for an order that is not that of the input."""
    text = row.messages or row.document or ""
    return -len(text) if order == "longest" else text[:_PREFIX_CHARS]


def numbers_by_piece(left: pa.Table) -> dict[int, frozenset[int]]:
    """Return the numbers of the rows of a scan, by the index of their piece."""
    grouped = left.group_by("piece").aggregate([("number", "list")])
    return dict(zip(grouped["piece"].to_pylist(), map(frozenset, grouped["number_list"].to_pylist()), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The wanted rows of an input, in order. rows: a table of SCAN_SCHEMA without errors; `piece` and `number` say
    where a row is, and `number` is 0 where the piece is one row. errors: rows that could not be read.

    A row takes the memory of its id and about 40 bytes.
    """

    rows: pa.Table
    pieces: Sequence[Piece]
    errors: Sequence[Row] = ()

    def row(self, index: int) -> Row:
        """Return the row with this index, without its text."""
        fields = self.rows.slice(index, 1).to_pylist()[0]
        source = self.pieces[fields["piece"]].source(fields["number"])
        return Row(id=fields["id"], source=source, input_hash=fields["input_hash"])


def scan_pieces(pieces: Sequence[Piece], first: int, columns: Columns, limit: int | None) -> Iterator[pa.Table]:
    """Yield tables of SCAN_SCHEMA with at most `limit` rows of some pieces. first: the index of the first piece. The
    first table is empty: it shows that the task runs."""
    yield SCAN_SCHEMA.empty_table()
    num_left = sys.maxsize if limit is None else limit
    for index, piece in enumerate(pieces, start=first):
        rows = ((number, row.without_input()) for number, row in read_piece(piece, columns, with_text=False))
        while some := list(itertools.islice(rows, min(_ROWS_AT_ONCE, num_left))):
            num_left -= len(some)
            fields = {
                "id": [row.id for _, row in some],
                "input_hash": [row.input_hash for _, row in some],
                "piece": np.full(len(some), index, np.int32),
                "number": [number for number, _ in some],
                "error": [json.dumps(asdict(row)) if row.error_kind is not None else None for _, row in some],
            }
            yield pa.table(fields, schema=SCAN_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An input compared with the rows that are done. left: indices of scanned rows that are not done. errors: rows that
    could not be read, and rows with the id of another row. changed: indices of done rows whose text has changed, by id.
    absent: ids of done rows that the input no longer has."""

    left: Sequence[int]
    errors: Sequence[Row]
    changed: Mapping[str, int]
    absent: Sequence[str]

    def describe(self) -> str:
        """Return the changes in words, with some of the ids. The text is empty if there are none."""
        parts = (
            (list(self.changed), "have other text than when they were done"),
            (self.absent, "of the output are no longer in the input"),
        )
        return ", and ".join(
            f"{len(ids)} rows {what} ({', '.join(map(repr, ids[:_NUM_NAMED]))}{', ...' * (len(ids) > _NUM_NAMED)})"
            for ids, what in parts
            if ids
        )


def compared(scan: Scan, done: pa.Table, *, is_whole: bool = True) -> Comparison:
    """Compare an input with the rows that are done.

    done: `id` and `input_hash` of rows; an unknown hash is null. is_whole: done rows that are not in `scan` are absent.
    Of several rows with the same id, the row with the text that was done keeps it, or else the first. A row that stands
    twice is one row.
    """
    ids, hashes = scan.rows["id"].to_pylist(), scan.rows["input_hash"].to_pylist()
    done_hashes: dict[str, str | None] = dict(zip(done["id"].to_pylist(), done["input_hash"].to_pylist(), strict=True))
    kept: dict[str, int] = {}
    errors = list(scan.errors)
    for index, row_id in enumerate(ids):
        first = kept.setdefault(row_id, index)
        if first == index:
            continue
        row, other = scan.row(index), scan.row(first)
        if row.source == other.source:
            continue
        if row_id in done_hashes and hashes[index] == done_hashes[row_id] != hashes[first]:
            kept[row_id], row, other = index, other, row
        problem = f"{row.source}: id {row.id!r} is that of {other.source} too; ids must be unique"
        errors.append(row.refused(InputFileError(problem, "duplicate_id")))
    changed = {row_id: index for row_id, index in kept.items() if done_hashes.get(row_id) not in (None, hashes[index])}
    return Comparison(
        left=sorted(index for row_id, index in kept.items() if row_id not in done_hashes),
        errors=errors,
        changed=changed,
        absent=[row_id for row_id in done_hashes if row_id not in kept] if is_whole else [],
    )


class LocalBackend:
    """Where a job reads and completes its rows: in this process, one row after another."""

    def session(self, parallel: ParallelOptions | None) -> AbstractContextManager[None]:
        """Return the block in which all other methods are called. parallel: the processes of the engines."""
        return nullcontext()

    def scan(self, source: Source) -> Scan:
        """Return the wanted rows of the input, in order, without their documents and messages."""
        found, num_left = [SCAN_SCHEMA.empty_table()], sys.maxsize if source.limit is None else source.limit
        for table in self._scanned(source):
            found.append(table.slice(0, num_left))
            num_left -= len(found[-1])
            if num_left == 0:
                break
        rows = pa.concat_tables(found)
        if (share := source.sample) is not None:
            rows = rows.filter(pa.array([in_sample(row_id, share) for row_id in rows["id"].to_pylist()], pa.bool_()))
        errors = [Row(**json.loads(error)) for error in rows["error"].drop_null().to_pylist()]
        return Scan(rows=rows.filter(pc.is_null(rows["error"])).combine_chunks(), pieces=source.pieces, errors=errors)

    def _scanned(self, source: Source) -> Iterable[pa.Table]:
        return scan_pieces(source.pieces, 0, source.columns, source.limit)

    def rows(self, source: Source, left: pa.Table, order: Order) -> Generator[Row]:
        """Read and yield the rows of a scan. An order other than that of the input needs memory for all of them."""
        rows = (
            row
            for index, numbers in sorted(numbers_by_piece(left).items())
            for _, row in read_piece(source.pieces[index], source.columns, numbers)
        )
        yield from rows if order == "input" else sorted(rows, key=lambda row: sort_key(row, order))

    def pool(self, factory: EngineFactory, *, max_restarts: int) -> LocalPool | EnginePool:
        """Return the engines, which are not loaded yet. An engine of this process that dies is not started again."""
        return LocalPool(factory)


class LocalPool:
    """One engine in this process, with the interface of a pool. Rows that come before it is loaded wait for it."""

    def __init__(self, factory: EngineFactory) -> None:
        self._factory = factory
        self._loaded: Future[LoadedEngine] = Future()
        self._is_draining = False
        self._thread = LoopThread("rayspec-rows")

    def begin(self) -> Any:
        """Load the engine and return all options in force. Raises ConfigError and CheckpointError."""
        import torch  # noqa: PLC0415 - the engine needs it, and the command's help does not

        engine = self._factory.load(self._factory.engine)
        has_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if has_gpu and (there := torch.cuda.device_count()) > 1:
            say(f"1 of the {there} GPUs here runs the model; `rayspec job` with --replicas {there} uses all of them")
        self._loaded.set_result(engine)
        return engine.info

    def submit(self, item: Row) -> Future[Row]:
        """Return a future of the completed row. It is cancelled if the engine takes no more rows."""
        return self._thread.start(self._complete(item))

    async def _complete(self, row: Row) -> Row:
        engine = await asyncio.shield(asyncio.wrap_future(self._loaded))
        if self._is_draining:
            raise asyncio.CancelledError
        completed: Row = await engine.handle(row, lambda _: None)
        return completed

    def drain(self) -> None:
        """Take no more rows. Rows that the engine has go on."""
        self._is_draining = True

    def stats(self) -> EngineStats:
        return self._loaded.result().client.stats

    def stop(self) -> None:
        """End the engine and the thread. Later calls do nothing."""
        self._thread.close(self._stop_engine, 10.0)

    kill = stop

    async def _stop_engine(self) -> None:
        if self._loaded.done():
            self._loaded.result().stop()


class JobTask(RowTask, Protocol):
    """The task of a job: how rows are completed, and which options decide their content."""

    @property
    def identity(self) -> dict[str, Any]:
        """The options that decide the content of the rows, as JSON values: the same in a whole output folder."""


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
    """Options of a job over rows. changed: how rows are treated whose text has changed, see `Changed`."""

    overwrite: bool = Field(False, description="start over, and replace the rows of an earlier run")
    changed: Changed = Field("keep", description="how to treat rows whose text has changed since they were done")
    max_engine_restarts: int = Field(
        3, ge=0, description="on Ray: engines started again in a row, without a row completed in between"
    )
    format: FileFormat | None = Field(None, description="format of an output folder; unset: parquet")
    drain_s: float = Field(2.0, ge=0, description="seconds for rows under way, after SIGTERM")
    order: Order = Field("input", description="order of the rows; longest: first; prefix: equal beginnings together")
    price: float | None = Field(
        None, gt=0, description="dollars per hour of all machines of the job, for the cost in the report"
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="budget of prompt and output tokens; when it is spent, the run ends with code 4"
    )
    max_hours: float | None = Field(None, gt=0, description="hours; when they are spent, the run ends with code 4")
    accept_failed_rows: bool = Field(
        False, description="exit code 0 when every row has its result, also an error: the same command would do nothing"
    )


class CompletedRows:
    """Gives a block an iterator over completed rows, in no particular order, and raises the errors of reading.

    submit: gives a row to the engines. num_wanted: rows under way at a time. idle: called every second in which no row
    comes. When the engines take no more rows, the rows under way come, of which some are not final (`Row.is_final`).
    """

    def __init__(
        self,
        submit: Callable[[Row], Future[Row]],
        rows: Iterator[Row],
        *,
        num_wanted: int,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._submit, self._rows, self._idle = submit, rows, idle
        self._thread = threading.Thread(target=self._feed, name="rayspec-feeder", daemon=True)
        self._num_wanted, self._room = num_wanted, threading.Semaphore(num_wanted)
        self._done: queue.SimpleQueue[Row | Exception | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_ended = False
        self._num_given = 0

    def __enter__(self) -> Iterator[Row]:
        self._thread.start()
        return self._completed()

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join(10.0)

    def want(self, num_wanted: int) -> int:
        """Raise the number of rows under way, if it was lower, and return it."""
        if num_wanted > self._num_wanted:
            self._room.release(num_wanted - self._num_wanted)
            self._num_wanted = num_wanted
        return self._num_wanted

    def _feed(self) -> None:
        try:
            for row in self._rows:
                self._room.acquire()
                with self._lock:
                    if self._is_ended:
                        return
                    self._num_given += 1
                if row.error_kind is not None:
                    self._done.put(row)
                else:
                    self._submit(row).add_done_callback(partial(self._take, row))
        except Exception as error:  # noqa: BLE001 - raised where rows are taken
            self._done.put(error)
        finally:
            self._done.put(None)
            with suppress(AttributeError, RuntimeError):
                self._rows.close()  # type: ignore[attr-defined]

    def _take(self, row: Row, done: Future[Row]) -> None:
        try:
            result = done.result()
        except RequestError as error:
            result = row.failed(error)
        except (RayspecError, CancelledError) as error:
            result = row.failed(EngineDeadError(str(error)))
        except Exception as error:  # noqa: BLE001 - raised where rows are taken
            self._done.put(error)
            return
        if not result.is_final:
            self._end()
        self._done.put(result)

    def _completed(self) -> Iterator[Row]:
        num_taken = 0
        while not self._is_ended or num_taken < self._num_given:
            try:
                row = self._done.get(timeout=1.0)
            except queue.Empty:
                self._idle()
                continue
            if isinstance(row, Exception):
                raise row
            if row is None:
                self._end()
                continue
            num_taken += 1
            self._room.release()
            yield row

    def _end(self) -> None:
        """Give no more rows to the pool."""
        with self._lock:
            self._is_ended = True
        self._room.release()


# Writes additional files into the output folder. The first argument returns an iterator over the rows at each call.
Export = Callable[[Callable[[], Iterable[Row]], Location], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job over rows.

    output: a folder; or a .parquet or .jsonl file, next to which a folder with ".run" after its name is made. name:
    stem of the file of all rows in a folder. text_column: of the output. export: writes more files at the end, with the
    names `export_names`. cache: the folder of results that jobs share; None: equal rows of this job share theirs.
    """

    backend: LocalBackend
    task: JobTask
    output: str
    name: str
    text_column: str
    options: JobOptions = field(default_factory=JobOptions)
    export: Export | None = None
    export_names: Sequence[str] = ()
    cache: str | None = None

    def factory(self, dtype: DType | None, texts: Sequence[str]) -> EngineFactory:
        """Return the factory of the engines, see `RowEngineFactory`."""
        return RowEngineFactory(self.task, dtype=dtype, texts=texts)

    def run(self, source: Source) -> RunReport:
        """Run until every row is in the output. Rows of an earlier run of the same job are not done again. A run that
        ends early keeps its rows, and the next run continues with the others.

        Raises ConfigError before an engine starts, if the output folder holds another job, or if the input has changed
        and `changed` is "fail". Raises EngineDeadError if engines died too often, OutputError if rows cannot be
        written, CheckpointError, and SystemExit on SIGTERM.
        """
        location, merged, file_format = output_places(self.output, self.options.format)
        report, drain = RunReport(), Drain(self.options.drain_s)
        form = self.task.settings.sampling.structured_outputs
        reads = [one.path for one in source.files if one.table is None]
        if (corpus := self.task.settings.engine.speculation.corpus) is not None:
            reads.append(corpus)
        with (
            RunFolder(
                location,
                merged=merged or location.join(f"{self.name}.{file_format}"),
                identity=self.task.identity,
                overwrite=self.options.overwrite,
                text_column=self.text_column,
                file_format=file_format,
                report_files=(CONFIG_NAME, *REPORT_NAMES, *self.export_names),
                reads=reads,
                json_schema=form.json if form is not None and isinstance(form.json, str) else None,
            ) as folder,
            self.backend.session(self.task.settings.engine.parallel),
        ):
            exit_on_sigterm()  # like Ray's own handler, but with our exit code
            with drain.watching():
                shared = _SharedResults(self, source, folder, report)
                left = shared.of_cache(self._catch_up(source, folder, report))
                rows = self.backend.rows(source, left, self.options.order) if len(left) else None
                first = shared.first_to_do(rows) if rows is not None and self.cache is not None else []
                if rows is not None and (first or self.cache is None):
                    report.num_left = len(left)
                    folder.commit()
                    rows = self._within_budget(first, rows, report)
                    report.stats = self._complete(rows, folder, report, shared, drain)
                if rows is not None and not report.stopped:
                    shared.check()
                self._conclude(folder, report)
        return report

    def _catch_up(self, source: Source, folder: RunFolder, report: RunReport) -> pa.Table:
        """Take all rows that need no engine, and return the scanned rows that are left. Raises ConfigError."""
        scan = self.backend.scan(source)
        found = compared(scan, folder.parts.done, is_whole=source.is_whole)
        changes = found.describe()
        if changes and self.options.changed == "fail":
            raise ConfigError(
                f"option 'changed' is 'fail', and {changes}: pass --changed keep or redo, or choose another "
                "output folder"
            )
        redone = found.changed if self.options.changed == "redo" else {}
        folder.redo(pa.array(redone, pa.large_string()))
        if kinds := folder.parts.kinds:
            report.add_earlier(
                kinds, lambda **which: (row for row in folder.parts.rows(**which) if row.id not in redone)
            )
            num_kept = f"{kinds.total()} row{'s' * (kinds.total() != 1)}"
            say(f"resuming: {num_kept} of an earlier run kept; --overwrite starts over")
            self._compare_files(folder)
        if changes:
            done_again = f"{len(redone)} are done again" if redone else "the earlier results are kept"
            say(f"{changes}: {done_again}")
        for row in found.errors:
            folder.add(row)
            report.add(row)
        return scan.rows.take(pa.array(sorted([*found.left, *redone.values()]), pa.int64()))

    def _complete(
        self, rows: Iterator[Row], folder: RunFolder, report: RunReport, shared: _SharedResults, drain: Drain
    ) -> EngineStats:
        """Complete rows. Raises EngineDeadError if engines die too often; SystemExit on SIGTERM."""
        # `auto` may choose another data type on another machine. All rows of a folder have the same.
        dtype = folder.manifest.extra.get("config", {}).get("dtype")
        # With `redo`, these are also the rows that are replaced.
        drafts = self.task.settings.engine.speculation
        most = _CHARACTERS_PER_TOKEN * drafts.corpus_tokens if drafts.strategy == "auto" else 0
        factory = self.factory(dtype, folder.parts.newest_texts(most) if most else ())
        pool = self.backend.pool(factory, max_restarts=self.options.max_engine_restarts)
        drain.on_request = pool.drain
        if drain.requested:  # SIGTERM came before the pool existed
            pool.drain()
        engine, failure = self.task.settings.engine, None
        num_wanted = 2 * (engine.parallel.replicas if engine.parallel is not None else 1)
        under_way = CompletedRows(pool.submit, rows, num_wanted=num_wanted * engine.num_seqs, idle=folder.commit_if_due)
        try:
            with under_way as completed:
                say(f"loading model {engine.model!r}")
                seen, config = files_of(self.task.settings.engine.model_dump()), pool.begin()
                with folder.naming_output():
                    folder.location.join(CONFIG_NAME).write(yaml.safe_dump(config, sort_keys=False).encode())
                folder.note({"config": config} | self._compare_files(folder, seen))
                report.num_under_way = under_way.want(num_wanted * config["max_num_seqs"])
                with showing_progress(report, error_console()) as show:
                    for row in completed:
                        if not row.is_final:
                            failure = row
                            continue
                        shared.add(row)
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

    def _compare_files(self, folder: RunFolder, seen: str = "") -> dict[str, Any]:
        """Return the note of what tells the content of the model's files as the folder's first rows were made. Say if
        they were written since, unless that was `seen` before. A model of the hub may be fetched between two calls."""
        now = files_of(self.task.settings.engine.model_dump())
        before = folder.manifest.extra.get(_FILES, {}).get("hash") or now
        if now and now not in (seen, before):
            say("these rows stay, but files of the model were written since: if it is another, pass --overwrite")
        return {_FILES: {"hash": before}}

    def _within_budget(self, first: Sequence[Row], rows: Generator[Row], report: RunReport) -> Generator[Row]:
        """Yield rows while the budgets last, with an estimate for rows under way; one at least, for progress."""
        options, num_begun, begun_tokens = self.options, 0, 0.0
        with closing(rows):
            for row in itertools.chain(first, rows):
                num_characters = len(row.messages or row.document or "")
                begun_tokens += num_characters / _CHARACTERS_PER_TOKEN + (self.task.settings.sampling.max_tokens or 0)
                num_begun += 1
                under_way = begun_tokens * (1 - report.num_done / num_begun)
                num_tokens = report.num_prompt_tokens + report.num_output_tokens + under_way
                if num_begun > 1 and num_tokens > (options.max_total_tokens or math.inf):
                    report.stopped = "max_total_tokens"
                if report.elapsed_s > 3600 * (options.max_hours or math.inf):
                    report.stopped = "max_hours"
                if report.stopped:
                    return
                yield row

    def _conclude(self, folder: RunFolder, report: RunReport) -> None:
        """Write the report and merge the rows. What an earlier run wrote stays, unless a row has changed since."""
        folder.commit()
        if num_lost := report.stats.num_lost_replicas:
            say(f"{num_lost} replicas were lost for good, and the others did their rows; see the log")
        if report.stats.died_at_s:  # the engines after them read the files again
            self._compare_files(folder)
        counts = {
            "prompt_tokens": report.num_prompt_tokens,
            "output_tokens": report.num_output_tokens,
            "seconds": report.elapsed_s,
            **({"quantised_weights": report.stats.weights} if report.stats.weights else {}),
        }
        names = (*REPORT_NAMES, *self.export_names)
        due = {name for name in names if not (folder.is_merged and folder.location.join(name).exists)}
        config, title = folder.manifest.extra.get("config", {}), self.name.capitalize()
        with folder.naming_output():
            if self.export is not None and not (folder.is_merged and due.isdisjoint(self.export_names)):
                self.export(folder.parts.rows, folder.location)
            if not due.isdisjoint(REPORT_NAMES):
                pages = report_pages(report, config=config, title=title, price=self.options.price)
                for name in due.intersection(REPORT_NAMES):
                    folder.location.join(name).write(pages[name].encode())
        # Last: a job that is complete has all its files.
        folder.finish(counts, is_whole=not report.stopped)


class _SharedResults:
    """Gives equal rows one result, of this job or of a shared folder. twins: indices of rows that wait, by hash.
    unread: names of files that could not be read."""

    def __init__(self, job: Job, source: Source, folder: RunFolder, report: RunReport) -> None:
        self._folder, self._report = folder, report
        sampling = job.task.settings.sampling
        self._is_off = sampling.seed is None and (sampling.temperature is None or sampling.temperature >= 1e-5)
        self._twins: dict[str, list[int]] = {}
        self._unread: set[str] = set()
        self._left = Scan(rows=SCAN_SCHEMA.empty_table(), pieces=source.pieces)
        self._cache: ResultCache | None = None
        if job.cache is not None and self._is_off:
            say("option 'cache' has no effect: each run has other texts without a seed or temperature 0")
        elif job.cache is not None:
            engine = job.task.identity["engine"]
            dtype = folder.manifest.extra.get("config", {}).get("dtype", engine["dtype"])
            self._cache = ResultCache(job.cache, job.task.identity | {"engine": engine | {"dtype": dtype}})

    def of_cache(self, left: pa.Table) -> pa.Table:
        """Take the rows of a scan whose results are there. Return the others, of equal rows the first."""
        self._left, first = replace(self._left, rows=left), list[int]()
        if self._is_off:
            return left
        hashes = left["input_hash"].combine_chunks().dictionary_encode()
        is_seen = bytearray(len(hashes.dictionary))
        for index, code in enumerate(hashes.indices.to_pylist()):
            if is_seen[code]:
                self._twins.setdefault(hashes.dictionary[code].as_py(), []).append(index)
            elif self._cache and (found := self._cache.find(hashes.dictionary[code].as_py())) is not None:
                self._give(found, self._left.row(index))
            else:
                first.append(index)
                is_seen[code] = True
        return left.take(pa.array(first, pa.int64()))

    def first_to_do(self, rows: Iterator[Row]) -> list[Row]:
        """Add the rows at the beginning that cannot be read, for which no engine is needed. Return the row after."""
        for row in rows:
            if row.error_kind is None:
                return [row]
            self.add(row)
        return []

    def add(self, row: Row) -> None:
        """Add a completed row, and its result for all rows that are equal to it."""
        if self._cache is not None:  # first, so that a row that a killed run has committed is there
            try:
                self._cache.keep(row)
            except OSError as error:
                say(f"the cache cannot be written ({error_detail(error)}): the job goes on without it")
                self._cache = None
        if row.error_kind == UnreadableFileError.kind:
            self._unread.add(row.id)
        self._folder.add(row)
        self._report.add(row)
        for twin in self._twins.pop(row.input_hash or "", ()):
            self._give(row, self._left.row(twin))

    def check(self) -> None:
        """Add errors for the rows without a result of this run. Files that could not be read have one error."""
        self._folder.commit()
        rows, pieces = self._left.rows, self._left.pieces
        is_there = pc.is_in(rows["id"], value_set=self._folder.parts.new_ids)
        for index in np.flatnonzero(np.logical_not(is_there.to_numpy())).tolist():
            row = self._left.row(index)
            if pieces[rows["piece"][index].as_py()].name not in self._unread:
                problem = f"{row.source}: it, or a row with the same text, changed; run the same command again"
                self.add(row.refused(UnreadableFileError(problem)))

    def _give(self, result: Row, row: Row) -> None:
        none: dict[str, Any] = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "acceptance_rate": None}
        error = result.error and result.error.replace(f"{result.source}: ", f"{row.source}: ", 1)
        same = replace(result, id=row.id, source=row.source, error=error, latency_s=None, decode_s=None, **none)
        self._folder.add(same)
        self._report.add(same, is_shared=True)
