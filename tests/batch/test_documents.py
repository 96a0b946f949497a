import bz2
import codecs
import csv
import gzip
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from pypdf import PdfReader, PdfWriter

from rayspec.batch import documents
from rayspec.batch.documents import Piece, check_template, input_row, pieces_of, read_piece
from rayspec.batch.input_files import find_files
from rayspec.batch.rows import Columns, Row
from rayspec.batch.sandbox import Sandbox
from rayspec.types import ConfigError
from tests.serve.endpoint_process import command_line
from tests.waiting import wait_until

TEXT = Columns()
CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
PART = {"type": "text", "text": "hello"}


def write_table(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


def write_lines(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def read(*inputs: str | Path, columns: Columns = TEXT) -> list[Row]:
    return [row for file in find_files(map(str, inputs)).files for _, row in read_piece(file, columns)]


def pieces(*inputs: str | Path) -> list[Piece]:
    return pieces_of(find_files(map(str, inputs)).files)


def outcome(document: Row) -> str | None:
    return document.error_kind or document.document


def test_parquet_gives_the_same_documents_as_json_lines(tmp_path: Path) -> None:
    rows = [{"id": i or None, "text": f"text {i}" if i != 3 else None, "other": i} for i in range(40)]
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    ours, theirs = read(lines), read(tmp_path / "a.parquet")
    assert [outcome(d) for d in ours] == [outcome(d) for d in theirs]
    assert [d.id for d in ours] == ["a.jsonl:1", *map(str, range(1, 40))]
    assert [d.id for d in theirs] == ["a.parquet:1", *map(str, range(1, 40))]


def test_rows_of_a_large_parquet_file_are_the_same_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups without a wanted row are passed over, and count."""
    table = pa.table({"text": [f"text {number}" for number in range(1, 41)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    expected = [(number, f"a.parquet:{number}", f"text {number}") for number in range(1, 41)]
    for num_bytes, num_pieces in ((2**26, 1), (1, 6)):
        monkeypatch.setattr("rayspec.batch.documents._BYTES_PER_PIECE", num_bytes)
        found = pieces(tmp_path)
        assert len(found) == num_pieces
        for wanted in (None, frozenset({3, 30, 31, 40})):
            rows = [
                (number, row.id, row.document) for piece in found for number, row in read_piece(piece, TEXT, wanted)
            ]
            assert [row for row in rows if row[0]] == [row for row in expected if wanted is None or row[0] in wanted]


def test_a_piece_without_rows_is_no_error_and_each_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_BYTES_PER_PIECE", 1)
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table.slice(2))
    found = pieces(tmp_path / "a.parquet")
    assert len(found) == 2, "the second has no row"
    assert [outcome(row) for piece in found for _, row in read_piece(piece, TEXT)] == ["a", "b"]
    twice = pa.Table.from_arrays([table["text"]] * 2, names=["text"] * 2)
    pq.write_table(twice, tmp_path / "b.parquet", row_group_size=1)
    rows = [row for piece in pieces(tmp_path / "b.parquet") for _, row in read_piece(piece, TEXT)]
    assert [(row.id, row.source, outcome(row)) for row in rows] == [
        ("b.parquet", source, "duplicate_column") for source in ("b.parquet", "b.parquet:2")
    ]


def test_a_bad_line_is_one_bad_row(tmp_path: Path) -> None:
    lines: list[tuple[Any, str]] = [
        ({"id": "good", "text": "fine"}, "fine"),
        (b'{"id": "x", "text": "cut', "malformed_row"),
        (b'["a", "list"]', "malformed_row"),
        (b'{"id": "y", "text": "caf\xe9"}', "not_utf8"),
        ({"id": "z"}, "missing_column"),
        ({"id": "n", "text": None}, "invalid_value"),
        ({"id": "number", "text": 3}, "invalid_value"),
        ({"id": "blank", "text": " \n"}, "invalid_value"),
        ({"id": None, "text": "an id is made up"}, "an id is made up"),
        ({"id": [1], "text": "a list is no id"}, "invalid_value"),
        (b'{"id": "surrogate", "text": "\\ud800"}', "malformed_row"),
        (b'{"id": "number", "text": "fine", "other": ' + b"9" * 5000 + b"}", "malformed_row"),
        ({"id": "last", "text": "fine"}, "fine"),
    ]
    path = write_lines(tmp_path / "a.jsonl", *(line for line, _ in lines))
    assert [outcome(d) for d in read(path)] == [expected for _, expected in lines]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"id": "x", "body": "one"}, "no column 'text' for the text; the row has 'id', 'body'"),
        (
            {"chat": [CALLS, {"role": "user", "content": [{"type": "image"}]}]},
            "column 'chat' holds no conversation: messages.1.content: a part of type 'image' is not supported;",
        ),
        (b'{"id": "x", "text": "a", "text": "b"}', "key 'text' stands twice in one object; leave one out"),
        (b'{"text": "a", "o": [{"k": 1, "k": 1}]}', "key 'k' stands twice in one object; leave one out"),
        *(({"id": value, "text": "fine"}, f"the id is {value!r}; it must be") for value in (1.5, 2.0**53, True, "")),
    ],
)
def test_an_error_names_place_and_remedy(tmp_path: Path, line: Any, error: str) -> None:
    bad, good = read(write_lines(tmp_path / "a.jsonl", line, {"text": "fine"}), columns=Columns(messages="chat"))
    assert str(bad.error).startswith(f"a.jsonl:1: {error}")
    assert outcome(good) == "fine"


def test_an_error_names_some_of_very_many_columns(tmp_path: Path) -> None:
    (bad,) = read(write_lines(tmp_path / "a.jsonl", {f"c{number}": 1 for number in range(1000)}))
    assert str(bad.error).endswith(", 'c19' and 980 more")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_a_file_without_the_column_is_one_error_that_names_its_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text("key,body\na,x\nb,y\n")
    else:
        write_table(pa.table({"key": ["a", "b"], "body": ["x", "y"]}), path)
    for columns, problem in (
        (TEXT, "'text' for the text"),
        (Columns(text="prompt", messages="chat"), "'prompt' for the text"),
        (Columns(text="body", id="id"), "'id' for the id"),
    ):
        (row,) = read(path, columns=columns)
        assert (row.id, row.error_kind) == (name, "missing_column")
        assert row.error == f"{name}: no column {problem}; the file has 'key', 'body'"
    found = read(path, columns=Columns(text="prompt", messages="body"))
    assert [outcome(row) for row in found] == ["invalid_value"] * 2


def test_a_row_that_is_nested_too_deeply_is_one_bad_row(tmp_path: Path) -> None:
    """At some depths a row can just be parsed, but not be encoded again, as is done for rows with escapes."""
    depths = range(100, 1100)
    deep = [b'{"text": "\\u0041", "other": ' + b"[" * depth + b"]" * depth + b"}" for depth in depths]
    outcomes = [outcome(d) for d in read(write_lines(tmp_path / "a.jsonl", *deep, {"text": "fine"}))]
    assert set(outcomes) == {"A", "malformed_row", "fine"}
    assert outcomes == [*sorted(outcomes[:-1], key=["A", "malformed_row"].index), "fine"]


_DATES = pa.array([None, 2**31 - 1, None], pa.date32())
_TEXTS = pa.array(["a", "b", "c"])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": pa.array([b"a", b"caf\xe9", b"c"]).cast(pa.string(), safe=False)}, ["a", "not_utf8", "c"]),
        ({"id": _DATES, "text": _TEXTS}, ["a", "invalid_value", "c"]),
        ({"id": _TEXTS, "text": _DATES}, ["invalid_value"] * 3),
        ({"id": _TEXTS.dictionary_encode(), "text": _TEXTS.cast(pa.large_string())}, ["a", "b", "c"]),
    ],
)
def test_other_parquet_types_are_text_or_a_bad_row(
    tmp_path: Path, columns: dict[str, Any], expected: list[str]
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert [outcome(d) for d in read(tmp_path / "a.parquet")] == expected


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_no_code_in_a_file_is_run(tmp_path: Path, suffix: str, nested: bool) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "run").touch, ()

    from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType  # noqa: PLC0415 - it is registered

    kind, values = ArrowPythonObjectType(), pa.array([pickle.dumps(Code())] * 2, pa.large_binary())
    column = pa.ExtensionArray.from_storage(kind, values)
    table = pa.table({"text": pa.StructArray.from_arrays([column], names=["a"]) if nested else column})
    path = write_table(table, tmp_path / f"a.{suffix}")
    assert [row.error_kind for row in read(path)] == ["invalid_value"]
    with pytest.raises(ConfigError, match="'txet' is undefined"):
        check_template(pieces(path), Columns(template="{{ txet }}"))
    assert not (tmp_path / "run").exists()


def test_a_type_that_cannot_be_restored_is_an_error_of_its_file(tmp_path: Path) -> None:
    import ray.data  # noqa: F401, PLC0415 - it registers the type

    about = {"ARROW:extension:name": "ray.data.arrow_tensor", "ARROW:extension:metadata": "no JSON"}
    schema = pa.schema([pa.field("text", pa.list_(pa.int64()), metadata=about)])
    pq.write_table(pa.Table.from_arrays([pa.array([[1]])], schema=schema), tmp_path / "a.parquet")
    (piece,) = pieces(tmp_path / "a.parquet")
    assert [row.error_kind for _, row in read_piece(piece, TEXT)] == ["unreadable_file"]


def test_a_damaged_parquet_file_yields_the_rows_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"id": str(i), "text": os.urandom(2000).hex()} for i in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle - 20_000 : middle + 20_000] = bytes(40_000)
    path.write_bytes(content)
    outcomes = [outcome(d) for d in read(path)]
    assert outcomes[0] == rows[0]["text"]
    assert outcomes[-1] == "unreadable_file"


def test_a_store_that_does_not_answer_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        @staticmethod
        def from_uri(uri: str) -> None:
            raise OSError("no credentials")

    monkeypatch.setattr(fs, "FileSystem", Unreachable)
    (tmp_path / "good.txt").write_text("fine", encoding="utf-8")
    documents = read("s3://bucket/*.jsonl", tmp_path / "good.txt")
    assert [outcome(d) for d in documents] == ["unreadable_file", "fine"]
    assert documents[0].id == "s3://bucket/*.jsonl"
    assert "no credentials" in str(documents[0].error)


def test_a_row_has_the_same_id_however_its_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    write_lines(folder / "a.jsonl", {"text": "one"})
    (folder / "sub" / "b.txt").write_text("two", encoding="utf-8")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names = ["docs", "./docs/", str(folder), "link", f"file://{folder}", "docs/sub/.."]
    assert {tuple(d.id for d in read(name)) for name in names} == {("a.jsonl:1", "sub/b.txt")}
    files = [
        "docs/a.jsonl", "./docs/a.jsonl", str(folder / "a.jsonl"), "link/a.jsonl", "docs/*.jsonl", "docs/[a].jsonl",
    ]  # fmt: skip
    assert {tuple(d.id for d in read(name)) for name in files} == {("a.jsonl:1",)}
    monkeypatch.chdir(folder / "sub")
    assert [d.id for d in read("b.txt", "../a.jsonl")] == ["sub/b.txt", "a.jsonl:1"]
    (folder / "b.txt").write_text("three", encoding="utf-8")  # a name that another file has as well
    assert [d.id for d in read("b.txt", "../b.txt")] == ["sub/b.txt", "b.txt"]


def test_the_hash_is_of_what_is_asked() -> None:
    def hashed(**content: Any) -> str | None:
        return input_row("x", source="s", **content).input_hash

    assert hashed(text="one") == hashed(text="one") != hashed(text="two")
    user, system = ([{"role": role, "content": "one"}] for role in ("user", "system"))
    assert hashed(messages=user) != hashed(messages=system)
    assert hashed(messages=user) != hashed(text=json.dumps(user))


def test_messages_stand_in_for_the_text(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello", "name": "ann"}, CALLS, {"role": "tool", "content": [PART, PART]}]
    path = write_lines(
        tmp_path / "a.jsonl",
        {"messages": chat},
        {"prompt": "no chat"},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": "hello"},
        {"messages": json.dumps(chat)},
    )
    expected = [*chat[:2], {"role": "tool", "content": "hello\nhello"}]
    documents = read(path, columns=Columns(text="prompt", messages="messages"))
    assert json.loads(documents[0].messages or "") == expected
    assert [outcome(d) for d in documents[1:-1]] == ["no chat", "invalid_value", "invalid_value", "invalid_value"]
    assert (documents[-1].messages, documents[-1].input_hash) == (documents[0].messages, documents[0].input_hash)


COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def compressed(content: bytes, suffix: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, COMPRESSIONS[suffix]) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
def test_texts_are_read_with_and_without_a_mark(tmp_path: Path, encoding: str, suffix: str) -> None:
    def write(name: str, text: str) -> Path:
        content = text.encode(encoding)
        path = tmp_path / f"{name}{suffix}"
        # Files that are appended to each other are one file.
        both = compressed(content[:20], suffix) + compressed(content[20:], suffix) if suffix else content
        path.write_bytes(both)
        return path

    text = "Grüße \u010a\u0a0a\r\n世界 \U0001f680"  # code units with the byte of a newline
    rows = "\n".join(json.dumps({"id": str(n), "text": text}, ensure_ascii=False) for n in range(3)) + "\n\nno json"
    assert [outcome(d) for d in read(write("a.txt", text))] == [text]
    assert [outcome(d) for d in read(write("b.ndjson", rows))] == [text, text, text, "malformed_row"]


def test_zeros_after_the_end_of_gzip_data_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "A"}\n' * 3) + bytes(512))
    assert [row.document for row in read(tmp_path / "a.jsonl.gz")] == ["A"] * 3


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        *((suffix, damage) for suffix in COMPRESSIONS for damage in ("cut short", "damaged")),
        (".gz", "another checksum"),
    ],
)
def test_damaged_compressed_data_is_an_error_after_the_rows_before(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    rows = "".join(json.dumps({"id": str(n), "text": os.urandom(200).hex()}) + "\n" for n in range(6000))
    content = bytearray(compressed(rows.encode(), suffix))
    if damage == "cut short":
        del content[len(content) // 2 :]
    elif damage == "damaged":
        content[len(content) // 2 :] = bytes([255]) * (len(content) // 2)
    else:
        content[-8] ^= 1
    path.write_bytes(content)
    outcomes = [outcome(d) for d in read(path)]
    assert outcomes.pop() == "unreadable_file"
    assert len(outcomes) > 300
    assert all(text is not None and len(text) == 400 for text in outcomes)
    error = str(read(path)[-1].error)
    assert f"could not be read after {len(outcomes)} rows" in error


@pytest.mark.parametrize(
    "name", ["two\nlines.txt", "100%.txt", "a[1]?.txt", "%41.txt", os.fsdecode(b"caf\xe9 100%.txt")]
)
def test_odd_names_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("fine", encoding="utf-8")
    for place in (tmp_path, f"file://{tmp_path}"):
        (document,) = read(place)
        assert (document.document, document.source) == ("fine", name.replace("\udce9", r"\xe9"))


@pytest.mark.parametrize("explicit", [False, True])
def test_whole_numbers_that_pandas_made_floats_are_ids(tmp_path: Path, explicit: bool) -> None:
    ids = pa.array([1.0, None, 2.0**52, float("nan"), -0.0], pa.float64())
    pq.write_table(pa.table({"id": ids, "text": ["a", "b", "c", "d", "e"]}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet", columns=Columns(id="id" if explicit else None))
    assert [row.id for row in rows] == ["1", "a.parquet:2", str(2**52), "a.parquet:4", "0"]
    nulls = "invalid_value" if explicit else None
    assert [row.error_kind for row in rows] == [None, nulls, None, nulls, None]


def test_without_an_id_column_places_are_ids(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"id": "x", "text": "one"}, {"id": "x", "none": "y", "text": "two"})
    (tmp_path / "b.txt").write_text("three", encoding="utf-8")
    rows = read(lines, tmp_path / "b.txt", columns=Columns(id="none"))
    assert [(row.id, outcome(row)) for row in rows] == [("a.jsonl:1", "one"), ("a.jsonl:2", "two"), ("b.txt", "three")]


def test_an_empty_name_of_the_id_column_is_taken_as_it_is(tmp_path: Path) -> None:
    (row,) = read(write_lines(tmp_path / "a.jsonl", {"id": "x", "text": "one"}), columns=Columns(id=""))
    assert "no column '' for the id" in str(row.error)


def test_a_column_that_stands_twice_in_parquet_is_an_error_where_it_is_asked_for(tmp_path: Path) -> None:
    def of(name: str) -> Row:
        table = pa.Table.from_arrays([pa.array(["a"])] * 4, names=["id", "text", "other", name])
        pq.write_table(table, tmp_path / "a.parquet")
        (row,) = read(tmp_path / "a.parquet")
        return row

    assert outcome(of("other")) == "a"
    assert (of("text").id, of("text").error_kind) == ("a.parquet", "duplicate_column")
    assert str(of("id").error) == "a.parquet: two columns are called 'id'; rename one"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_may_have_two_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(documents, "_MAX_TEXT_BYTES", 64)  # rows of large batches are read one by one
    chats = [[{"role": "user", "content": f"question {number}"}] for number in range(9)]
    table = pa.table({"prompt": chats, "id": list("abcdefghi")})
    path = write_table(table, tmp_path / f"a.{suffix}")
    rows = read(path, columns=Columns(text="prompt", messages="prompt"))
    assert [json.loads(row.messages or "") for row in rows] == chats
    rows = read(path, columns=Columns(template="{{ id }}: {{ prompt[0].content }}"))
    assert [row.document for row in rows] == [f"{row.id}: question {number}" for number, row in enumerate(rows)]


def test_a_parquet_file_with_any_damage_is_rows_and_errors(tmp_path: Path) -> None:
    """Among others, names of columns that are not UTF-8."""
    rows = [{"id": str(n), "text": f"text {n}", "messages": None if n else [CALLS]} for n in range(6)]
    path, random = tmp_path / "a.parquet", Random(0)
    pq.write_table(pa.Table.from_pylist(rows), path, compression="none", use_dictionary=False, row_group_size=3)
    content = path.read_bytes()
    kinds = set()
    for _ in range(200):
        damaged = bytearray(content)
        damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(damaged)
        kinds |= {row.error_kind for row in read(path, columns=Columns(messages="messages"))}
        assert pieces(path)
    errors = []
    for name in re.finditer(b"text", content):
        path.write_bytes(content[: name.start()] + b"\xff" + content[name.start() + 1 :])
        errors += [row.error for row in read(path) if row.error_kind == "unreadable_file"]
    assert any(str(error).startswith("a.parquet: could not be read ('utf-8' codec can't") for error in errors)
    assert kinds >= {None, "unreadable_file"}


@pytest.mark.parametrize("name", ["a\0.txt", "\ud800.txt", "file:///%00.txt", "s3://a\0/b.txt"])
def test_a_name_that_no_file_can_have_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match="no file has such a name"):
        read(name)


def test_rows_that_have_gone_since_the_scan_are_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    (_, row), (_, gone) = read_piece(Piece(path=path, name="a.jsonl"), TEXT, frozenset({2, 9}))
    assert (row.document, gone.error_kind) == ("two", "unreadable_file")
    assert str(gone.error) == "a.jsonl: 1 rows are gone; do not change the input"
    groups = Piece(path=str(write_table(pa.table({"text": ["one"]}), tmp_path / "a.parquet")), name="a", groups=(1, 1))
    _, gone = next(read_piece(groups, TEXT, frozenset({9})))
    assert str(gone.error) == "a: it has fewer row groups than before; do not change the input"


def test_rows_of_csv_json_and_arrow_are_those_of_json_lines(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "text": f'text {n}, "quoted"\nand more', "other": n} for n in range(5)]
    expected = [(row["id"], row["text"]) for row in rows]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text", "other"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as arrow:
        arrow.write_table(table, max_chunksize=2)
    for path in sorted(tmp_path.iterdir()):
        assert [(row.id, row.document) for row in read(path)] == expected, path.name


def test_a_folder_of_hugging_faces_save_to_disk_is_its_rows(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "set" / split).mkdir(parents=True)
        for name in ("dataset_info.json", "state.json"):
            (tmp_path / "set" / split / name).write_text("{}", encoding="utf-8")
        table = pa.table({"text": [f"{split} {n}" for n in range(3)]})
        for name in ("data-00000-of-00001.arrow", "cache-1f2e3d.arrow"):
            place = str(tmp_path / "set" / split / name)
            with pa.OSFile(place, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as arrow:
                arrow.write_table(table)
    (tmp_path / "set" / "dataset_dict.json").write_text("{}", encoding="utf-8")
    assert [row.document for row in read(tmp_path / "set")] == [f"{s} {n}" for s in ("test", "train") for n in range(3)]
    assert "cache-1f2e3d.arrow (2), dataset_info.json (2), state.json (2)" in str(find_files([str(tmp_path)]).warning)


@pytest.mark.parametrize("name", ["a.json", "a.json.bz2"])
def test_the_place_of_bytes_that_are_not_utf8_is_named(tmp_path: Path, name: str) -> None:
    content = codecs.BOM_UTF8 + b"[" + b'{"text": "caf\xc3\xa9"}\n' * 80_000
    bad = content + b'{"text": "caf\xe9"}]'
    (tmp_path / name).write_bytes(bz2.compress(bad, 1) if name.endswith(".bz2") else bad)
    *good, row = read(tmp_path / name)
    assert len(good) > 1
    assert f"{name}: not UTF-8 at byte {len(content) + 13}: invalid continuation byte; convert" in str(row.error)


@pytest.mark.parametrize(
    ("name", "content", "outcomes"),
    [
        (
            "a.csv",
            b'text,id\nfine,1\na,b,c\nshort\n"a"b,2\n\xe9,3\n,4\n\nfine,5\n',
            "fine malformed_row malformed_row malformed_row not_utf8 invalid_value fine",
        ),
        ("a.csv", b'text\nfine\n"never closed\nfine\n', "fine malformed_row"),
        ("a.csv", b"text,text\na,b\n", "duplicate_column"),
        ("a.tsv", b"text\nof,commas\n", "of,commas"),
        ("a.csv", b"", "empty_file"),
        ("a.csv", b"text\n", "empty_file"),
        ("a.json", b"", "empty_file"),
        ("a.json", b"[]", "empty_file"),
        ("a.json", b'[{"text": "fine"}, {"text": ', "fine malformed_row"),
        ("a.json", b'[{"text": "fine"}', "fine malformed_row"),
        (
            "a.json",
            b'[{"text": "fine"}, 3, {"a": {"b": 1, "b": 2}}, {"text": "\\ud800"}, {"text": "fine"}, {"a": 1, "a": 2',
            "fine malformed_row duplicate_column malformed_row fine malformed_row",
        ),
        ("a.json", b'{"text": "fine"}', "fine"),
        ("a.json", b'[{"text": "fine"}]]', "fine malformed_row"),
        ("a.arrow", b"ARROW1 no more", "unreadable_file"),
        ("a.arrow", b"not arrow", "unreadable_file"),
        ("absent.jsonl", None, "unreadable_file"),
        ("a.parquet", b"not parquet at all", "unreadable_file"),
        ("a.odt", b"%PDF", "unreadable_file"),
        ("folder", None, "unreadable_file"),
        ("a.txt.gz", b"plain", "unreadable_file"),
        ("a.jsonl.gz", b"", "empty_file"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "empty_file"),
        ("a.txt", b"", "empty_file"),
        ("a.txt", "plain".encode("utf-16-be"), "not_utf8"),
        ("a.jsonl", '{"text": "plain"}'.encode("utf-16-be"), "not_utf8"),
        ("a.csv", "id,text\n1,plain\n".encode("utf-16"), "not_utf8"),
    ],
)  # fmt: skip
def test_mistakes_of_a_format_are_bad_rows(tmp_path: Path, name: str, content: bytes | None, outcomes: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.txt").write_text("next", encoding="utf-8")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    rows = read(tmp_path / name, tmp_path / "good.txt")
    assert [outcome(row) for row in rows] == [*outcomes.split(), "next"]
    assert all(name in str(row.error) for row in rows if row.error_kind)


def test_the_lines_that_an_open_quote_takes_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\tfine\n2\t"12 inches\n3\tfine\n4\t"a"b\n5\t"c" d\n6\tfine\n')
    good, open_quote, other, last = read(tmp_path / "a.tsv")
    assert "a.tsv:2: lines 3 to 5 are no row of CSV: " in str(open_quote.error)
    assert "a.tsv:3: lines 6 to 6 are no row of CSV: " in str(other.error)
    assert (good.document, last.document) == ("fine", "fine")


def pdf(*pages: str) -> bytes:
    """A PDF file with a line on each page."""
    objects = ["<</Type/Catalog/Pages 2 0 R>>", ""]
    for page in pages:
        line = f"BT /F 12 Tf 9 9 Td ({page}) Tj ET"
        font = "<</Font<</F<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
        number = len(objects) + 1
        objects.append(f"<</Type/Page/Parent 2 0 R/Resources{font}/Contents {number + 1} 0 R>>")
        objects.append(f"<</Length {len(line)}>>stream\n{line}\nendstream")
    kids = " ".join(f"{number} 0 R" for number in range(3, len(objects) + 1, 2))
    objects[1] = f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}/MediaBox[0 0 99 99]>>"
    body, places = "%PDF-1.4\n", ["0000000000 65535 f \n"]
    for number, each in enumerate(objects, start=1):
        places.append(f"{len(body):010} 00000 n \n")
        body += f"{number} 0 obj{each}endobj\n"
    table = f"xref\n0 {len(places)}\n{''.join(places)}trailer<</Root 1 0 R/Size {len(places)}>>\n"
    return f"{body}{table}startxref\n{len(body)}\n%%EOF".encode()


def docx(body: str) -> bytes:
    file = io.BytesIO()
    uri = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f'<w:document xmlns:w="{uri}"><w:body>{body}</w:body></w:document>')
    return file.getvalue()


def paragraph(runs: str) -> str:
    return f"<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r>{runs}</w:r></w:p>"


WORDS = paragraph("<w:t>One</w:t><w:tab/><w:t>two</w:t><w:delText>gone</w:delText>") + paragraph("<w:t>three</w:t>")
PAGE = (
    b"<html><head><meta charset=latin-1><title>One</title><style>p {}</style><script>x = '</p>'</script></head>"
    b"<body><p>two\n&eacute;\xe9</p><!-- gone --><table><tr><td>three<td>four</table>"
)


def test_documents_of_other_programs_are_their_texts_and_a_bad_one_is_one_bad_row(tmp_path: Path) -> None:
    """The file's bytes are scanned. The text is taken out where the row is read."""
    files = {
        "a.pdf": (pdf("One two", "three"), "One two\nthree\n"),
        "b.docx": (docx(WORDS), "One\ttwo\nthree\n"),
        "c.html": (PAGE, "One\n\ntwo éé\n\n\tthree\tfour"),
        "c_marked.html": (b"\xef\xbb\xbf<meta charset='latin-1'><p>\xc3\xa9", "é"),
        "c_at_end.html": (b"<p>1 < 2 &amp; 3 &gt 2&amp", "1 < 2 & 3 > 2&"),
        "c_cut.html": (b"<p>one</p><p>two <b class='x", "one\n\ntwo"),
        "d.pdf": (b"%PDF-1.4 cut", "unreadable_document"),
        "e.pdf": (pdf(""), "unreadable_document"),
        "f.docx": (b"PK no more", "unreadable_document"),
        "g.html": (b"<p>\xff", "unreadable_document"),
        "h.pdf": (b"", "empty_file"),
    }
    for name, (content, _) in files.items():
        (tmp_path / name).write_bytes(content)
    found = read(tmp_path)
    assert {row.id: outcome(row) for row in found} == {name: expected for name, (_, expected) in files.items()}
    assert "there is none; scanned pages need text recognition first" in str(found[7].error)
    scanned = [row for piece in pieces(tmp_path) for _, row in read_piece(piece, TEXT, with_text=False)]
    assert [row.input_hash for row in scanned] == [row.input_hash for row in found]
    assert {outcome(row) for row in scanned[:-1]} == {None}, "an error is the result of a row, and is not found twice"
    (wanted,) = read_piece(pieces(tmp_path / "a.pdf")[0], TEXT, frozenset({0}))
    assert wanted[1] == found[0]


def test_the_time_of_a_text_is_not_that_of_those_before_it() -> None:
    sandbox, template = Sandbox(most_s=1, most_bytes=2**30), "{% for _ in range(99999) %}{% for _ in range(9) %}"
    for _ in range(7):  # a third of a second each
        assert sandbox.answer("rendered", f"{template}{{% endfor %}}{{% endfor %}}x", {}) == "x"


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_an_encrypted_pdf_is_read_if_no_password_is_needed(tmp_path: Path, algorithm: str) -> None:
    for user_password in ("", "secret"):
        writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf("One two"))))
        writer.encrypt(user_password, "owner", algorithm=algorithm)
        writer.write(tmp_path / f"{user_password or 'free'}.pdf")
    free, closed = read(tmp_path)
    assert outcome(free) == "One two\n"
    assert closed.error_kind == "unreadable_document"
    assert "it needs a password: save it without one" in str(closed.error)


