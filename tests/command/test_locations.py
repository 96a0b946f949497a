import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from rayspec.command.locations import PARTIAL_SUFFIX, Location, Store, UnreadableFileError
from rayspec.types import ConfigError


@pytest.fixture
def memory() -> Iterator[Store]:
    """A remote store in which a file has to be moved to its place."""
    filesystem = fsspec.filesystem("memory")
    yield Store(filesystem=fs.PyFileSystem(fs.FSSpecHandler(filesystem)), uri="memory://bucket", base="/bucket")
    filesystem.store.clear()  # one for the process
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["path", "file URI", "memory", "memory with atomic put", "subtree"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, memory: Store) -> Location:
    """The same behaviour is asked of every kind of place."""
    subtree = Store(filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), uri="sub://tree")
    return {
        "path": Location.parse(str(tmp_path)).join("data"),
        "file URI": Location.parse(f"file://{tmp_path}/data"),
        "memory": Location(memory, "data"),
        "memory with atomic put": Location(replace(memory, has_atomic_put=True), "data"),
        "subtree": Location(subtree, "data"),
    }[request.param]


def names_below(folder: Location, found: list[Location]) -> list[str]:
    return [location.path.removeprefix(f"{folder.path}/") for location in found]


def fill(folder: Location, *names: str) -> None:
    for name in names:
        folder.join(name).write(name.encode())


def test_what_is_written_is_read(folder: Location) -> None:
    file = folder.join("deep", "a.TXT")
    assert not file.exists
    file.write(b"first")
    file.write(b"second\nline\n")
    assert file.exists
    assert not file.is_folder
    assert folder.is_folder
    assert (file.read(), file.suffix, file.file_name) == (b"second\nline\n", ".txt", "a.TXT")
    with file.open() as content:
        assert list(content) == [b"second\n", b"line\n"]
        content.seek(7)
        assert content.read(4) == b"line"


def test_an_interrupted_write_changes_nothing(folder: Location) -> None:
    file = folder.join("a.txt")
    file.write(b"before")
    with pytest.raises(KeyboardInterrupt), file.writing() as content:
        content.write(b"half")
        assert file.read() == b"before"
        others = [entry.file_name for entry in folder.entries() if entry != file]
        assert all(name.startswith(".") and name.endswith(PARTIAL_SUFFIX) for name in others)
        raise KeyboardInterrupt
    assert file.read() == b"before"
    assert names_below(folder, folder.entries()) == ["a.txt"]


def test_an_upload_that_breaks_off_changes_nothing(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(source: str, target: str, *, destination_filesystem: fs.FileSystem, **_: object) -> None:
        with destination_filesystem.open_output_stream(target) as stream:
            stream.write(Path(source).read_bytes()[:2])
        raise OSError("connection lost")

    file = Location(memory, "data/a.txt")
    file.write(b"before")
    monkeypatch.setattr("pyarrow.fs.copy_files", break_off)
    with pytest.raises(OSError, match="connection lost"):
        file.write(b"after")
    assert file.read() == b"before"
    assert [entry.path for entry in Location(memory, "data").entries()] == ["data/a.txt"]


def test_a_folder_lists_its_entries_in_order_and_is_deleted_with_all_that_is_in_it(folder: Location) -> None:
    fill(folder, "b.txt", "a.JSONL", "notes.pdf", "deep/er/c.txt")
    assert names_below(folder, folder.entries()) == ["a.JSONL", "b.txt", "deep", "notes.pdf"]
    for _ in range(2):
        folder.join("deep").delete_folder()
        folder.join("b.txt").delete()
        assert names_below(folder, folder.entries()) == ["a.JSONL", "notes.pdf"]
    assert folder.join("none").entries() == []


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("[b-z]*", ["b.txt", "deep"]),
        ("*/*.txt", ["deep/c.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt"]),
        ("deep/**/d.txt", ["deep/er/d.txt"]),
        ("**/er/*", ["deep/er/d.txt"]),
        (".*", [".hidden.txt"]),
    ],
)
def test_patterns_match_alike_everywhere(folder: Location, pattern: str, matches: list[str]) -> None:
    fill(folder, "b.txt", "a.txt", "deep/c.txt", "deep/er/d.txt", ".hidden.txt", "deep/.cache/e.txt")
    location = folder.join(pattern)
    assert location.is_pattern
    assert names_below(folder, location.glob()) == matches


@pytest.mark.parametrize("name", ["100%.txt", "what?x=1.txt", "x%20y.txt", "ü[1].txt"])
def test_names_of_files_are_read_back(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"here")
    for root in ("file://", "FILE://localhost"):
        (file,) = Location.parse(f"{root}{tmp_path}").entries()
        again = Location.parse(file.name)
        assert (again.name, again.read()) == (file.name, b"here")


def test_a_bucket_is_the_root_of_its_paths() -> None:
    location = Location.parse("gs://bucket/some/key 1%2A*.txt?scheme=http")
    assert (location.store.base, location.path) == ("bucket", "some/key 1**.txt")
    assert location.store.has_atomic_put
    assert location.join("x").name == "gs://bucket/some/key 1**.txt/x?scheme=http"


@pytest.mark.parametrize("name", ["ftp://host/a.txt", "file://host/a.txt"])
def test_a_uri_that_no_file_system_is_for_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name.partition(':')[0]}.*give a path, or a URI that starts with s3://"):
        Location.parse(name)


def test_a_uri_without_slashes_is_a_mistake_unless_it_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'file:dir/a.txt': a URI begins with file://: write it so, or ./ before"):
        Location.parse("file:dir/a.txt")
    Path("file:a.txt").touch()
    assert Location.parse("file:a.txt").exists


@pytest.mark.parametrize(
    "name", ["s3://key:hunter2@bucket/a", "abfs://c@a.dfs.core.windows.net/x?client_secret=hunter2"]
)
def test_secrets_are_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError, match="leave it out") as caught:
        Location.parse(name)
    assert "hunter2" not in str(caught.value)


def test_a_store_that_does_not_answer_is_an_unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        @staticmethod
        def from_uri(uri: str) -> None:
            raise OSError(f"no credentials for {uri}")

    monkeypatch.setattr(fs, "FileSystem", Unreachable)
    with pytest.raises(
        UnreadableFileError, match=r"s3://b/a\.txt: s3://b does not answer \(no credentials for s3://b/\)"
    ):
        Location.parse("s3://b/a.txt")


class DownHandler(fs.FSSpecHandler):
    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        raise self.error


@pytest.mark.parametrize("error", [OSError(13, "the token has expired"), RuntimeError("the token has expired")])
def test_what_cannot_be_looked_at_says_why(memory: Store, error: Exception) -> None:
    handler = DownHandler(fsspec.filesystem("memory"))
    handler.error = error
    down = Store(filesystem=fs.PyFileSystem(handler), uri="memory://bucket")
    with pytest.raises(UnreadableFileError, match=r"memory://bucket/a\.txt: .*the token has expired"):
        assert Location(down, "a.txt").exists


def test_local_writes_are_on_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    Location.parse(str(tmp_path / "a.txt")).write(b"x")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_with_a_link_is_listed_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "x.txt").touch()
    (tmp_path / "zz").symlink_to(tmp_path / "z")
    files, _ = Location.parse(str(tmp_path)).below()
    assert [file.path for file in files] == [str(tmp_path / "z" / "x.txt")]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_none(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert Location.parse(str(tmp_path / "lock")).lock() is None
