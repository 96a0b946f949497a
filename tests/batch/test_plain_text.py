from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from rayspec.batch.documents import UndecodableError, decode, lines, opened
from rayspec.command.locations import Location, Store


@pytest.fixture(params=["path", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    filesystem = fsspec.filesystem("memory")
    store = Store(filesystem=fs.PyFileSystem(fs.FSSpecHandler(filesystem)), uri="memory://bucket", base="/bucket")
    yield Location.parse(str(tmp_path)) if request.param == "path" else Location(store, "data")
    filesystem.store.clear()  # one for the process
    filesystem.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize("is_zipped", [False, True])
def test_lines_come_as_utf_8_from_everywhere(folder: Location, encoding: str, is_zipped: bool) -> None:
    content = "Grüße\n\n\u0a0a世界\nlast".encode(encoding)
    file = folder.join("a")
    file.write(gzip.compress(content) if is_zipped else content)
    with opened(file, is_zipped=is_zipped) as opening:
        assert b"".join(lines(opening)).decode() == "Grüße\n\n\u0a0a世界\nlast"


def test_lines_before_damaged_gzip_data_are_read(folder: Location) -> None:
    file = folder.join("a")
    file.write(gzip.compress(b"fine\n" * 1000)[:-8] + b"12345678")
    found = []
    with pytest.raises(OSError, match="CRC"), opened(file, is_zipped=True) as opening:
        found.extend(lines(opening))
    file.write(gzip.compress(b"fine\n" * 1000)[:-8])
    with pytest.raises(OSError, match="cut short"), opened(file, is_zipped=True) as opening:
        list(lines(opening))


def test_several_gzip_members_are_one_file(folder: Location) -> None:
    file = folder.join("a")
    file.write(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    with opened(file, is_zipped=True) as opening:
        assert list(lines(opening)) == [b"one\n", b"two\n"]


@pytest.mark.parametrize("content", [b"\xff", b"a\0b\0", b"\xff\xfea", b"\0\0\xfe\xff\xff\xff\xff\xff"])
def test_what_is_no_text_says_which_encoding_was_tried(content: bytes) -> None:
    with pytest.raises(UndecodableError, match=r"not UTF-(8|16|32)"):
        decode(content)