@pytest.mark.parametrize("content", [docx(paragraph(f"<w:t>{'a' * 2**20}</w:t>") * 20), docx("<w:p>" * 10**5)])
def test_a_document_that_grows_without_bound_is_one_bad_row(tmp_path: Path, content: bytes) -> None:
    assert len(content) < 10**6
    (tmp_path / "a.docx").write_bytes(content)
    (row,) = read(tmp_path / "a.docx")
    assert row.error_kind == "unreadable_document"


def test_a_document_that_takes_too_long_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayspec.batch.documents._extractor", Sandbox(most_s=1, most_bytes=2**30))
    (tmp_path / "a.docx").write_bytes(docx("<w:p/>" * 3_000_000))
    (tmp_path / "b.docx").write_bytes(docx(WORDS))
    long, good = read(tmp_path)
    assert "a.docx: its text cannot be read: it takes more than 1 s or 1024 MiB" in str(long.error)
    assert outcome(good) == "One\ttwo\nthree\n"


def test_a_word_file_takes_little_memory_whatever_it_unpacks_to() -> None:
    content = docx(paragraph("<w:t>One</w:t>") + "<w:p/>" * 10**6)
    assert len(content) < 20_000
    assert Sandbox(most_s=60, most_bytes=2**26).answer(".docx", content) == "One\n" + "\n" * 10**6


