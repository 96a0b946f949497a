"""The output folder of a job: rows that are committed in small files, and a manifest that says how they were made.

    manifest.json                     options that decide the rows, sessions so far, counts
    rows/part-000007-1f2e3d4c.parquet rows, see `parts`
    <name>.parquet                    every row once, when the job is done

Two drivers on one folder: on file systems of this machine a lock refuses the second driver. The kernel releases the
lock when its process ends, however it ends. A remote store has no such lock, so both drivers work there. Nothing is
lost: the names of parts contain the session, and of several rows with the same id one counts.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import IO, Any, Final, Literal

import msgspec
import pyarrow as pa
from typing_extensions import Self

from rayspec.batch.parts import DamagedOutputError, FileFormat, OutputError, Parts, parts_in
from rayspec.batch.rows import OUTPUT_COLUMNS, Row
from rayspec.command.locations import PARTIAL_SUFFIX, Location, UnreadableFileError, error_detail
from rayspec.types import ConfigError

MANIFEST: Final = "manifest.json"
_MANIFEST_VERSION = 4
_LOCK = ".lock"
_ROWS = "rows"
_MIN_ROWS_PER_PART, _MAX_ROWS_PER_PART = 32, 4096
_MIN_PARTS = 64  # a part of a large job has 1 / _MIN_PARTS of all rows
_SECONDS_PER_PART = 5.0
_MAX_SHOWN = 80
_FORMATS: Mapping[str, FileFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}
_LEFT_TO_THE_ENGINE = ('"auto"', "null")

Status = Literal["running", "complete", "interrupted"]


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a driver, with times in UTC. finished: None while the driver runs, and forever if it was killed."""

    run_id: str
    host: str
    process: int
    started: str
    finished: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json. identity: the options that decide the content of the rows, as JSON values."""

    version: int = _MANIFEST_VERSION
    status: Status = "running"
    identity: dict[str, Any]
    text_column: str
    file_format: FileFormat
    sessions: tuple[Session, ...] = ()
    rows: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    extra: dict[str, Any] = {}


def _locked(location: Location) -> IO[bytes] | None:
    """Take the lock of a folder, see `Location.lock`. Raises ConfigError for a file and if another process holds the
    lock."""
    if location.exists and not location.is_folder:
        raise ConfigError(f"option 'output' is {location.name!r}, a file: name a folder")
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
    (after some hours, 1/1000 of the time so far). A driver that is killed loses uncommitted rows, and the next run does
    them again. Safe to use from several threads.

    is_merged: whether the merged file has the same rows as the parts. manifest: as it was written last. parts: the
    committed rows, which may be read while others are committed.
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
        json_schema: str | None = None,
    ) -> None:
        """Begin a job in a new or empty folder, or continue the job that is in the folder.

        merged: the file of all rows. identity: the options that decide the content of the rows, as JSON values; nested
        keys are compared one by one. overwrite: delete the files of an earlier job and begin again; other files stay.
        report_files: names of other files of the job. json_schema: see `Parts`.

        Raises ConfigError for a folder that holds other files, has another identity, is being written by another
        process, or cannot be reached; DamagedOutputError for files in it that cannot be read.
        """
        if text_column in set(OUTPUT_COLUMNS) - {"text"}:
            raise ConfigError(
                f"text_column is {text_column!r}, which is another column of the output: choose another name"
            )
        fresh = Manifest(identity=msgspec.to_builtins(identity), text_column=text_column, file_format=file_format)
        self.location, self._merged = location, merged
        self._guard = threading.RLock()
        self._buffer: list[Row] = []
        self._timer: threading.Timer | None = None
        self._is_overdue = False
        self._opened_s = time.monotonic()
        self._held = ExitStack()  # the lock
        try:
            if (lock := _locked(location)) is not None:
                self._held.enter_context(lock)
            before = _begin(location, fresh, merged, report_files) if overwrite else _continue(location, fresh, merged)
            _remove_leftovers(location, merged)
            self.parts = Parts(location.join(_ROWS), text_column=text_column, json_schema=json_schema)
            self.is_merged = before.status == "complete" and merged.exists and not self.parts.ignores_some
            session = Session(run_id=uuid.uuid4().hex[:8], host=platform.node(), process=os.getpid(), started=_now())
            # last: a folder that cannot be read stays unchanged
            self._save(before, status="running", sessions=(*before.sessions, session))
        except BaseException as error:
            self._held.close()
            if not isinstance(error, UnreadableFileError | OSError):
                raise
            raise ConfigError(
                f"option 'output' is {location.name!r}, which cannot be used ({error_detail(error)}): choose another"
            ) from error

    def redo(self, row_ids: pa.Array) -> None:
        """Mark rows to be done again."""
        if len(row_ids):
            with self._guard:
                self.parts.redo(row_ids)
                self.is_merged = False

    def add(self, row: Row) -> None:
        """Add a row. Raises OutputError if rows cannot be committed; they are then committed with the next rows."""
        with self._guard:
            self._buffer.append(row)
            # Parts grow with the number of rows, so that their number stays small.
            size = max(_MIN_ROWS_PER_PART, min(self.parts.num_stored // _MIN_PARTS, _MAX_ROWS_PER_PART))
            if self._is_overdue or len(self._buffer) >= size:
                self.commit()
            elif self._timer is None:
                # At most 0.1 % of the time so far is lost in a crash, and a long job has a few thousand parts.
                seconds = max(_SECONDS_PER_PART, (time.monotonic() - self._opened_s) / 1000)
                self._timer = threading.Timer(seconds, self._commit_overdue)
                self._timer.daemon = True
                self._timer.start()

    def commit(self) -> None:
        """Write the rows that are not on disk yet as one part, whole or not at all. Raises OutputError."""
        with self._guard:
            self._stop_timer()
            if not self._buffer:
                return
            with self._naming_output():
                self.parts.append(self._buffer, self.manifest.sessions[-1].run_id)
            self.is_merged = False
            self._buffer.clear()
            self._is_overdue = False

    def note(self, extra: dict[str, Any]) -> None:
        """Write further content of the manifest now, so that a run that is killed leaves it. Raises OutputError."""
        with self._guard, self._naming_output():
            self._save(self.manifest, extra=extra)

    def finish(self, counts: dict[str, Any], *, is_whole: bool = True) -> None:
        """Commit, merge the rows into one file, and update the manifest.

        counts: further content of the manifest. is_whole: no row was left out; the job is complete unless some rows
        are to be done again. Raises OutputError.
        """
        with self._guard, self._naming_output():
            self.commit()
            self._merge()
            status: Status = "complete" if is_whole and self.parts.is_complete else "interrupted"
            self._end_session(status, counts)

    def close(self) -> None:
        """Commit the rows so far and release the lock. A job that did not finish can be resumed. Raises OutputError."""
        try:
            self.commit()
        finally:
            self._stop_timer()
            try:
                if self.manifest.status == "running":
                    with suppress(OSError, pa.ArrowException, DamagedOutputError):
                        # The output that the user named, which is not in the run folder, has the rows so far.
                        if not self._merged.is_in(self.location) and len(self.parts):
                            self._merge()
                    with suppress(OSError):  # a manifest that says "running" is that of a killed driver
                        self._end_session("interrupted", self.manifest.counts)
            finally:
                self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit_overdue(self) -> None:
        try:
            self.commit()
        except OutputError:
            self._is_overdue = True  # the next `add` tries again and raises the error

    @contextmanager
    def _naming_output(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise OutputError(
                f"the output {self.location.name!r} cannot be written ({error_detail(error)}): make room or repair it, "
                f"then run the same command again; {self.parts.kinds.total()} rows are in it"
            ) from error

    def _merge(self) -> None:
        if not self.is_merged:
            with self._merged.writing() as file:
                self.parts.write(file, self.manifest.file_format)
            self.is_merged = True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_session(self, status: Status, counts: dict[str, Any]) -> None:
        *before, session = self.manifest.sessions
        kinds = self.parts.kinds
        self._save(
            self.manifest,
            status=status,
            sessions=(*before, msgspec.structs.replace(session, finished=_now())),
            rows={
                "total": kinds.total(),
                "succeeded": kinds[None],
                "failed": {kind: number for kind, number in kinds.most_common() if kind is not None},
            },
            counts=counts,
        )

    def _save(self, manifest: Manifest, **changes: Any) -> None:
        self.manifest = msgspec.structs.replace(manifest, **changes)
        self.location.join(MANIFEST).write(msgspec.json.format(msgspec.json.encode(self.manifest), indent=2) + b"\n")


def output_places(output: str, file_format: FileFormat | None) -> tuple[Location, Location | None, FileFormat]:
    """Return the run folder of an output, the file that all rows go to, and its format. The file is None for an output
    that is a folder. Raises ConfigError."""
    place = Location.parse(output)
    named: FileFormat | None = _FORMATS.get(place.suffix)
    if named is None or place.is_folder:
        return place, None, file_format or "parquet"
    if file_format not in (None, named):
        raise ConfigError(f"option 'format' is {file_format!r} and option 'output' is {output!r}: leave 'format' out")
    return replace(place, path=f"{place.path}.run"), place, named


def _continue(location: Location, fresh: Manifest, merged: Location) -> Manifest:
    """Return the manifest of the folder, or `fresh` for a folder without rows. Raises ConfigError,
    DamagedOutputError."""
    manifest = location.join(MANIFEST)
    if manifest.exists:
        try:
            previous = msgspec.json.decode(manifest.read(), type=Manifest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DamagedOutputError(
                f"{manifest}: not a manifest that can be read ({error}); choose another folder or pass --overwrite"
            ) from error
        if not parts_in(location.join(_ROWS)):
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
    if merged.exists and not merged.is_in(location):
        raise ConfigError(f"option 'output' is {merged.name!r}, which exists: choose another name or pass --overwrite")
    foreign = [entry.file_name for entry in location.entries() if not entry.file_name.startswith(".")]
    if foreign:
        raise ConfigError(
            f"option 'output' is {location.name!r}, which holds {foreign[0]!r} and no {MANIFEST} of a job: choose "
            "another folder, or pass --overwrite to write into it all the same"
        )
    return fresh


def _begin(location: Location, fresh: Manifest, merged: Location, report_files: Collection[str]) -> Manifest:
    """Delete the files of an earlier job, except its manifest, so that the folder always has a manifest."""
    for name in parts_in(location.join(_ROWS)):
        location.join(_ROWS, name).delete()
    stem = PurePosixPath(merged.path).stem  # in a folder, another format may have been asked for before
    for file_name in (f"{stem}.parquet", f"{stem}.jsonl", *report_files):
        location.join(file_name).delete()
    return fresh


def _remove_leftovers(location: Location, merged: Location) -> None:
    """Delete partial files of writers that were killed; not in a remote store, where they may be another driver's."""
    if location.local_path is None:
        return
    of_merged = rf"\.{re.escape(merged.file_name)}\.[0-9a-f]{{8}}{PARTIAL_SUFFIX}"
    ours = rf"\..+\.[0-9a-f]{{8}}{PARTIAL_SUFFIX}"
    for folder, pattern in ((merged.folder, of_merged), (location, ours), (location.join(_ROWS), ours)):
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
