from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from rayspec.batch.results import (
    DamagedRowsError,
    check_output,
    open_writer,
    read_rows,
    save_config,
    write_rows,
)
from rayspec.batch.rows import Row
from rayspec.types import (
    CompletionOutput,
    ConfigError,
    EmptyPromptError,
    NonFiniteLogitsError,
    RequestMetrics,
    RequestOutput,
)

ROWS = [
    Row(id="a", text="Ein Satz — 世界\nzwei", num_prompt_tokens=9, num_output_tokens=3, finish_reason="stop"),
    Row(id="b").failed(EmptyPromptError("nothing there")),
    Row(id="c", text="", num_draft_tokens=8, num_accepted_tokens=6, acceptance_rate=0.75, latency_s=1.5),
    Row(id="d", text="of parts", tree='{"text": "of parts", "parts": []}', source="a.jsonl:4"),
]


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_come_back_as_they_were_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"out{suffix}"
    with open_writer(path, text_column="summary") as writer:
        for row in ROWS:
            writer.write(row)
        assert not path.exists()
    rows = read_back(path)
    assert [row["summary"] for row in rows] == [row.text for row in ROWS]
    assert list(rows[0])[:4] == ["id", "summary", "num_prompt_tokens", "num_output_tokens"]
    assert (rows[1]["error_kind"], rows[1]["error"], rows[1]["finish_reason"]) == (
        "empty_prompt",
        "nothing there",
        "error",
    )
    assert (rows[2]["acceptance_rate"], rows[2]["latency_s"]) == (0.75, 1.5)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_interrupted_run_leaves_a_valid_file_with_the_rows_it_had(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"

    def write_until_interrupted() -> None:
        with open_writer(path, text_column="text") as writer:
            for number in range(1000):
                writer.write(Row(id=str(number)))
                if number == 149:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_until_interrupted()
    assert [row["id"] for row in read_back(path)] == [str(number) for number in range(150)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_no_rows_make_an_empty_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    with open_writer(path, text_column="text"):
        pass
    assert read_back(path) == []


def test_parquet_is_written_in_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    with open_writer(path, text_column="text") as writer:
        for number in range(2200):
            writer.write(Row(id=str(number)))
    with pq.ParquetFile(path) as file:
        assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [1024, 1024, 152]


def test_json_lines_are_on_disk_as_they_come(tmp_path: Path) -> None:
    with open_writer(tmp_path / "out.jsonl", text_column="text") as writer:
        writer.write(ROWS[0])
        assert json.loads((tmp_path / ".out.jsonl.partial").read_text(encoding="utf-8"))["id"] == "a"


def test_an_existing_output_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists: choose another name or pass --overwrite"):
        check_output(path, overwrite=False)
    check_output(path, overwrite=True)
    assert path.read_text(encoding="utf-8") == "precious\n"


@pytest.mark.parametrize("name", ["out.csv", "out", "folder.jsonl", "file.txt/out.jsonl"])
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(ConfigError, match="option 'output'"):
        check_output(tmp_path / name, overwrite=True)


def test_a_folder_that_nobody_can_write_to_is_refused() -> None:
    """Not even the superuser, whom permissions allow everything."""
    with pytest.raises(
        ConfigError, match=r"'/proc' cannot be written to \(No such file or directory\); choose another"
    ):
        check_output(Path("/proc/out.jsonl"), overwrite=False)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet"])
def test_rows_are_read_as_they_were_written(file_format: str) -> None:
    file = io.BytesIO()
    rows = [replace(row, id=f"{row.id}{number}") for number in range(40) for row in ROWS]
    write_rows(file, rows, text_column="summary", file_format=file_format)
    file.seek(0)
    assert list(read_rows(file, text_column="summary", file_format=file_format)) == rows
    file.seek(0)
    short = [replace(row, text=None, tree=None) for row in rows]
    assert list(read_rows(file, text_column="summary", file_format=file_format, with_text=False)) == short


def test_columns_that_a_file_has_not_are_at_their_defaults() -> None:
    file = io.BytesIO(b'{"id": "a", "summary": "short"}\n')
    assert list(read_rows(file, text_column="summary", file_format="jsonl")) == [Row(id="a", text="short")]


@pytest.mark.parametrize(
    ("file_format", "content"),
    [
        ("jsonl", b'{"id": "a", "summary": "x"}\n{"id": "b", "summ'),
        ("jsonl", b'{"id": "a", "summary": "x"}\n{"id": "b", "summary": "x"}'),
        ("jsonl", b'{"id": "a", "text": "x"}\n'),
        ("jsonl", b'{"id": "a", "summary": "x", "shoe_size": 44}\n'),
        ("jsonl", b'["a", "x"]\n'),
        ("jsonl", b"\xff\n"),
        ("parquet", b"no parquet at all"),
        ("parquet", b""),
    ],
)
def test_a_damaged_file_is_an_error(file_format: str, content: bytes) -> None:
    with pytest.raises(DamagedRowsError):
        list(read_rows(io.BytesIO(content), text_column="summary", file_format=file_format))


@pytest.mark.parametrize("text", ["The agency paid the fee in May.", "fee " * 300])
def test_a_flipped_bit_in_parquet_rows_changes_no_row_in_silence(text: str) -> None:
    rows, file = [Row(id=f"row {number}", text=f"{number} {text}") for number in range(3)], io.BytesIO()
    write_rows(file, rows, text_column="summary", file_format="parquet")
    content = file.getvalue()
    length_of_footer = int.from_bytes(content[-8:-4], "little")
    num_damaged = 0
    for place in range(4, len(content) - 8 - length_of_footer):
        damaged = bytearray(content)
        damaged[place] ^= 1
        try:
            found = list(read_rows(io.BytesIO(damaged), text_column="summary", file_format="parquet"))
        except (DamagedRowsError, OSError):
            num_damaged += 1
        else:
            assert found == rows, place
    assert num_damaged > 0


def test_an_output_becomes_a_row() -> None:
    output = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        outputs=[CompletionOutput(index=0, text="done", token_ids=(4, 5), finish_reason="length")],
        finished=True,
        metrics=RequestMetrics(
            num_draft_tokens=4, num_accepted_tokens=1, arrival_s=10.0, first_token_s=11.0, finished_s=13.0
        ),
    )
    assert Row(id="doc").completed(output) == Row(
        id="doc",
        text="done",
        num_prompt_tokens=3,
        num_output_tokens=2,
        finish_reason="length",
        num_draft_tokens=4,
        num_accepted_tokens=1,
        acceptance_rate=0.25,
        latency_s=3.0,
        decode_s=2.0,
    )


def test_a_failed_output_keeps_what_it_had() -> None:
    output = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=[CompletionOutput(index=0, text="half", token_ids=(4,), finish_reason="error")],
        finished=True,
        error=NonFiniteLogitsError("NaN"),
    )
    row = Row(id="doc").completed(output)
    assert (row.text, row.finish_reason, row.error_kind) == ("half", "error", "non_finite_logits")


