"""The output folder of a job: rows that are committed in small files, and a manifest that says how they were made.

    manifest.json                     options that decide the rows, sessions so far, counts
    rows/part-000007-1f2e3d4c.parquet rows, committed together by one session
    <name>.parquet                    every row once, when the job is done

A part is complete or absent, and never changes. A resume reads the ids, hashes and errors of all parts, and no text.

Two drivers on one folder: on file systems of this machine a lock refuses the second driver. The kernel releases the
lock when its process ends, however it ends. A remote store has no such lock, so both drivers work there. Nothing is
lost: the names of parts contain the session, and of several rows with the same id one counts. Of two drivers whose
options differ, the first ends with an error.

A folder that is moved, deleted or replaced while a job runs has no longer the lock of the job, which writes no more.
"""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
import itertools
import json
import os
import platform
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import PurePosixPath
from typing import IO, Any, Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import Self

from rayspec.batch.rows import OUTPUT_COLUMNS, TRANSIENT_KINDS, Row
from rayspec.command.locations import PARTIAL_SUFFIX, Location, UnreadableFileError, error_detail
from rayspec.types import ConfigError, RayspecError

Status = Literal["running", "complete", "interrupted"]
FileFormat = Literal["parquet", "jsonl"]
_FORMATS: Mapping[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}
# Hardly names of folders.
_NOT_WRITTEN = (".arrow", ".bz2", ".csv", ".gz", ".json", ".lz4", ".ndjson", ".tsv", ".txt", ".xlsx", ".zst")
PART_NAME: Final = r"part-\d{6,}-[0-9a-f]{8}\.parquet"
_DESCRIBING = ("id", "source", "input_hash", "error_kind", "finish_reason")
_ROWS_PER_GROUP, _BYTES_PER_GROUP = 1024, 2**23
_MAX_CHUNKS = 1000
_LONG_FIELDS = frozenset({"text", "tree", "reasoning", "logprobs"})
_TYPES = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
MANIFEST: Final = "manifest.json"
_LOCK = ".lock"
ROWS: Final = "rows"
RUN_SUFFIX: Final = ".run"
_MIN_ROWS_PER_PART, _MAX_ROWS_PER_PART = 32, 4096
_MIN_PARTS = 64  # a part of a large job has 1 / _MIN_PARTS of all rows
_SECONDS_PER_PART = 5.0
_MAX_SHOWN = 80
_LEFT_TO_THE_ENGINE = ('"auto"', "null")

# What is kept in memory of a stored row. source: set where a row was not read or has the id of another row; else null.
# part, row: where the row is.
_INDEX_SCHEMA: Final = pa.schema(
    {
        "id": pa.large_string(),
        "source": pa.large_string(),
        "input_hash": pa.string(),
        "error_kind": pa.string(),
        "is_final": pa.bool_(),
        "part": pa.int32(),
        "row": pa.int32(),
    }
)


class OutputError(RayspecError):
    """Rows cannot be written to the output, or not be read from it now."""

    kind = "output"


class DamagedOutputError(RayspecError):
    """A file of an output folder is damaged: its content is not what was written."""

    kind = "damaged_output"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a driver, with times in UTC. finished: None while the driver runs, and forever if it was killed.
    counts: tokens and seconds of a run that came to its end."""

    run_id: str
    host: str
    process: int
    started: str
    finished: str | None = None
    counts: dict[str, Any] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json. identity: the options that decide the content of the rows, as JSON values.
    merged_bytes: the size of the merged file; None before there is one. merged_parts: a hash of its parts' names."""

    version: int = 4
    status: Status = "running"
    identity: dict[str, Any]
    text_column: str
    file_format: FileFormat
    sessions: tuple[Session, ...] = ()
    rows: dict[str, Any] = {}
    extra: dict[str, dict[str, Any]] = {}
    merged_bytes: int | None = None
    merged_parts: str = ""


