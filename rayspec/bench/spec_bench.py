"""Question files in the format of Spec-Bench: JSON lines with question_id, category and turns (Xia et al., 2024)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from rayspec.command.locations import Location, UnreadableFileError, error_detail
from rayspec.types import ConfigError

_SUFFIXES = (".jsonl", ".ndjson")
_FIELDS = {"question_id", "category", "turns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The first turn of a question; later turns, which follow an answer, are ignored."""

    id: str
    category: str
    text: str


class _Row(msgspec.Struct, frozen=True):
    question_id: int | str
    category: str
    turns: list[str]


def is_question_file(name: str) -> bool:
    """Return whether the first row has the fields of a question. name: any path or URI; it need not exist."""
    try:
        location = Location.parse(name)
        if location.suffix not in _SUFFIXES or not location.exists:
            return False
        row = json.loads(next(_lines(location), "{}"))
    except (UnreadableFileError, OSError, ValueError):
        return False  # the reader of documents reports the error
    return isinstance(row, dict) and row.keys() >= _FIELDS


def read_questions(name: str) -> list[Question]:
    """Return the questions in file order. Raises UnreadableFileError, and ConfigError that names an invalid row."""
    try:
        return [_question(line, f"{name}:{number}") for number, line in enumerate(_lines(Location.parse(name)), 1)]
    except OSError as error:
        raise UnreadableFileError(f"{name}: could not be read ({error_detail(error)})") from error


def _lines(location: Location) -> Iterator[bytes]:
    with location.open() as file:
        yield from (line for line in file if line.strip())


def _question(line: bytes, source: str) -> Question:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'input': {source} is not a question of a Spec-Bench file: {error}") from error
    if not row.turns or not row.turns[0].strip():
        raise ConfigError(f"option 'input': {source} has no first turn: give it one or leave the row out")
    return Question(id=str(row.question_id), category=row.category, text=row.turns[0])
