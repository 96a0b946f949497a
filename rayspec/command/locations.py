"""Locations of files: a path of this machine, or a URI of a store for which pyarrow has a file system."""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import io
import os
import posixpath
import re
import shutil
import stat
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Literal, cast
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from rayspec.types import ConfigError, InputFileError

PARTIAL_SUFFIX = ".partial"
# What reading a file may raise, whatever is in it. The last is of names of columns that are not UTF-8.
FILE_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError)
_URI = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<path>.*?)(?P<query>\?\w+=[^/]*)?", re.DOTALL
)
_SCHEME = re.compile(r"(file|s3|gs|abfs|hdfs):", re.IGNORECASE)

Kind = Literal["folder", "file"]


class UnreadableFileError(InputFileError):
    kind = "unreadable_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A file system, and the form of its names. uri: scheme and authority; empty for plain paths. base: the file
    system's own address of that place. query: options of a URI. has_atomic_put: a written file appears only when
    complete."""

    filesystem: fs.FileSystem
    uri: str = ""
    base: str = ""
    query: str = ""
    has_atomic_put: bool = False

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, fs.LocalFileSystem)


@dataclass(frozen=True, slots=True)
class Location:
    """A file or folder, which may not exist. `path` is within the store; "/" separates its parts. is_private: here,
    only their owner can use new files and folders.

    Methods that test and list raise UnreadableFileError if the store does not answer; others raise OSError.
    """

    store: Store
    path: str
    is_private: bool = False

    @classmethod
    def parse(cls, name: str) -> Location:
        """Parse a path or URI, the inverse of `Location.name`. "%xx" in a URI is a character.

        Raises ConfigError for a URI without a file system and for a name that no file can have, UnreadableFileError for
        a store that does not answer.
        """
        _refuse_impossible(name)
        uri = _URI.fullmatch(name)
        if uri is None:
            if (scheme := _SCHEME.match(name)) is not None and not os.path.lexists(name):
                raise ConfigError(f"{name!r}: a URI begins with {scheme[0]}//: write it so, or ./ before a path")
            return cls(Store(filesystem=fs.LocalFileSystem()), name)
        user, at, _ = uri["authority"].rpartition("@")
        if (at and ":" in user) or "secret" in (uri["query"] or ""):  # names appear in rows, reports and logs
            raise ConfigError(
                f"a {uri['scheme']} URI holds a password or secret: leave it out, and give credentials as the store's "
                "own tools take them (environment, configuration file, role of the machine)"
            )
        path = unquote(uri["path"], errors="surrogateescape").strip("/")
        _refuse_impossible(path)
        root, query = f"{uri['scheme'].lower()}://{uri['authority']}", uri["query"] or ""
        if root == "file://localhost":  # the same place, by the standard of such URIs
            root = "file://"
        try:
            filesystem, base = fs.FileSystem.from_uri(f"{root}/{query}")
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"{name!r}: scheme {uri['scheme']!r} cannot be used so ({error}); give a path, or a URI that starts "
                "with s3://, gs://, abfs://, hdfs:// or file://"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise UnreadableFileError(f"{name}: {root} does not answer ({error_detail(error)})") from error
        atomic = filesystem.type_name in {"s3", "gcs", "abfs"}  # an object appears only when it is complete
        store = Store(filesystem=filesystem, uri=root, base=base.rstrip("/"), query=query, has_atomic_put=atomic)
        return cls(store, path)

    @property
    def name(self) -> str:
        """The path or URI, for messages and for `parse`."""
        if not self.store.uri:
            return self.path
        escaped = self.path.replace("%", "%25").replace("?", "%3F")
        # Bytes that are not UTF-8, too.
        escaped = "".join(f"%{ord(char) - 0xDC00:02X}" if "\udc80" <= char <= "\udcff" else char for char in escaped)
        return f"{self.store.uri}/{escaped}{self.store.query}"

    def __str__(self) -> str:
        return self.name

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """Suffix of the file's name, in lower case, with its dot."""
        return PurePosixPath(self.path).suffix.lower()

    @property
    def local_path(self) -> Path | None:
        """The path on this machine; None in a remote store."""
        return Path(self._address) if self.store.is_local else None

    @property
    def folder(self) -> Location:
        """The folder that has this file or folder."""
        return replace(self, path=posixpath.dirname(self.path))

    def is_in(self, folder: Location) -> bool:
        """Whether this place is directly in `folder`, which is named in the same way."""
        return PurePosixPath(self.folder.path) == PurePosixPath(folder.path)

    def absolute(self) -> Location:
        """Return the same place with a path that does not depend on the working folder."""
        return self if self.store.uri else replace(self, path=str(Path(self.path).absolute()))

    @property
    def base(self) -> Location:
        """The folder of the files of this input: the folder itself, the parent of a file, or the part of a pattern
        before its first wildcard."""
        if self.is_folder:
            return self
        path = PurePosixPath(self.path)
        num_fixed = len(path.parts) - 1
        if self.is_pattern:
            num_fixed = next(index for index, part in enumerate(path.parts) if glob.has_magic(part))
        return replace(self, path=str(PurePosixPath(*path.parts[:num_fixed])))

    @property
    def canonical_name(self) -> str:
        """An absolute name without symbolic links, the same for every way to name this place."""
        return os.path.realpath(self._address) if self.store.is_local else f"{self.store.uri}/{self.path}"

    def join(self, *names: str) -> Location:
        return replace(self, path=posixpath.join(self.path, *names))

    @property
    def exists(self) -> bool:
        return self.kind is not None

    @property
    def is_folder(self) -> bool:
        return self.kind == "folder"

    @property
    def is_pattern(self) -> bool:
        """Whether the path has characters of a glob pattern. An existing file is no pattern, whatever its name."""
        return glob.has_magic(self.path) and not self.exists

    def below(self) -> tuple[list[Location], list[Location]]:
        """Return the files of a folder and of all folders below it, in order, and the folders that cannot be listed.

        Files and folders with a leading dot are left out. Links to folders are followed; no folder is listed twice.
        """
        num_above = len(PurePosixPath(self.path).parts)
        files, unreadable = [], []
        try:
            for place, kind in self._walked():
                is_hidden = any(part.startswith(".") for part in PurePosixPath(place.path).parts[num_above:])
                if kind is None:
                    unreadable.append(place)
                elif kind == "file" and not is_hidden:
                    files.append(place)
        except UnreadableFileError:
            return [], [self]
        return sorted(files, key=_by_parts), sorted(unreadable, key=_by_parts)

    def entries(self) -> list[Location]:
        """Return the files and folders directly in a folder, in order; none if there is no folder."""
        with self._asking():
            if self.local_path is not None:
                if not self.exists:
                    return []
                return [self.join(name) for name in sorted(os.listdir(self._address or "."))]
            selector = fs.FileSelector(self._address, allow_not_found=True)
            return sorted(
                map(self._at, (info.path for info in self.store.filesystem.get_file_info(selector))), key=_by_parts
            )

    def glob(self) -> list[Location]:
        """Return the files and folders that match the path as a pattern of "*", "?", "[...]" and "**", in order.

        "*" does not match across "/", nor a leading dot. "**" does not match folders with a leading dot.
        """
        if self.local_path is not None and "**" not in self.path:
            return [self._at(address) for address in sorted(glob.glob(self._address))]
        parts = PurePosixPath(self.path).parts
        num_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
        folder, pattern = replace(self, path=posixpath.join("", *parts[:num_fixed])), parts[num_fixed:]
        found = (place for place, kind in folder._walked() if kind is not None)
        matching = (place for place in found if _matches(PurePosixPath(place.path).parts[num_fixed:], pattern))
        return sorted(matching, key=_by_parts)

    def open(self) -> io.BufferedReader:
        """Open the file for reading. The stream is seekable, and the caller closes it. A pipe or a device, which may
        block or never end, raises OSError."""
        if self.local_path is not None:
            opener = lambda path, flags: os.open(path, flags | os.O_NONBLOCK)  # noqa: E731 - a pipe waits for its writer
            file = open(self.local_path, "rb", opener=opener)  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.close()
                raise OSError(errno.EINVAL, "it is a pipe or a device, and no file")
            return file
        return io.BufferedReader(self.store.filesystem.open_input_file(self._address))

    def read(self) -> bytes:
        with self.open() as file:
            return file.read()

    def write(self, content: bytes) -> None:
        """Replace the content of the file, see `writing`."""
        with self.writing() as file:
            file.write(content)

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Open a temporary file that replaces this file when the block ends. If the block raises, nothing changes.

        Missing folders are made. Until the end, and after a crash, readers see the old file; a crash also leaves a
        hidden file that ends in PARTIAL_SUFFIX. On this machine the file is on disk when the block has ended.
        """
        folder, name = posixpath.split(self.path)
        partial = replace(self, path=posixpath.join(folder, f".{name}.{uuid.uuid4().hex[:8]}{PARTIAL_SUFFIX}"))
        if self.local_path is None:
            with tempfile.NamedTemporaryFile() as spool:
                yield cast("IO[bytes]", spool)
                spool.flush()
                self._upload(spool.name, partial)
            return
        self.folder.make_folder()
        try:
            opener = functools.partial(os.open, mode=0o600) if self.is_private else None
            with open(partial._address, "xb", opener=opener) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial._address, self._address)
        except BaseException:
            partial.delete()
            raise
        descriptor = os.open(self.local_path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # so that the new name survives a crash
        finally:
            os.close(descriptor)

    def _upload(self, path: str, partial: Location) -> None:
        """Copy a file to this place of a remote store in one call: closing a stream early would store half of it."""
        store, target = self.store, self if self.store.has_atomic_put else partial
        if target is partial:
            store.filesystem.create_dir(posixpath.dirname(self._address), recursive=True)
        try:
            fs.copy_files(
                path, target._address, source_filesystem=fs.LocalFileSystem(), destination_filesystem=store.filesystem
            )
            if target is partial:
                store.filesystem.move(partial._address, self._address)
        except BaseException:
            if target is partial:
                partial.delete()
            raise

    def delete(self) -> None:
        """Delete the file. A missing file is no error."""
        if self.local_path is not None:
            self.local_path.unlink(missing_ok=True)
        elif self.exists:
            self.store.filesystem.delete_file(self._address)

    def delete_folder(self) -> None:
        """Delete the folder with all that is in it. A missing folder is no error."""
        if self.local_path is not None:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.local_path)
        elif self.exists:
            self.store.filesystem.delete_dir(self._address)

    def make_folder(self) -> Path | None:
        """Make the folder, with missing folders above it, and return its path on this machine. A remote store makes
        folders by itself: return None."""
        if self.local_path is None:
            return None
        missing = [folder for folder in (self.local_path, *self.local_path.parents) if not folder.exists()]
        if any(folder.name == ".." for folder in missing):  # with its parent made, it would be a place that is there
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.local_path))
        for folder in reversed(missing):
            folder.mkdir(mode=0o700 if self.is_private else 0o777, exist_ok=True)
        return self.local_path

    def lock(self) -> IO[bytes] | None:
        """Make and lock this file until the returned file is closed, also by the end of the process, however it ends.
        Return None where there are no locks, as in a remote store. Raises BlockingIOError while another process has
        the lock."""
        if self.local_path is None:
            return None
        self.folder.make_folder()
        opener = functools.partial(os.open, mode=0o600 if self.is_private else 0o666)
        file = open(self.local_path, "a+b", opener=opener)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}:
                return None
            raise
        return file

    @property
    def _address(self) -> str:
        """The address in the file system's own form."""
        return f"{self.store.base}/{self.path}".rstrip("/") if self.store.uri else self.path

    def _at(self, address: str) -> Location:
        path = address.removeprefix(self.store.base).strip("/") if self.store.uri else address
        return replace(self, path=path)

    @property
    def kind(self) -> Kind | None:
        """The kind of object at this place; None if there is none. Each use is a request to the store."""
        return self._asked()[0]

    @property
    def num_bytes(self) -> int | None:
        """The size of the file; None if there is no file. Each use is a request to the store."""
        kind, num_bytes = self._asked()
        return num_bytes if kind == "file" else None

    def _asked(self) -> tuple[Kind | None, int]:
        with self._asking():
            if self.local_path is not None:
                try:
                    status = os.stat(self._address)
                except (FileNotFoundError, NotADirectoryError):
                    return None, 0
                return "folder" if stat.S_ISDIR(status.st_mode) else "file", status.st_size
            info = self.store.filesystem.get_file_info(self._address)
        kinds: dict[fs.FileType, Kind | None] = {fs.FileType.NotFound: None, fs.FileType.Directory: "folder"}
        return kinds.get(info.type, "file"), info.size or 0

    def _walked(self) -> Iterator[tuple[Location, Kind | None]]:
        """Yield what is below a folder, with kinds; None: cannot be listed. Locally without leading dots."""
        if self.local_path is not None:
            yield from ((self._at(path), kind) for path, kind in _walk(str(self.local_path)))
            return
        with self._asking():
            selector = fs.FileSelector(self._address, allow_not_found=True, recursive=True)
            infos = self.store.filesystem.get_file_info(selector)
        for info in infos:
            yield self._at(info.path), "folder" if info.type == fs.FileType.Directory else "file"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except UnreadableFileError:
            raise
        except Exception as error:  # the store of hf:// has errors of its own
            raise UnreadableFileError(f"{self.name}: could not be read ({error_detail(error)})") from error


