from __future__ import annotations

from pathlib import Path

from rayspec.planning import constants
from rayspec.strategies import gate

TABLE = Path(__file__).parent.parent.parent / "docs" / "internals.md"


def test_constants_are_few_and_all_are_in_the_table() -> None:
    numbers = {**vars(constants), **vars(gate)}
    known = {name: value for name, value in numbers.items() if name.isupper() and isinstance(value, (int, float))}
    assert len(known) < 25
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): row[2].strip() for row in rows}
    assert {name: float(listed[name]) for name in known} == known
