"""Results that the papers report: the rows of published.csv, in this folder.

The file holds only numbers from sources that were read. A field is None if the source does not give it. `computed`
names the fields that follow from published numbers but are not printed in the source.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

PATH = Path(__file__).with_name("published.csv")

End = Literal["", "from", "to", "at most"]
_ENDS: tuple[End, ...] = get_args(End)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One speed-up over plain decoding, and the numbers reported with it.

    group: name shared by rows that are explained together. arxiv: id; "" if unknown. shape: the name of the
    `ModelShape` that represents the model. end: which end of a published range the row is; "" for a single figure.
    expected_speedup: result of the authors' own formula. acceptance: accepted over drafted tokens. skip_ratio: share of
    the sublayers' time that the draft skips. max_draft_tokens: maximum length of a draft; the methods end most drafts
    earlier, at low confidence. tpt_gain: the ratio of the authors' tokens-per-time estimates with and without a draft.
    decode_step_ms: milliseconds of a plain decoding step.
    """

    group: str
    method: str
    paper: str
    arxiv: str
    where: str
    model: str
    shape: str
    bytes_per_weight: float
    task: str
    hardware: str
    end: End
    speedup: float
    expected_speedup: float | None = None
    acceptance: float | None = None
    tokens_per_verify: float | None = None
    skip_ratio: float | None = None
    max_draft_tokens: int | None = None
    tpt_gain: float | None = None
    decode_step_ms: float | None = None
    computed: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.end not in _ENDS:
            raise ValueError(f"end is {self.end!r}; it must be one of {_ENDS}")
        positive = (self.bytes_per_weight, self.speedup, self.expected_speedup, self.tokens_per_verify)
        if any(value is not None and value <= 0 for value in (*positive, self.tpt_gain, self.decode_step_ms)):
            raise ValueError(f"{self}: speed-ups, gains, bytes and times must be above 0")
        if any(value is not None and not 0 <= value <= 1 for value in (self.acceptance, self.skip_ratio)):
            raise ValueError(f"{self}: acceptance and skip_ratio must lie between 0 and 1")
        empty = [name for name in self.computed if getattr(self, name, None) is None]
        if empty:
            raise ValueError(f"{self}: computed names {empty}, for which there is no value")

    @property
    def source(self) -> str:
        """Citation for readers: paper, arXiv id, place."""
        return ", ".join(part for part in (self.paper, f"arXiv {self.arxiv}" if self.arxiv else "", self.where) if part)


def published(path: Path = PATH) -> tuple[Published, ...]:
    """Return all rows in the order of the file. Raises ValueError for wrong columns, and for an invalid line, which the
    message names."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = [field.name for field in fields(Published)]
        if list(reader.fieldnames or ()) != names:
            raise ValueError(f"{path}: the columns must be {', '.join(names)}")
        return tuple(_row(cells, f"{path}, line {reader.line_num}") for cells in reader)


def _row(cells: Mapping[str, str], place: str) -> Published:
    try:
        values: dict[str, Any] = {name: _value(name, text) for name, text in cells.items()}
        return Published(**values)
    except (ValueError, TypeError, AttributeError) as error:  # TypeError, AttributeError: too many or too few cells
        raise ValueError(f"{place}: {error}") from error


_NUMBERS = {
    "bytes_per_weight", "speedup", "expected_speedup", "acceptance", "tokens_per_verify", "skip_ratio", "tpt_gain",
    "decode_step_ms",
}  # fmt: skip


def _value(name: str, text: str) -> str | float | int | tuple[str, ...] | None:
    if name == "computed":
        return tuple(text.split())
    if name == "max_draft_tokens":
        return int(text) if text else None
    if name in _NUMBERS:
        return float(text) if text else None
    return text
