"""Rows of a packed batch that belong to one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Path(NamedTuple):
    """What a row of a tree sees of its sequence, in order of position: the `shared` first slots of the span, then the
    slots `own` (counted from the start of the span), of which the last is the row's."""

    shared: int
    own: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.shared + len(self.own) - 1

    @property
    def is_straight(self) -> bool:
        """It sees all slots up to its own."""
        return self.own[-1] == self.position


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of one sequence, whose position 0 is arena slot `arena_start` and of which `context` slots are
    filled. Row r goes to slot `arena_start + context + r`.

    parents: empty where each row follows the row before it; else of each row the row it follows, an earlier one. A
    negative one is a token of the filled slots: -1 the last, -2 the one before, ... A row's position is one more than
    its parent's, and it sees what it follows, directly or not.
    """

    arena_start: int
    context: int
    num_rows: int
    parents: tuple[int, ...] = ()

    def rest(self, num_done: int) -> RowSpan:
        """The rows behind the first `num_done`, whose slots are filled by then."""
        parents = tuple(parent - num_done for parent in self.parents[num_done:])
        return RowSpan(self.arena_start, self.context + num_done, self.num_rows - num_done, parents)

    def paths(self) -> list[Path]:
        """What each row sees. Empty for a chain."""
        paths: list[Path] = []
        for row, parent in enumerate(self.parents):
            before = paths[parent] if parent >= 0 else Path(self.context + parent + 1, ())
            paths.append(Path(before.shared, (*before.own, self.context + row)))
        return paths
