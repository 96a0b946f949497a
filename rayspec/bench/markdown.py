"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int | None = None) -> str:
    """Return a table. num_left: number of first columns aligned left; the others are aligned right. None: all left."""
    num_right = 0 if num_left is None else len(headings) - num_left
    rules = ["---"] * (len(headings) - num_right) + ["---:"] * num_right
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))