def test_the_saved_config_is_yaml(tmp_path: Path) -> None:
    save_config(tmp_path / "c.yaml", {"model": "m", "speculation": {"skip": [1]}, "note": "ü"})
    assert yaml.safe_load((tmp_path / "c.yaml").read_text(encoding="utf-8")) == {
        "model": "m",
        "speculation": {"skip": [1]},
        "note": "ü",
    }


_FILL = """
import random, resource, sys
from pathlib import Path
from rayspec.batch.results import open_writer
from rayspec.batch.rows import Row
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
with open_writer(Path(sys.argv[1]), text_column="text") as writer:
    for number in range(100):
        writer.write(Row(id=str(number), text=random.Random(number).randbytes(200).hex()))
"""


def fill(path: Path, num_bytes: int) -> str:
    """Write 100 rows in a process that may write so many bytes to a file, and return the error that ends it."""
    command = [sys.executable, "-B", "-c", _FILL, str(path), str(num_bytes)]  # no cut .pyc files
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.count("Traceback") == 2, process.stderr  # the error and its one cause
    return process.stderr.splitlines()[-1]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("num_bytes", [0, 100, 8000])
def test_rows_of_a_full_disk_are_in_a_valid_file_that_the_error_names(
    tmp_path: Path, suffix: str, num_bytes: int
) -> None:
    """Nothing is hidden. A Parquet file of so few bytes has no room for its footer, so its rows are JSON lines."""
    path = tmp_path / f"out{suffix}"
    error = fill(path, num_bytes)
    rows = path if suffix == ".jsonl" else tmp_path / "out.parquet.jsonl"
    assert [file.name for file in tmp_path.iterdir()] == [rows.name], error
    ids = [row["id"] for row in read_back(rows)]
    assert ids == [str(number) for number in range(len(ids))]
    assert len(ids) == num_bytes // 700 or num_bytes < 700
    assert f"OutputError: the output '{path}' cannot be written (File too large)" in error
    assert f"{len(ids)} rows are in '{rows}'" in error


def test_parquet_with_room_for_its_footer_is_valid_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    error = fill(path, 30_000)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    rows = read_back(path)
    assert 30 < len(rows) < 60
    assert f"{len(rows)} rows are in '{path}'" in error