@pytest.mark.parametrize("begun", ["</", "<!--", "<!", "<?", "<a ", "<a x='", "<script>", "<!doctype "])
def test_tags_without_an_end_take_no_more_time_than_other_text(begun: str) -> None:
    content = f"<p>fish &amp; chips{begun * (2**21 // len(begun))}".encode()
    assert Sandbox(most_s=10, most_bytes=2**30).answer(".html", content) == "fish & chips"


def test_a_signal_to_all_processes_of_a_job_makes_no_error_of_a_row_under_way(tmp_path: Path) -> None:
    """As `ray job stop` and service managers send it. The job lets rows under way finish."""
    (tmp_path / "a.html").write_text("<p>word " * 300_000, encoding="utf-8")
    program = (
        "import signal, sys; from tests.batch.test_documents import read\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('signal', flush=True))\n"
        "print([row.error for row in read(*sys.argv[1:])])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.html")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def children() -> list[int]:
            return [int(child) for child in listed.read_text(encoding="utf-8").split()]

        wait_until(lambda: "sandbox.py" in "".join(map(command_line, children())), 60)
        for each in (process.pid, *children()):
            os.kill(each, signal.SIGTERM)
        assert process.communicate(timeout=120)[0].split("\n")[:2] == ["signal", "[None]"]


