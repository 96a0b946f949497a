"""Parts, and which of their rows count. It must not depend on how the rows came."""

import io
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayspec.batch.rows import Row
from rayspec.batch.run_folder import DamagedOutputError, Parts
from rayspec.command.locations import Location
from rayspec.types import EmptyPromptError
from tests.exhaustive import few_of

TOKEN = {"token": " the", "logprob": -0.5}
ROWS = [
    Row(id="a", text="Ein Satz — 世界\nzwei", num_prompt_tokens=9, num_output_tokens=3, finish_reason="stop"),
    Row(id="b").failed(EmptyPromptError("nothing there")),
    Row(id="c", text="", num_draft_tokens=8, num_accepted_tokens=6, acceptance_rate=0.75, latency_s=1.5),
    Row(id="e", text="So.", reasoning="Hm.", logprobs=[TOKEN | {"top": [TOKEN]}]),
    Row(id="d", text="of parts", tree='{"text": "of parts", "parts": []}', source="a.jsonl:4"),
]


def opened(folder: Path) -> Parts:
    return Parts(Location.parse(str(folder)), text_column="summary")


def done(row_id: str, input_hash: str | None = None) -> Row:
    return Row(id=row_id, finish_reason="stop", input_hash=input_hash)


def failed(row_id: str, kind: str) -> Row:
    return Row(id=row_id, finish_reason="error", error_kind=kind, input_hash="0f")


def duplicate(row_id: str, source: str) -> Row:
    return Row(id=row_id, finish_reason="error", error_kind="duplicate_id", source=source)


def stored(folder: Path, *rows: Row, at_once: int = 1) -> Parts:
    parts = opened(folder)
    for start in range(0, len(rows), at_once):
        parts.append(rows[start : start + at_once], "0a1b2c3d")
    return parts


@pytest.mark.parametrize("again", [False, True], ids=["as they come", "when opened again"])
def test_rows_come_back_as_they_were_written(tmp_path: Path, again: bool) -> None:
    rows = [replace(row, id=f"{row.id}{number}", input_hash="0f") for number in range(700) for row in ROWS]
    parts = stored(tmp_path, *rows, at_once=1100)
    parts = opened(tmp_path) if again else parts
    assert list(parts.rows()) == rows
    assert list(parts.rows(with_text=False)) == [
        replace(row, text=None, tree=None, reasoning=None, logprobs=None) for row in rows
    ]
    lines, table = io.BytesIO(), io.BytesIO()
    parts.write(lines, "jsonl")
    parts.write(table, "parquet")
    read = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert read == pq.read_table(table).to_pylist()
    assert list(read[0])[:4] == ["id", "summary", "num_prompt_tokens", "num_output_tokens"]
    assert [row["summary"] for row in read] == [row.text for row in rows]
    assert pq.ParquetFile(table).num_row_groups <= 3


def test_a_row_with_another_ones_id_stands_beside_it_until_the_next_session(tmp_path: Path) -> None:
    rows = [duplicate("a", "f:2"), done("a", "h"), duplicate("a", "f:3"), duplicate("a", "f:2")]
    parts = stored(tmp_path, *rows)
    assert list(parts.rows()) == rows[1:]
    assert parts.kinds == Counter({None: 1, "duplicate_id": 2})
    again = opened(tmp_path)
    assert again.ignores_some
    assert list(again.rows()) == [rows[1]]
    again.append([duplicate("a", "f:2")], "00000000")
    assert list(again.rows()) == [rows[1], rows[0]]


def test_a_row_that_is_to_be_done_again_counts_until_it_is(tmp_path: Path) -> None:
    stored(tmp_path, done("a", "1"), done("b", "1"), done("a", "2"), failed("a", "engine_dead"))
    parts = opened(tmp_path)
    parts.redo(pa.array(["a", "x"]))
    assert [row.input_hash for row in parts.rows()] == ["1", "2"]
    assert (parts.done["id"].to_pylist(), parts.is_complete, parts.kinds.total()) == (["b"], False, 1)
    parts.append([done("a", "3")], "00000000")
    assert ([row.input_hash for row in parts.rows()], parts.is_complete) == (["1", "3"], True)


def test_an_append_that_was_interrupted_can_be_made_again(tmp_path: Path) -> None:
    parts = stored(tmp_path, done("a"))
    before = parts._state
    parts.append([done("b")], "0a1b2c3d")
    parts._state = before  # as if the signal had come before the last step
    parts.append([done("b"), done("c")], "0a1b2c3d")
    for each in (parts, opened(tmp_path)):
        assert (each.num_stored, [row.id for row in each.rows()]) == (3, ["a", "b", "c"])


