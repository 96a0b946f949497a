from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayspec.bench.spec_bench import Question, is_question_file, read_questions
from rayspec.types import ConfigError

REAL = Path(__file__).parents[3] / "shared" / "data" / "specbench-dev.jsonl"


def row(**changes: Any) -> dict[str, Any]:
    return {"question_id": 7, "category": "qa", "turns": ["Who?", "And then?"]} | changes


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


def test_a_question_is_its_first_turn(tmp_path: Path) -> None:
    other = row(question_id="x-1", category="math", turns=["1 + 1?"], reference=["2"])
    name = write(tmp_path / "q.jsonl", row(), other)
    assert read_questions(name) == [
        Question(id="7", category="qa", text="Who?"),
        Question(id="x-1", category="math", text="1 + 1?"),
    ]


def test_question_files_are_known_by_their_fields(tmp_path: Path) -> None:
    assert is_question_file(write(tmp_path / "q.ndjson", row()))
    assert not is_question_file(write(tmp_path / "q.txt", row()))
    assert not is_question_file(write(tmp_path / "d.jsonl", {"id": "a", "text": "A document."}))
    assert not is_question_file(write(tmp_path / "l.jsonl", [1, 2]))
    assert not is_question_file(write(tmp_path / "empty.jsonl"))
    assert not is_question_file(str(tmp_path / "absent.jsonl"))
    (tmp_path / "broken.jsonl").write_bytes(b"\xff{")
    assert not is_question_file(str(tmp_path / "broken.jsonl"))


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (row(turns="Who?"), "Expected `array`, got `str`"),
        (row(turns=[]), "no first turn"),
        (row(turns=[" "]), "no first turn"),
        ({"question_id": 1, "turns": ["a"]}, "missing required field `category`"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path: Path, second: object, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"q\.jsonl:2 .*{what}"):
        read_questions(write(tmp_path / "q.jsonl", row(), second))


@pytest.mark.skipif(not REAL.exists(), reason="the Spec-Bench questions are not here")
def test_the_real_file_is_read() -> None:
    assert is_question_file(str(REAL))
    questions = read_questions(str(REAL))
    assert len(questions) == 240
    assert len({question.category for question in questions}) == 13
