"""Files and batches of the endpoint in a folder or an object store, which holds their complete state.

files/ID/content      the content of the file
files/ID/file.json    its FileObject, written after the content; without it, the file does not exist
batches/ID/batch.json the newest Batch, written at its creation and by its runner
batches/ID/client     what stands for the client that created it; clients do not see it
batches/ID/cancel     exists once a client has asked to cancel; contains the time in Unix seconds
batches/ID/results/   lines of answers, in parts that never change
.lock                 locked by the server that runs the batches
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import PurePath
from typing import IO, Literal, TypeVar

import msgspec
from typing_extensions import Self

from rayspec.command.locations import FILE_ERRORS, PARTIAL_SUFFIX, Location, UnreadableFileError, limited_lines
from rayspec.openai.batch import (
    FINAL,
    MAX_LINE_BYTES,
    Batch,
    BatchLine,
    BatchRequest,
    BatchResult,
    Deleted,
    FileObject,
    Page,
    PageRequest,
    Purpose,
    read_batch,
)
from rayspec.openai.protocol import InvalidRequestError
from rayspec.types import ConfigError

logger = logging.getLogger(__name__)

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_MOST_NAME = 255
_MOST_BATCHES, _FEW_BATCHES, _MOST_FILES = 100, 20, 10_000
T = TypeVar("T")
STORE_ERRORS = (*FILE_ERRORS, UnreadableFileError)  # of a store that fails


@dataclass(frozen=True, slots=True)
class BatchStore:
    """Files and batches in a folder. All methods block, and raise STORE_ERRORS where the store fails. Unknown and
    malformed ids raise InvalidRequestError, and so do entries that cannot be read; the log names these once. Ids sort
    by time. clock: returns Unix seconds. One large line is read at a time."""

    folder: Location
    clock: Callable[[], float] = time.time
    _unreadable: set[str] = field(default_factory=set, init=False, compare=False)
    _large: threading.Lock = field(default_factory=threading.Lock, init=False, compare=False)

    @classmethod
    def at(cls, folder: str) -> Self:
        """folder: a path or URI, whose files only the user of the server may read."""
        return cls(replace(Location.parse(folder), is_private=True))

    def lock(self) -> IO[bytes] | None:
        """Lock the folder for this process, until the returned file is closed. Return None where the file system has no
        locks, as an object store. Raises ConfigError while another process has the lock."""
        try:
            return self.folder.join(".lock").lock()
        except BlockingIOError:
            raise ConfigError(
                f"option 'batches' is {self.folder.name!r}, where another server runs batches: name another folder"
            ) from None

    def check(self) -> None:
        """Raise FileNotFoundError where the folder is gone, as after its disk: what it has had would count as deleted,
        and new files would be written elsewhere."""
        if self.folder.local_path is not None and not self.folder.join(".lock").exists:
            raise FileNotFoundError(f"{self.folder.name} is gone: bring it back, or start the server again")

    def sweep(self, age_s: float) -> None:
        """Delete what interrupted uploads and writes have left for longer than `age_s`, on this machine."""
        root, latest_s = self.folder.local_path, self.clock() - age_s
        if root is None:
            return
        for name in self._ids("files"):
            folder = root / "files" / name
            with suppress(OSError):  # deleted meanwhile
                written = [path.lstat().st_mtime for path in (folder, *folder.iterdir())]
                if _ID.fullmatch(name) and not (folder / "file.json").exists() and max(written) < latest_s:
                    shutil.rmtree(folder)
        for path in root.rglob(f".*{PARTIAL_SUFFIX}"):
            with suppress(OSError):
                if path.lstat().st_mtime < latest_s:
                    path.unlink()

    @contextmanager
    def new_file(self, file_id: str, filename: str, purpose: Purpose) -> Iterator[IO[bytes]]:
        """Create a file. It exists after the block, unless the block raises."""
        name = PurePath(filename.replace("\\", "/")).name[:_MOST_NAME] or "upload.jsonl"
        try:
            with self._place(file_id).join("content").writing() as content:
                yield content
                size = content.tell()
            file = FileObject(id=file_id, bytes=size, created_at=int(self.clock()), filename=name, purpose=purpose)
            self._place(file_id).join("file.json").write(msgspec.json.encode(file))
        except BaseException:
            self._place(file_id).delete_folder()
            raise

    def file(self, file_id: str) -> FileObject:
        return self._read(self._place(file_id).join("file.json"), FileObject, file_id)

    def open_file(self, file_id: str) -> IO[bytes]:
        self.file(file_id)
        return self._place(file_id).join("content").open()

    def delete_file(self, file_id: str) -> Deleted:
        """Delete a file: first its `file.json`, without which the file does not exist, then all the rest."""
        self.file(file_id)
        self._place(file_id).join("file.json").delete()
        self._place(file_id).delete_folder()
        return Deleted(id=file_id, object="file")

    def files(self, query: PageRequest) -> Page[FileObject]:
        found = self._all("files", self.file, after=query.after, order=query.order)
        return Page.of((one for one in found if query.purpose in (None, one.purpose)), query.limit or _MOST_FILES)

    def new_batch(self, asked: BatchRequest, client: str = "") -> Batch:
        """Save and return a new batch of a client. Raises InvalidRequestError where its input is for no batch."""
        if self.file(asked.input_file_id).purpose != "batch":
            problem = f"{asked.input_file_id!r} was not uploaded with purpose 'batch'; upload it again so"
            raise InvalidRequestError.of("input_file_id", problem)
        now = int(self.clock())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + asked.window_s,
            metadata=asked.metadata,
        )
        try:
            self._place(batch.id).join("client").write(client.encode())
            self.save(batch)
        except BaseException:
            self._place(batch.id).delete_folder()
            raise
        return batch

    def client(self, batch_id: str) -> str:
        """Return the client of a batch; an empty text for one of a server that did not note it."""
        try:
            return self._place(batch_id).join("client").read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def batch(self, batch_id: str) -> Batch:
        """Return a batch as clients see it: after a request to cancel, its status is `cancelling` until it ends."""
        batch = self.saved(batch_id)
        asked_at = None if batch.status in FINAL else self.cancel_asked_at(batch_id)
        if asked_at is None:
            return batch
        return msgspec.structs.replace(batch, status="cancelling", cancelling_at=asked_at)

    def saved(self, batch_id: str) -> Batch:
        """Return a batch as its runner saved it."""
        return self._read(self._place(batch_id).join("batch.json"), Batch, batch_id)

    def save(self, batch: Batch) -> None:
        self._place(batch.id).join("batch.json").write(msgspec.json.encode(batch))

    def batches(self, query: PageRequest) -> Page[Batch]:
        if query.purpose is not None:
            raise InvalidRequestError.of("purpose", "only files have one; leave it out", code="unsupported_parameter")
        found = self._all("batches", self.batch, after=query.after, order=query.order)
        return Page.of(found, min(query.limit or _FEW_BATCHES, _MOST_BATCHES))

    def batch_ids(self) -> list[str]:
        return [one for one in self._ids("batches") if _ID.fullmatch(one)]

    def cancel(self, batch_id: str) -> Batch:
        """Ask to cancel a batch, and return the batch. Raises InvalidRequestError for a batch that has ended."""
        batch = self.batch(batch_id)
        if batch.status in FINAL:
            raise InvalidRequestError(
                f"a batch that is {batch.status} cannot be cancelled", code="conflict", status=409
            )
        if batch.status != "cancelling":
            self._place(batch_id).join("cancel").write(str(int(self.clock())).encode())
        return self.batch(batch_id)

    def delete_batch(self, batch_id: str) -> Deleted:
        """Delete a batch, but not its files. Raises InvalidRequestError for a batch that has not ended."""
        batch = self.batch(batch_id)
        if batch.status not in FINAL:
            message = f"a batch that is {batch.status} cannot be deleted: cancel it first"
            raise InvalidRequestError(message, code="conflict", status=409)
        self._place(batch_id).join("batch.json").delete()
        self._place(batch_id).delete_folder()
        return Deleted(id=batch_id, object="batch")

    def cancel_asked_at(self, batch_id: str) -> int | None:
        try:
            asked = self._place(batch_id).join("cancel").read()
        except FileNotFoundError:
            return None
        return int(asked) if asked.isdigit() else int(self.clock())

    def lines(self, batch: Batch, max_lines: int | None = None) -> Iterator[BatchLine | BatchResult]:
        """Yield the lines of the batch's input file, see `read_batch`. Raises InvalidRequestError if the file has more
        lines than that, empty ones included."""
        with self.open_file(batch.input_file_id) as file:
            lines = limited_lines(file, MAX_LINE_BYTES)
            yield from read_batch(itertools.islice(lines, max_lines), source=batch.input_file_id, large=self._large)
            if next(lines, None) is not None:
                raise InvalidRequestError(f"the file has more than {max_lines} lines: split it", code="too_many_lines")

    def add_results(self, batch_id: str, results: Iterable[bytes]) -> None:
        """Write lines of results in one part, whole or not at all. Its name is unique, even if others add parts at the
        same time."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.jsonl"
        with self._place(batch_id).join("results", name).writing() as file:
            file.writelines(results)

    def results(self, batch_id: str) -> Iterator[tuple[str, bool, bytes]]:
        """Yield for each answered line its id, whether it failed, and its result. Of two results, the first counts."""
        seen = set()
        for part in self._place(batch_id).join("results").entries():
            if part.suffix != ".jsonl":
                continue
            with part.open() as file:
                for line in file:
                    try:
                        row = msgspec.json.decode(line, type=BatchResult)
                    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                        self._report(part, error)
                        continue
                    if row.id not in seen:
                        seen.add(row.id)
                        yield row.id, row.failed, line

    def output_file_id(self, batch_id: str, kind: Literal["output", "errors"]) -> str:
        """Return the same id each time, so that a batch that is finished twice has one file of each kind."""
        digest = batch_id.removeprefix("batch_")
        return f"file-{digest[:16]}{sha256(f'{digest} {kind}'.encode()).hexdigest()[:16]}"

    def _place(self, name: str) -> Location:
        """Return the folder of an object. Raises InvalidRequestError before a malformed id becomes part of a path."""
        match = _ID.fullmatch(name)
        if match is None:
            raise _unknown(name)
        return self.folder.join("files" if match[1] == "file-" else "batches", name)

    def _read(self, location: Location, kind: type[T], name: str) -> T:
        try:
            return msgspec.json.decode(location.read(), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            raise _unknown(name) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._report(location, error)
            raise _unknown(name) from None

    def _report(self, location: Location, error: Exception) -> None:
        if location.name not in self._unreadable:
            self._unreadable.add(location.name)
            logger.warning("%s cannot be read and is skipped: %s", location.name, error)

    def _all(
        self, folder: str, read: Callable[[str], T], *, after: str | None, order: Literal["asc", "desc"]
    ) -> Iterator[T]:
        names = self._ids(folder)[:: 1 if order == "asc" else -1]
        if after is not None:
            if after not in names:
                raise _unknown(after)
            names = names[names.index(after) + 1 :]
        for name in names:
            with suppress(InvalidRequestError):  # deleted, or not there yet
                yield read(name)

    def _ids(self, folder: str) -> list[str]:
        return [one.file_name for one in self.folder.join(folder).entries()]


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def _unknown(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"there is no object {name[:80]!r} here", code="not_found", status=404)