def _locked(location: Location) -> IO[bytes] | None:
    """Take the lock of a folder, see `Location.lock`. Raises ConfigError if another process holds the lock."""
    place = location.join(_LOCK)
    try:
        lock = place.lock()
    except BlockingIOError as error:
        holder = place.read().decode(errors="replace") or "another process"
        raise ConfigError(
            f"option 'output' is {location.name!r}, where {holder} is writing: wait for it or choose another folder"
        ) from error
    if lock is not None:
        with suppress(OSError):  # a full disk: then nobody learns who holds the lock
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"process {os.getpid()} of {platform.node()}, since {_now()},".encode())
    return lock


class RunFolder:
    """The output folder of a job. Use it as a context manager: rows are committed however the block ends.

    Rows are committed when there are 32 of them (later 1/64 of all, at most 4096), and 5 s after the first of them
    (after some hours, 1/1000 of the time so far). The next run does again what a killed driver loses.

    is_merged: whether the merged file has the same rows as the parts. parts: may be read while rows are committed.
    """

    def __init__(
        self,
        location: Location,
        *,
        merged: Location,
        identity: Mapping[str, Any],
        overwrite: bool,
        text_column: str,
        file_format: FileFormat,
        report_files: Collection[str] = (),
        reads: Collection[str] = (),
        json_schema: str | None = None,
    ) -> None:
        """Begin a job in a new or empty folder, or continue the job that is in the folder.

        merged: the file of all rows. identity: the options that decide the content of the rows, as JSON values; nested
        keys are compared one by one. overwrite: delete the files of an earlier job and begin again; other files stay.
        report_files: names of other files of the job. reads: paths of files that the job reads, which `overwrite` must
        not delete. json_schema: see `Parts`.

        Raises ConfigError for a folder that holds other files, has another identity, is being written by another
        process, or cannot be reached; DamagedOutputError for files in it that cannot be read.
        """
        if text_column in set(OUTPUT_COLUMNS) - {"text"}:
            raise ConfigError(
                f"text_column is {text_column!r}, which is another column of the output: choose another name"
            )
        fresh = Manifest(identity=msgspec.to_builtins(identity), text_column=text_column, file_format=file_format)
        self.location, self._merged = location, merged
        self._buffer: list[Row] = []
        self._opened_s = self._first_s = time.monotonic()  # of the folder, and of the first row in the buffer
        self._held = ExitStack()
        self._lock: IO[bytes] | None = None
        try:
            stem = PurePosixPath(merged.path).stem  # in a folder, another format may have been asked for before
            names = (f"{stem}.parquet", f"{stem}.jsonl", *report_files)
            _check_usable(location, merged, names, overwrite=overwrite)  # first: a lock leaves a file
            if (lock := _locked(location)) is not None:
                self._lock = self._held.enter_context(lock)
            if overwrite:  # delete the files of an earlier job, except its manifest: the folder always has one
                parts = (location.join(ROWS, name) for name in parts_in(location.join(ROWS)))
                earlier = [*parts, *map(location.join, names)]
                _require_unread(location, earlier, reads)
                for file in earlier:
                    file.delete()
            before = fresh if overwrite else _continue(location, fresh)
            if self._lock is not None:  # else they may be another driver's
                _remove_leftovers(location, merged)
            self.parts = Parts(location.join(ROWS), text_column=text_column, json_schema=json_schema)
            is_written = before.status == "complete" and merged.kind == "file"
            # No part was copied here or deleted, or added by another driver, which may have merged them.
            is_as_merged = self.parts.names_hash == before.merged_parts
            if is_written and is_as_merged:
                _require_bytes(merged, before.merged_bytes)
            self.is_merged = is_written and is_as_merged and not self.parts.ignores_some
            session = Session(run_id=uuid.uuid4().hex[:8], host=platform.node(), process=os.getpid(), started=_now())
            # last: a folder that cannot be read stays unchanged
            self._save(before, status="running", sessions=(*before.sessions, session))
        except BaseException as error:
            self._held.close()
            if not isinstance(error, UnreadableFileError | OSError):
                raise
            raise ConfigError(
                f"option 'output' is {location.name!r}, which cannot be used ({error_detail(error)}): repair it, or "
                "choose another"
            ) from error

    def redo(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again."""
        if len(row_ids):
            self.parts.redo(row_ids)
            self.is_merged = False

    def add(self, row: Row) -> None:
        """Add a row. Raises OutputError if rows cannot be committed; they are then committed with the next rows."""
        if not self._buffer:
            self._first_s = time.monotonic()
        self._buffer.append(row)
        # Parts grow with the number of rows, so that their number stays small.
        if len(self._buffer) >= max(_MIN_ROWS_PER_PART, min(self.parts.num_stored // _MIN_PARTS, _MAX_ROWS_PER_PART)):
            self.commit()
        else:
            self.commit_if_due()

    def commit_if_due(self) -> None:
        """Commit if it is time for the first row that is not on disk. Call this every second. Raises OutputError."""
        now_s = time.monotonic()
        # At most 0.1 % of the time so far is lost in a crash, and a long job has a few thousand parts.
        if now_s - self._first_s >= max(_SECONDS_PER_PART, (now_s - self._opened_s) / 1000):
            self.commit()

    def commit(self) -> None:
        """Write the rows that are not on disk yet as one part, whole or not at all. Raises OutputError."""
        if self._buffer:
            with self.naming_output():
                self._check_place()
                self.parts.append(self._buffer, self.manifest.sessions[-1].run_id)
            self.is_merged = False
            self._buffer.clear()

    def note(self, extra: dict[str, dict[str, Any]]) -> None:
        """Write further content of the manifest now, so that a run that is killed leaves it. Raises OutputError."""
        with self.naming_output():
            self._check_place()
            self._save(self.manifest, extra=extra)

    def finish(self, counts: dict[str, Any], *, is_whole: bool = True) -> None:
        """Commit, merge the rows into one file, and update the manifest, with `counts` of this run. Raises OutputError.

        is_whole: no row was left out; the job is complete unless some rows are to be done again.
        """
        with self.naming_output():
            self.commit()
            self._merge()
            status: Status = "complete" if is_whole and self.parts.is_complete else "interrupted"
            self._end_session(status, counts)

    def close(self) -> None:
        """Commit the rows so far and release the lock. A job that did not finish can be resumed. Raises OutputError."""
        with self._held:
            self.commit()
            if self.manifest.status == "running":
                status: Status = "complete" if self.is_merged else "interrupted"  # nothing was added to a complete job
                with suppress(OSError, pa.ArrowException, DamagedOutputError):
                    # The output that the user named, which is not in the run folder, has the rows so far.
                    if not self._merged.is_in(self.location) and self.parts.num_stored:
                        self._merge()
                with suppress(OSError):  # a manifest that says "running" is that of a killed driver
                    self._end_session(status, {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_place(self) -> None:
        """Raise OSError if the folder is not the one that was locked, or where there are no locks, if it has become
        that of a job with other options: rows would go to another job, or be lost."""
        if self._lock is None:
            try:
                now = msgspec.json.decode(self.location.join(MANIFEST).read(), type=Manifest)
                is_same = _flat(now.identity) == _flat(self.manifest.identity)
            except msgspec.MsgspecError:  # of another version
                is_same = False
            if not is_same:
                raise OSError(errno.ESTALE, "a job with other options has begun in it meanwhile")
            return
        try:
            is_same = os.path.samestat(
                os.stat(str(self.location.join(_LOCK).local_path)), os.fstat(self._lock.fileno())
            )
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            raise OSError(errno.ESTALE, f"the folder, or its file {_LOCK}, was moved, deleted or replaced meanwhile")

    @contextmanager
    def naming_output(self) -> Iterator[None]:
        """Raise the errors of writing in the block as OutputError."""
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            target = getattr(error, "filename2", None)  # what could not be replaced, as a folder
            detail = f"{target}: {error_detail(error)}" if target is not None else error_detail(error)
            raise OutputError(
                f"the output {self.location.name!r} cannot be written ({detail}): make room or repair it, "
                f"then run the same command again, without --overwrite; {self.parts.kinds.total()} rows are in it"
            ) from error

    def _merge(self) -> None:
        if not self.is_merged:
            self._check_place()
            with self._merged.writing() as file:
                self.parts.write(file, self.manifest.file_format)
            self.is_merged = True

    def _end_session(self, status: Status, counts: dict[str, Any]) -> None:
        self._check_place()
        *before, session = self.manifest.sessions
        kinds = self.parts.kinds
        self._save(
            self.manifest,
            status=status,
            sessions=(*before, msgspec.structs.replace(session, finished=_now(), counts=counts)),
            rows={
                "total": kinds.total(),
                "succeeded": kinds[None],
                "failed": {kind: number for kind, number in kinds.most_common() if kind is not None},
            },
            merged_bytes=self._merged.num_bytes,
            merged_parts=self.parts.names_hash,
        )

    def _save(self, manifest: Manifest, **changes: Any) -> None:
        self.manifest = msgspec.structs.replace(manifest, **changes)
        self.location.join(MANIFEST).write(msgspec.json.format(msgspec.json.encode(self.manifest), indent=2) + b"\n")


def output_places(output: str, file_format: FileFormat | None) -> tuple[Location, Location | None, FileFormat]:
    """Return the run folder of an output, the file that all rows go to, and its format. The file is None for an output
    that is a folder. Raises ConfigError."""
    if not output.strip():
        raise ConfigError(f"option 'output' is {output!r}: name a file or folder; . stands for this one")
    place = Location.parse(output)
    if place.path.endswith("/"):
        return replace(place, path=place.path.rstrip("/") or place.path), None, file_format or "parquet"
    named: FileFormat | None = _FORMATS.get(place.suffix)
    if place.suffix in _NOT_WRITTEN and not place.is_folder:
        raise ConfigError(f"option 'output' is {output!r}: name a .jsonl or .parquet file, or a folder")
    if named is None or place.is_folder:
        return place, None, file_format or "parquet"
    if file_format not in (None, named):
        raise ConfigError(f"option 'format' is {file_format!r} and option 'output' is {output!r}: leave 'format' out")
    return replace(place, path=place.path + RUN_SUFFIX), place, named


def _require_bytes(merged: Location, num_bytes: int | None) -> None:
    if num_bytes not in (None, merged.num_bytes):
        raise DamagedOutputError(f"{merged}: not the file that the job wrote; move or delete it to have it made again")


def _continue(location: Location, fresh: Manifest) -> Manifest:
    """Return the manifest of the folder, or `fresh` where it has no rows. Raises ConfigError, DamagedOutputError."""
    manifest = location.join(MANIFEST)
    if manifest.exists:
        try:
            previous = msgspec.json.decode(manifest.read(), type=Manifest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DamagedOutputError(
                f"{manifest}: not a manifest that can be read ({error}); choose another folder or pass --overwrite"
            ) from error
        if not parts_in(location.join(ROWS)):
            return msgspec.structs.replace(fresh, sessions=previous.sessions)
        # An option that was left to the engine has the value that the engine gave it, where `fresh` names a value.
        then, now = (
            _flat(each.identity | {name: getattr(each, name) for name in ("text_column", "file_format", "version")})
            for each in (previous, fresh)
        )
        config = _flat({"engine": previous.extra.get("config", {})})
        for name in config.keys() & then.keys() & now.keys():
            if then[name] in _LEFT_TO_THE_ENGINE and now[name] not in _LEFT_TO_THE_ENGINE:
                then[name] = config[name]
        differences = [
            f"{name} was {then.get(name, 'not given')[:_MAX_SHOWN]} and is {now.get(name, 'not given')[:_MAX_SHOWN]}"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        if differences:
            raise ConfigError(
                f"option 'output' is {location.name!r}, whose rows were made with other options: "
                f"{'; '.join(differences)}: choose another folder, or pass --overwrite to begin again"
            )
        return previous
    return fresh


def _check_usable(location: Location, merged: Location, names: Collection[str], *, overwrite: bool) -> None:
    """Raise ConfigError for a file, for a link to nothing, and for files of no job. `overwrite` allows them, except
    those that have `names` of the job's files, which it would replace."""
    for place in (location, merged):
        if place.local_path is not None and place.local_path.is_symlink() and not place.exists:
            raise ConfigError(
                f"option 'output' is {place.name!r}, a link to {os.readlink(place.local_path)!r}, where nothing is: "
                "delete the link or choose another name"
            )
    if location.exists and not location.is_folder:
        raise ConfigError(f"option 'output' is {location.name!r}, a file: name a folder")
    if location.join(MANIFEST).exists:
        return
    if merged.exists and not merged.is_in(location) and not overwrite:
        raise ConfigError(f"option 'output' is {merged.name!r}, which exists: choose another name or pass --overwrite")
    present = [entry.file_name for entry in location.entries() if not entry.file_name.startswith(".")]
    foreign = [name for name in present if name in names or not overwrite]
    if foreign:
        remedy = "pass --overwrite to write into it all the same"
        if overwrite:
            remedy = f"move {foreign[0]!r} away, which the job would replace"
        raise ConfigError(
            f"option 'output' is {location.name!r}, which holds {foreign[0]!r} and no {MANIFEST} of a job: choose "
            f"another folder, or {remedy}"
        )


def _require_unread(location: Location, earlier: Iterable[Location], reads: Iterable[str]) -> None:
    """Raise ConfigError if a file of an earlier job, which is to be deleted, is one that the job reads."""
    places = {one.canonical_name if one.store.is_local else one.name: one for one in earlier}
    file_names = {one.file_name for one in places.values()}  # of many files, few are to be looked at
    for name in (one for one in reads if one.rpartition("/")[2] in file_names):
        is_remote = "://" in name and not name.startswith("file:")
        if (place := places.get(name if is_remote else Location.parse(name).canonical_name)) is not None:
            raise ConfigError(
                f"option 'output' is {location.name!r}, where --overwrite would delete {place.name!r}, which this job "
                "reads: choose another folder"
            )


def _remove_leftovers(location: Location, merged: Location) -> None:
    """Delete partial files of writers that were killed."""
    of_merged = rf"\.{re.escape(merged.file_name)}\.[0-9a-f]{{8}}{PARTIAL_SUFFIX}"
    ours = rf"\..+\.[0-9a-f]{{8}}{PARTIAL_SUFFIX}"
    for folder, pattern in ((merged.absolute().folder, of_merged), (location, ours), (location.join(ROWS), ours)):
        for file in folder.entries():
            if re.fullmatch(pattern, file.file_name):
                file.delete()


def _now() -> str:
    return dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of nested keys as JSON, by dotted names."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: json.dumps(value)}
    return found


class Parts:
    """The parts in a folder, in the order of their numbers, and which of their rows count.

    Of the rows with one id, the last final row counts, or else the last row. An error row for a row that could not be
    read, or has the id of another row, counts in addition, once for each place in the input, if it is of this session,
    which finds them anew. A stored row takes the memory of its id and hash. Raises DamagedOutputError, or OutputError
    where the store fails. json_schema: that of the texts, whose properties become columns where the rows are merged.
    """

    def __init__(self, folder: Location, *, text_column: str, json_schema: str | None = None) -> None:
        self._folder, self._schema, self._text_column = folder, output_schema(text_column), text_column
        self._json = _json_columns(json_schema, self._schema.names) if json_schema is not None else {}
        names = sorted(parts_in(folder), key=lambda name: (int(name.split("-")[1]), name))
        with ThreadPoolExecutor(8) as threads:  # many, because remote stores answer slowly
            tables = list(threads.map(lambda name: self._read(name, _DESCRIBING), names))
        stored = pa.concat_tables([_INDEX_SCHEMA.empty_table(), *map(_described, tables, itertools.count())])
        index = stored.filter(pc.is_null(stored["source"]))
        self.ignores_some = len(index) < len(stored)
        """Whether earlier sessions stored rows that could not be read."""
        self._state = tuple(names), _counting(index).combine_chunks()
        self._num_earlier = len(names)

    def append(self, rows: Sequence[Row], run_id: str) -> None:
        """Write the rows as one part, whole or not at all. Raises OSError."""
        names, index = self._state
        number = int(names[-1].split("-")[1]) + 1 if names else 1
        name = f"part-{number:06d}-{run_id}.parquet"
        columns = list(zip(OUTPUT_COLUMNS, self._schema.names, strict=True))
        table = pa.Table.from_pylist(
            [{column: getattr(row, field) for field, column in columns} for row in rows], schema=self._schema
        )
        with self._folder.join(name).writing() as file:
            pq.write_table(table, file, row_group_size=_ROWS_PER_GROUP, write_page_checksum=True)
        index = pa.concat_tables([index, _described(table, len(names))])
        # In one step: a signal that comes before it leaves a part that the next call replaces.
        self._state = (*names, name), index.combine_chunks() if index["id"].num_chunks > _MAX_CHUNKS else index

    def redo(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again. Until their new results are appended, the earlier results count."""
        names, index = self._state[0], _counting(self._state[1])
        is_named = pc.is_in(index["id"], value_set=row_ids.cast(pa.large_string()))
        is_final = pc.and_(index["is_final"], pc.invert(is_named))
        self._state = names, index.set_column(index.schema.get_field_index("is_final"), "is_final", is_final)

    # --- which rows count ---

    @property
    def num_stored(self) -> int:
        """The number of rows, those that do not count any more included."""
        return len(self._state[1])

    @property
    def names_hash(self) -> str:
        return hashlib.blake2b("/".join(self._state[0]).encode(), digest_size=16).hexdigest()

    @property
    def is_complete(self) -> bool:
        """Whether no row that counts is to be done again."""
        return bool(pc.all(_counting(self._state[1])["is_final"], min_count=0).as_py())

    @property
    def done(self) -> pa.Table:
        """Table of `id` and `input_hash` of the rows that an engine has done. An unknown hash is null."""
        index = _counting(self._state[1])
        return index.filter(pc.and_(index["is_final"], pc.is_null(index["source"]))).select(["id", "input_hash"])

    @property
    def kinds(self) -> Counter[str | None]:
        """Numbers of the final rows by kind of error; None is the kind of those that succeeded."""
        index = _counting(self._state[1])
        kinds = index["error_kind"].filter(index["is_final"])
        return Counter({found["values"]: found["counts"] for found in pc.value_counts(kinds).to_pylist()})

    @property
    def new_ids(self) -> pa.ChunkedArray:
        """The ids of all rows of this session, those that could not be read included."""
        index = self._state[1]
        return index["id"].filter(pc.greater_equal(index["part"], self._num_earlier))

    # --- reading ---

    def rows(self, *, with_text: bool = True) -> Iterator[Row]:
        """Yield the rows that count. with_text: False leaves out the long columns."""
        fields = dict(zip(self._schema.names, OUTPUT_COLUMNS, strict=True))
        columns = [name for name, field in fields.items() if with_text or field not in _LONG_FIELDS]
        for table in self._tables(columns):
            yield from (Row(**{fields[name]: value for name, value in row.items()}) for row in table.to_pylist())

    def newest_texts(self, most: int) -> list[str]:
        """Return texts of rows that count, of at most so many characters together, the newest last."""
        found, num_characters = list[str](), 0
        for table in self._tables([self._text_column], newest_first=True):
            for text in reversed(table[self._text_column].to_pylist()):
                num_characters += len(text or "")
                if num_characters > most:
                    return found[::-1]
                found += [text] if text else []
        return found[::-1]

    def write(self, file: IO[bytes], file_format: FileFormat) -> None:
        """Write the rows that count, as the whole content of an open file. Raises OSError."""
        tables = map(self._with_json, self._tables(self._schema.names))
        if file_format == "jsonl":
            for table in tables:
                file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in table.to_pylist())
            return
        schema = self._with_json(self._schema.empty_table()).schema
        with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
            waiting: list[pa.Table] = []
            for table in tables:
                waiting.append(table)
                if sum(each.nbytes for each in waiting) >= _BYTES_PER_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))

    def _with_json(self, table: pa.Table) -> pa.Table:
        """Append the columns of properties. A value is null where the text has none of the column's type."""
        found: list[dict[str, Any]] = []
        for row in table.select([self._text_column, "error_kind"]).to_pylist() if self._json else ():
            value = None
            with suppress(ValueError, RecursionError):
                value = json.loads(row[self._text_column] or "") if row["error_kind"] is None else None
            found.append(value if isinstance(value, dict) else {})
        for name, (of, kind) in self._json.items():
            cells: list[Any] = [None] * len(found)
            for index, value in enumerate(found):
                cell = value.get(of)
                if kind is None and cell is not None:
                    cell = json.dumps(cell, ensure_ascii=False)
                with suppress(pa.ArrowException, TypeError, OverflowError, ValueError):
                    cells[index] = pa.scalar(cell, kind or pa.string()).as_py()
            table = table.append_column(name, pa.array(cells, kind or pa.string()))
        return table

    def _tables(self, columns: Sequence[str], *, newest_first: bool = False) -> Iterator[pa.Table]:
        names, index = self._state[0], _counting(self._state[1])
        bounds = np.searchsorted(index["part"].to_numpy(), np.arange(len(names) + 1))  # the index has the parts' order
        parts = list(zip(names, itertools.pairwise(bounds), strict=True))
        for name, (start, end) in reversed(parts) if newest_first else parts:
            if start < end:
                yield self._read(name, columns).take(index["row"][start:end])

    def _read(self, name: str, columns: Sequence[str]) -> pa.Table:
        place = self._folder.join(name)
        schema = pa.schema([self._schema.field(column) for column in columns])
        try:
            with place.open() as file, pq.ParquetFile(file, page_checksum_verification=True) as content:
                table = content.read(columns=list(columns)).select(list(columns)).cast(schema)
                num_rows = content.metadata.num_rows  # checksums of pages do not cover the headers of pages
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            try:
                place.read()
            except OSError as failure:  # then nothing is known to be damaged
                raise OutputError(
                    f"{place}: could not be read ({error_detail(failure)}): run the same command again, without "
                    "--overwrite, when it can"
                ) from error
            raise _damaged(place, error_detail(error)) from error
        if len(table) != num_rows or num_rows == 0 or ("id" in columns and table["id"].null_count):
            raise _damaged(place, f"{len(table)} rows instead of {num_rows}, or rows without an id")
        return table


def _damaged(place: Location, detail: str) -> DamagedOutputError:
    return DamagedOutputError(
        f"{place}: not rows as they were written ({detail}); put it back, or delete it to have its rows done again"
    )


def parts_in(folder: Location) -> list[str]:
    return [entry.file_name for entry in folder.entries() if re.fullmatch(PART_NAME, entry.file_name)]


def _described(rows: pa.Table, part: int) -> pa.Table:
    """Return the columns of _INDEX_SCHEMA for the rows of a part."""
    is_transient = pc.is_in(rows["error_kind"], value_set=pa.array(sorted(TRANSIENT_KINDS)))
    is_aborted = pc.fill_null(pc.equal(rows["finish_reason"], "abort"), fill_value=False)
    is_input_error = pc.and_(pc.is_valid(rows["error_kind"]), pc.is_null(rows["input_hash"]))
    columns: dict[str, Any] = {
        "id": rows["id"],
        "source": pc.if_else(is_input_error, pc.fill_null(rows["source"], ""), pa.scalar(None, pa.string())),
        "input_hash": rows["input_hash"],
        "error_kind": rows["error_kind"],
        "is_final": pc.invert(pc.or_(is_transient, is_aborted)),
        "part": np.full(len(rows), part),
        "row": np.arange(len(rows)),
    }
    return pa.table(columns).cast(_INDEX_SCHEMA)


def _counting(index: pa.Table) -> pa.Table:
    """Return those of the rows that count: one of each id, and one for each place of an error of the input."""
    with_source = pc.binary_join_element_wise(index["id"], index["source"], pa.scalar("\0", pa.large_string()))
    chunks = pc.coalesce(with_source, index["id"]).dictionary_encode().chunks  # equal codes for equal rows
    codes = np.concatenate([np.empty(0, np.int64), *(each.indices.to_numpy(zero_copy_only=False) for each in chunks)])
    rank = np.arange(len(codes)) + len(codes) * np.asarray(index["is_final"].to_numpy(), dtype=np.int64)
    best = np.full(int(codes.max(initial=-1)) + 1, -1)
    np.maximum.at(best, codes, rank)
    return index.filter(pa.array(best[codes] == rank))


def output_schema(text_column: str) -> pa.Schema:
    """Return the columns of the output. text_column: the name of the column of the generated text."""
    token = {"token": pa.string(), "logprob": pa.float64()}
    logprobs = pa.list_(pa.struct(token | {"top": pa.list_(pa.struct(token))}))
    kinds = {"int": pa.int64(), "float | None": pa.float64(), "list[dict[str, Any]] | None": logprobs}  # else text
    columns = (field for field in fields(Row) if field.name in OUTPUT_COLUMNS)
    return pa.schema(
        (text_column if one.name == "text" else one.name, kinds.get(str(one.type), pa.string())) for one in columns
    )


def _json_columns(schema: str, taken: Collection[str]) -> dict[str, tuple[str, pa.DataType | None]]:
    """Return for each column its property of a JSON schema, and its type; None: JSON text. `taken` get "json_"."""
    root = json.loads(schema)
    with suppress(AttributeError, TypeError):  # of a schema that is none, which each row tells
        of = root.get("properties", {})
        return {f"json_{name}" if name in taken else name: (name, _arrow_type(of[name], root)) for name in of}
    return {}


def _arrow_type(schema: Any, root: Any, depth: int = 0) -> pa.DataType | None:
    """Return the type of the values of a JSON schema; None where they have no single type."""
    if not isinstance(schema, dict) or depth > 8:  # of types in types
        return None
    if str(schema.get("$ref")).startswith("#/$defs/"):
        return _arrow_type(root.get("$defs", {}).get(schema["$ref"].removeprefix("#/$defs/")), root, depth + 1)
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1:
        return _arrow_type(choices[0], root, depth + 1)
    kinds = {schema.get("type")} if isinstance(schema.get("type"), str) else {*schema.get("type", ())} - {"null"}
    if not kinds and all(isinstance(one, str | None) for one in schema.get("enum", (0,))):
        return pa.string()
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind == "array" and (of_items := _arrow_type(schema.get("items"), root, depth + 1)) is not None:
        return pa.list_(of_items)
    return _TYPES.get(str(kind))