def test_which_rows_count_does_not_depend_on_how_they_came(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(20):
        kinds = chance.choices(["", "engine_dead", "empty_prompt"], k=10)
        ids = chance.choices("abc", k=10)
        rows = [failed(row_id, kind) if kind else done(row_id) for row_id, kind in zip(ids, kinds, strict=True)]
        parts = stored(tmp_path / str(number), *rows, at_once=chance.randrange(1, 11))
        last: dict[str, int] = {}
        for place, row in enumerate(rows):
            if row.is_final or row.id not in last or not rows[last[row.id]].is_final:
                last[row.id] = place
        expected = [row for place, row in enumerate(rows) if last[row.id] == place]
        assert list(parts.rows()) == list(opened(tmp_path / str(number)).rows()) == expected


@pytest.mark.parametrize("text", few_of(["The agency paid the fee in May.", "fee " * 300], ["fee " * 300]))
def test_a_flipped_bit_changes_no_row_in_silence(tmp_path: Path, text: str) -> None:
    rows = [replace(done(str(number), "0f"), text=f"{text} {number}") for number in range(20)]
    stored(tmp_path, *rows, at_once=20)
    (part,) = tmp_path.glob("part-*.parquet")
    content, num_damaged = part.read_bytes(), 0
    chance = random.Random(0)
    for place in sorted(chance.sample(range(len(content)), 300)):
        part.write_bytes(content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :])
        try:
            found = list(opened(tmp_path).rows())
        except DamagedOutputError:
            num_damaged += 1
        else:
            assert found == rows, place
    assert num_damaged > 0


def test_the_newest_texts_come_last_and_are_bounded(tmp_path: Path) -> None:
    parts = stored(tmp_path, *(replace(done(str(n)), text=f"text {n:03}") for n in range(50)), done("none"), at_once=7)
    assert parts.newest_texts(30) == ["text 047", "text 048", "text 049"]
    assert len(parts.newest_texts(10_000)) == 50
    parts.redo(pa.array(["49"]))
    assert parts.newest_texts(8) == ["text 049"]
    assert opened(tmp_path / "new").newest_texts(8) == []


SCHEMA = {
    "$defs": {"Kind": {"enum": ["a", "b"]}, "Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
    "properties": {
        "name": {"type": "string"}, "age": {"type": ["integer", "null"]},
        "height": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "is_new": {"type": "boolean"},
        "kind": {"$ref": "#/$defs/Kind"}, "tags": {"type": "array", "items": {"type": "string"}},
        "node": {"$ref": "#/$defs/Node"}, "either": {"type": ["string", "integer"]}, "id": {"type": "integer"},
    },
}  # fmt: skip


def test_properties_of_the_schema_are_typed_columns_also_where_all_are_null(tmp_path: Path) -> None:
    given = {"name": "\u00e9", "age": 3, "height": 2, "is_new": True, "kind": "a", "tags": ["x"], "id": 7}
    given |= {"node": {"next": {}}, "either": 1}
    odd = {"name": 1, "age": 2**70, "height": None, "tags": [1], "node": None, "either": "\ud800"}
    for index, values in enumerate(([given, odd], [])):
        texts = [*map(json.dumps, values), "[1]", None]
        written = [Row(id=str(number), text=text, finish_reason="stop") for number, text in enumerate(texts)]
        written.append(replace(written[0], id="cut", error_kind="unfinished_form"))
        parts = Parts(Location.parse(str(tmp_path / str(index))), text_column="text", json_schema=json.dumps(SCHEMA))
        parts.append(written, "0a1b2c3d")
        file, lines = io.BytesIO(), io.BytesIO()
        parts.write(file, "parquet")
        parts.write(lines, "jsonl")
        table = pq.read_table(file)
        assert [str(kind) for kind in table.schema.types[-9:]] == [
            "string", "int64", "double", "bool", "string", "list<element: string>", "string", "string", "int64",
        ]  # fmt: skip
        rows = table.select(table.column_names[-9:]).to_pylist()
        if values:
            expected = given | {"height": 2.0, "node": '{"next": {}}', "either": "1", "json_id": 7}
            assert rows[0] == {name: value for name, value in expected.items() if name != "id"}
        assert all(value is None for row in rows[len(values) > 0 :] for value in row.values())
        assert [json.loads(line) for line in lines.getvalue().splitlines()] == table.to_pylist()