def test_a_template_makes_the_text_of_the_columns(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "name": "Ada", "tags": ["x", "y"], "body": "{{ 7 * 7 }}"},
        {"id": "b", "name": "Bob", "tags": [], "body": None},
        {"id": "c", "name": "Eve", "body": "absent"},
    ]
    template = "{{ name }}:{% for tag in tags %} {{ tag }}{% endfor %} {{ body + '' }}"
    columns = Columns(template=template)
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    found = read(lines, columns=columns)
    assert [outcome(row) for row in found] == ["Ada: x y {{ 7 * 7 }}", "invalid_value", "missing_column"]
    assert "option 'prompt_template': 'tags' is undefined; the row has 'id', 'name', 'body'" in str(found[2].error)
    pq.write_table(pa.Table.from_pylist([row | {"more": 1} for row in rows]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", columns=columns)[0].document == "Ada: x y {{ 7 * 7 }}"
    (tmp_path / "a.html").write_text("one")
    (tmp_path / "a.txt").write_text("one")
    of_file = Columns(text="prompt", template="Sum up: {{ text }}")
    for name in ("a.html", "a.txt"):
        assert read(tmp_path / name, columns=of_file)[0].document == "Sum up: one"
        with pytest.raises(ConfigError, match=f"^{name}: .*'prompt' is undefined; the row has 'text'"):
            check_template(pieces(tmp_path / name), Columns(text="prompt", template="{{ prompt }}"))
    check_template(pieces(lines), columns)
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(ConfigError, match=f"^{name}:1: .*'nam' is undefined; the row has .*'name', .*'body'"):
            check_template(pieces(tmp_path / name), Columns(template="{{ nam }}"))
    with pytest.raises(ConfigError, match="cannot be compiled: unexpected"):
        check_template(pieces(lines), Columns(template="{{ name"))
    (tmp_path / "none.jsonl").touch()
    check_template([replace(pieces(tmp_path / "none.jsonl")[0], num_before=9)], columns)  # as of a table's empty file


def test_a_value_that_a_template_cannot_have_is_one_bad_row(tmp_path: Path) -> None:
    spans = pa.array([None, pa.MonthDayNano([1, 2, 3]), None])
    path = write_table(pa.table({"span": spans, "text": _TEXTS}), tmp_path / "a.arrow")
    rows = read(path, columns=Columns(template="{{ text }} {{ span }}"))
    assert [outcome(row) for row in rows] == ["a None", "invalid_value", "c None"]
    assert "a value has a type that cannot be sent" in str(rows[1].error)


def test_a_column_may_have_the_name_of_a_function_of_jinja(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"range": "1 km", "dict": "a"}, {"dict": "b"})
    (first, _) = read(lines, columns=Columns(template="{{ dict }}: {{ range }}"))
    (_, second) = read(lines, columns=Columns(template="{{ dict }}{% for n in range(2) %} {{ n }}{% endfor %}"))
    assert (first.document, second.document) == ("a: 1 km", "b 0 1")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may take one second."""
    monkeypatch.setattr("rayspec.batch.rows._templates", Sandbox(most_s=1, most_bytes=2**30))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}long{% endfor %}{% endfor %}",
        "{% for a in range(999999) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ text * 10**10 }}",
        "{{ (text * 10**8) | replace('o', text * 10**4) }}",
        "{{ 10 ** ((text | length) * 10**9) }}",
    ],
)
def test_a_template_is_kept_from_harm(tmp_path: Path, template: str) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    (row,) = read(lines, columns=Columns(template=template))
    assert row.error_kind == "invalid_value"
    (row,) = read(lines, columns=Columns(template="{{ text }}"))
    assert row.document == "one"


@pytest.mark.usefixtures("impatient")
def test_a_template_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    with pytest.raises(ConfigError, match="'prompt_template' cannot be compiled: it takes more than"):
        check_template(pieces(lines), Columns(template="{{ 9 ** 999999999 }}"))


def test_what_unpacks_to_any_size_or_never_ends_is_one_bad_row(tmp_path: Path) -> None:
    large = b"x" * (2**24 + 1)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + large + b'"}\n{"text": "next"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(bytes(2**26), 1))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(large, 1))
    (tmp_path / "d.csv").write_bytes(b"text\nnext\n" + large)
    os.mkfifo(tmp_path / "e.jsonl")
    os.mkfifo(tmp_path / "f.parquet")
    for name, error, outcomes in (
        ("a.jsonl", "a.jsonl:1: it has more than 16 MiB; split it", ["too_large", "next"]),
        ("b.jsonl.gz", "b.jsonl.gz:1: it has more", ["too_large"]),
        ("c.txt.gz", "c.txt.gz: it has more", ["too_large"]),
        ("d.csv", "d.csv:2: a line, or a row of twice that: it has more", ["next", "too_large"]),
        ("e.jsonl", "it is a pipe or a device, and no file", ["unreadable_file"]),
        ("f.parquet", "it is a pipe or a device, and no file", ["unreadable_file"]),
    ):
        rows = [row for piece in pieces(tmp_path / name) for _, row in read_piece(piece, TEXT)]
        assert list(map(outcome, rows)) == outcomes, name
        assert error in next(str(row.error) for row in rows if row.error), name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"text\nA\n\xc3\xa9\n" + b'"x\ny",' * 10**5),
        ("a.json", b'[{"text": "A"}, {"text": "\xc3\xa9"}, {"text": [' + b"[]," * 10**5),
        ("a.json", b'[{"text": "A"}, {"text": "\xc3\xa9"}, {"text": "' + b"x" * 5000 + b'"}]'),
    ],
    ids=["csv", "lists", "text"],
)
def test_only_a_row_of_bounded_size_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(documents, "_MAX_TEXT_BYTES", 2**11)
    monkeypatch.setattr(documents, "_BYTES_PER_READ", 2**3)
    (tmp_path / name).write_bytes(content)
    a, e, bad = read(tmp_path / name)
    assert (a.document, e.document) == ("A", "\u00e9")
    assert "it has more than" in str(bad.error)
    assert len(str(bad.error)) < 300


def test_a_large_row_is_one_bad_row_and_empty_lines_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MAX_TEXT_BYTES", 2**11)
    monkeypatch.setattr(documents, "_BYTES_PER_READ", 7)
    large = json.dumps({"text": "A", "image": "x" * 3000})
    (tmp_path / "a.json").write_text(f'[1.25e10, 1.5E-3, {large}, {{"text": "B"}}]', encoding="utf-8")
    assert [outcome(row) for row in read(tmp_path / "a.json")] == ["malformed_row", "malformed_row", "too_large", "B"]
    (tmp_path / "a.csv").write_text("text,x\nA,\n" + "\n" * 5000 + "B,\n", encoding="utf-8")
    assert [outcome(row) for row in read(tmp_path / "a.csv")] == ["A", "B"]


@pytest.mark.parametrize("num_bytes", [2**3, 2**20])
def test_a_mistake_has_its_place_in_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(documents, "_BYTES_PER_READ", num_bytes)
    (tmp_path / "a.json").write_text('[{"text": "A"},\n {"text":\n  B}]', encoding="utf-8")
    found = "a.json:2: not valid JSON: Expecting value: line 2, column 3 of the row"
    assert str(read(tmp_path / "a.json")[-1].error) == found


@pytest.mark.timeout(20)
def test_a_csv_file_of_many_columns_takes_no_longer_than_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text," + b",".join(b"%d" % name for name in range(100_000)) + b"\nshort" * 3000)
    for columns in (TEXT, Columns(reads_all=True)):
        rows = [row for _, row in read_piece(*pieces(tmp_path / "a.csv"), columns)]
        assert {row.error_kind for row in rows} == {"malformed_row"}
        assert len(rows) == 3000


def test_a_text_that_all_rows_of_a_parquet_file_share_is_read_a_few_times_at_once(tmp_path: Path) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array(["x" * 2**22]))
    pq.write_table(pa.table({"text": shared}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    most = num_rows = 0
    for _, row in read_piece(*pieces(tmp_path / "a.parquet"), TEXT):
        most, num_rows = max(most, pa.total_allocated_bytes()), num_rows + (len(row.document or "") == 2**22)
    assert num_rows == 64
    assert most < 2**27
    large = pa.table({"text": ["x" * (2**24 + 1), "next"]})
    pq.write_table(large, tmp_path / "b.parquet", compression="zstd")
    assert list(map(outcome, read(tmp_path / "b.parquet"))) == ["too_large", "next"]
