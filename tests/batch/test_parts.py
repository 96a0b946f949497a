"""Parts, their index, and what joins them. The order of rows, and which of them count, must not depend on either."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rayspec.batch import parts as parts_module
from rayspec.batch.parts import INDEX_NAME, DamagedOutputError, Parts
from rayspec.batch.rows import Row
from rayspec.command.locations import Location
from tests.exhaustive import few_of

NUM_PARTS = 130


def opened(folder: Path, *, file_format: str = "parquet", may_join: bool = True) -> Parts:
    location = Location.parse(str(folder))
    return Parts(location, text_column="text", file_format=file_format, may_join=may_join)  # type: ignore[arg-type]


def row(number: int, text: str = "a text") -> Row:
    return Row(id=f"r{number}", text=f"{text} {number}", finish_reason="stop", input_hash="0f")


@cache
def _written(num_parts: int, **options: Any) -> tempfile.TemporaryDirectory[str]:
    written = tempfile.TemporaryDirectory(prefix="rayspec-parts-")
    append_parts(Path(written.name), num_parts, **options)
    return written


def write_parts(folder: Path, num_parts: int = NUM_PARTS, **options: Any) -> list[Row]:
    """One part a row; the last row is done twice. The parts are written once for all tests, and copied."""
    shutil.copytree(_written(num_parts, **options).name, folder, dirs_exist_ok=True)
    return counting_rows(num_parts)


def append_parts(folder: Path, num_parts: int, *, tidy: bool = False, **options: Any) -> None:
    parts = opened(folder, **options)
    for each in [*map(row, range(num_parts - 1)), row(num_parts - 2, "another text")]:
        parts.append([each], "0a1b2c3d")
        if tidy:
            parts.tidy()


def counting_rows(num_parts: int) -> list[Row]:
    return [*map(row, range(num_parts - 2)), row(num_parts - 2, "another text")]


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != INDEX_NAME)


@pytest.fixture(params=["parquet", "jsonl"])
def file_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_small_parts_are_joined_as_they_come_and_rows_stay_the_same(tmp_path: Path, file_format: str) -> None:
    append_parts(tmp_path, NUM_PARTS, tidy=True, file_format=file_format)
    rows = counting_rows(NUM_PARTS)
    assert len(names_of(tmp_path)) < NUM_PARTS / 2
    parts = opened(tmp_path, file_format=file_format)
    assert list(parts.rows()) == rows
    with (tmp_path / "merged").open("wb") as file:
        parts.write_counting(file)
    (tmp_path / "merged").rename(tmp_path / f"part-000001-00000000.{file_format}")
    assert list(opened(tmp_path, file_format=file_format).rows())[: len(rows)] == rows


def test_a_folder_of_many_parts_and_no_index_is_joined_and_indexed(tmp_path: Path, file_format: str) -> None:
    rows = write_parts(tmp_path, file_format=file_format)
    assert len(names_of(tmp_path)) == NUM_PARTS
    for _ in range(2):
        assert list(opened(tmp_path, file_format=file_format).rows()) == rows
        assert len(names_of(tmp_path)) == 1


def test_parts_that_another_driver_may_read_stay_and_are_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_parts(tmp_path, may_join=False)
    opened(tmp_path, may_join=False)
    assert len(names_of(tmp_path)) == NUM_PARTS
    monkeypatch.setattr(Parts, "_describe", pytest.fail)
    parts = opened(tmp_path, may_join=False)
    assert parts.index.done["id"].to_pylist() == [each.id for each in rows]


def test_a_large_part_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_ROWS_OF_LARGE", 40)
    rows = write_parts(tmp_path)
    assert list(opened(tmp_path).rows()) == rows
    joined = names_of(tmp_path)
    assert [pq.read_metadata(tmp_path / name).num_rows for name in joined] == [40, 40, 40, 10]
    append_parts(tmp_path, 100)
    opened(tmp_path)
    assert names_of(tmp_path)[:3] == joined[:3]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = 200
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [cut, flipped, lambda _: b"", lambda _: b"PAR1"])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    rows = write_parts(tmp_path, may_join=False)
    before = opened(tmp_path, may_join=False).index.stored
    content = (tmp_path / INDEX_NAME).read_bytes()
    (tmp_path / INDEX_NAME).write_bytes(damage(content))
    parts = opened(tmp_path, may_join=False)
    assert (list(parts.rows()), parts.index.stored.equals(before)) == (rows, True)
    assert (tmp_path / INDEX_NAME).stat().st_size == len(content)


def test_an_index_that_knows_other_parts_is_not_believed(tmp_path: Path) -> None:
    rows = write_parts(tmp_path, may_join=False)
    opened(tmp_path, may_join=False)
    gone, changed = names_of(tmp_path)[:2]
    (tmp_path / gone).unlink()
    single = tmp_path / "single"
    opened(single).append([row(1000), row(1001)], "00000000")
    (single / names_of(single)[0]).replace(tmp_path / changed)
    assert list(opened(tmp_path, may_join=False).rows()) == [row(1000), row(1001), *rows[2:]]


@pytest.mark.parametrize("knows", [False, True])
def test_a_part_that_is_cut_is_named_also_where_the_index_knows_it(tmp_path: Path, knows: bool) -> None:
    write_parts(tmp_path, NUM_PARTS if knows else 5, may_join=False)
    opened(tmp_path, may_join=False)
    assert (tmp_path / INDEX_NAME).exists() is knows
    part = tmp_path / names_of(tmp_path)[3]
    part.write_bytes(cut(part.read_bytes()))
    with pytest.raises(DamagedOutputError, match=f"{part.name}: .*delete it to have its rows done again"):
        opened(tmp_path, may_join=False)


def test_a_disk_that_is_full_keeps_parts_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_parts(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        assert list(opened(tmp_path).rows()) == rows
    assert len(names_of(tmp_path)) == NUM_PARTS


def test_parts_that_a_killed_driver_has_joined_and_not_deleted_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_parts(tmp_path)
    monkeypatch.setattr(Location, "delete", lambda _: None)
    for _ in range(3):  # each time the parts are joined again
        parts = opened(tmp_path)
        assert sorted((each.id, each.text) for each in parts.rows()) == sorted((each.id, each.text) for each in rows)
        assert parts.index.summary().total == len(rows)


_WRITER = """
import sys
from rayspec.batch import parts as module
from rayspec.batch.rows import Row
from rayspec.command.locations import Location
module._NUM_SMALL, module._ROWS_OF_LARGE, module._MIN_UNINDEXED_ROWS = 4, 32, 4
parts = module.Parts(Location.parse(sys.argv[1]), text_column="text", file_format=sys.argv[2], may_join=True)
done = set(parts.index.done["id"].to_pylist())
for number in range(240):
    if f"r{number}" not in done:
        parts.append([Row(id=f"r{number}", text=f"a text {number}", finish_reason="stop", input_hash="0f")], "0a1b2c3d")
        print(number, flush=True)
        parts.tidy()
"""


@pytest.mark.parametrize("file_format", few_of(["parquet", "jsonl"], ["parquet"]))
def test_a_driver_that_is_killed_while_it_joins_loses_nothing(tmp_path: Path, file_format: str) -> None:
    chance, reported, num_killed = random.Random(file_format), set(), 0
    for _ in range(10):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), file_format]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            num_lines = chance.randrange(30, 120)
            for line in writer.stdout:
                reported.add(f"r{line.strip()}")
                num_lines -= 1
                if num_lines == 0:
                    writer.kill()
        if writer.returncode == 0:
            break
        num_killed += writer.returncode == -9
        assert reported <= set(opened(tmp_path, file_format=file_format).index.done["id"].to_pylist())
    assert num_killed >= 2
    rows = list(opened(tmp_path, file_format=file_format).rows())
    assert sorted(int(each.id[1:]) for each in rows) == list(range(240))
    assert all(each.text == f"a text {each.id[1:]}" for each in rows)