def limited_lines(file: IO[bytes], most: int) -> Iterator[bytes]:
    """Yield the lines of a file; of a line of more than `most` bytes, only its beginning, which is longer, too."""
    while line := file.readline(most + 1):
        yield line
        while len(line) > most and not line.endswith(b"\n"):
            line = file.readline(most + 1)


def error_detail(error: BaseException) -> str:
    """Return the message of a file system's error, without its number."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _refuse_impossible(name: str) -> None:
    """Refuse a name that the system cannot be asked for. Raises ConfigError."""
    if "\0" in name or any("\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff" for char in name):
        raise ConfigError(f"{name!r}: no file has such a name, which holds a null or half of a surrogate pair")


def _walk(root: str) -> Iterator[tuple[str, Kind | None]]:
    """Yield what is below a folder of this machine, with its kind; None is a folder that cannot be listed. Other
    objects, such as pipes, are left out, and so are names with a leading dot.

    Links to folders are followed last: a folder with several names is listed by its own, and once.
    """
    seen: set[tuple[int, int]] = set()
    folders = deque(["" if root == "." else root])
    while folders:
        folder = folders.popleft()
        try:
            status = os.stat(folder or ".")
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder or ".") as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            yield folder, None
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if entry.name.startswith("."):
                continue
            if os.path.isdir(path):
                yield path, "folder"
                (folders.append if entry.is_symlink() else folders.appendleft)(path)
            elif os.path.isfile(path) or not os.path.exists(path):  # reading a broken link reports the error
                yield path, "file"


def _by_parts(location: Location) -> tuple[str, ...]:
    return PurePosixPath(location.path).parts


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        here = _matches(parts, pattern[1:]) if len(pattern) > 1 else not parts
        return here or (bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
