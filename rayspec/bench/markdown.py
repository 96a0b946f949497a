"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int | None = None) -> str:
    """num_left: columns that are aligned to the left, before all others, which are to the right; None: all are."""
    num_right = 0 if num_left is None else len(headings) - num_left
    rules = ["---"] * (len(headings) - num_right) + ["---:"] * num_right
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))
