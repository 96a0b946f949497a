"""The KV cache slots of a sequence's tokens, and the rows of a packed batch that belong to one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec


class Run(NamedTuple):
    """Adjacent slots of the KV cache that hold consecutive positions of one sequence."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def slots(self) -> range:
        return range(self.start, self.end)


# The slots of a sequence's positions, in order, from position 0 on.
Runs: TypeAlias = tuple[Run, ...]


def one_run(start: int, length: int) -> Runs:
    return (Run(start, length),)


def runs_of_pages(pages: Sequence[int], page_size: int) -> Runs:
    """Return the runs of these pages. Adjacent pages form one run."""
    runs: list[Run] = []
    for page in pages:
        if runs and runs[-1].end == page * page_size:
            runs[-1] = Run(runs[-1].start, runs[-1].length + page_size)
        else:
            runs.append(Run(page * page_size, page_size))
    return tuple(runs)


def is_paged(runs: Runs, page_size: int) -> bool:
    """Return whether all runs begin at a page boundary, and all but the last end at one."""
    return all(run.start % page_size == 0 for run in runs) and all(run.length % page_size == 0 for run in runs[:-1])


def joined(runs: Runs, more: Runs) -> Runs:
    """Append `more` to `runs`. Merges the two runs at the seam if their slots are adjacent."""
    if runs and more and runs[-1].end == more[0].start:
        return (*runs[:-1], Run(runs[-1].start, runs[-1].length + more[0].length), *more[1:])
    return (*runs, *more)


def runs_between(runs: Runs, first: int, end: int) -> list[Run]:
    """Return the runs that hold positions `first` to `end` (exclusive)."""
    found, position = [], 0
    for run in runs:
        low, high = max(first - position, 0), min(end - position, run.length)
        if low < high:
            found.append(Run(run.start + low, high - low))
        position += run.length
    return found


def slots_between(runs: Runs, first: int, end: int) -> list[int]:
    """Return the slot of each position from `first` to `end` (exclusive)."""
    return [slot for run in runs_between(runs, first, end) for slot in run.slots]


class Path(NamedTuple):
    """The places that a row of a tree sees: the first `shared` places of its sequence, then the places `own`. The last
    place of `own` is the row's. Place n is the slot of position n in `Runs`; a row's place may differ from its
    position."""

    shared: int
    own: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.shared + len(self.own) - 1

    @property
    def is_straight(self) -> bool:
        """Whether the row sees all places up to its own, as in a chain."""
        return self.own[-1] == self.position


class RowSpan(msgspec.Struct, frozen=True):
    """Consecutive rows of the sequence in `runs`, whose first `context` places are filled. Row r is written to place
    `context + r`.

    parents: empty if each row follows the row before it; else, by row, the earlier row that it follows. A negative
    parent is a filled position: -1 is the last, -2 the position before, and so on. A row's position is its parent's
    plus 1. A row sees its parent and all that the parent sees.

    windowed: the slots of the same places in the windowed store of the cache, see `KVCache`. Slots of places that the
    rows' sliding windows hide mean nothing. Empty if the cache has no such store.

    adapter: number of the adapter with which the rows run; 0 for none.
    """

    runs: Runs
    context: int
    num_rows: int
    parents: tuple[int, ...] = ()
    windowed: Runs = ()
    adapter: int = 0

    @property
    def end(self) -> int:
        """Number of filled places after the rows are written."""
        return self.context + self.num_rows

    def rest(self, num_done: int) -> RowSpan:
        """Return the rows after the first `num_done`, which then count as filled."""
        parents = tuple(parent - num_done for parent in self.parents[num_done:])
        return RowSpan(
            self.runs, self.context + num_done, self.num_rows - num_done, parents, self.windowed, self.adapter
        )

    def chain(self, first: int, num_rows: int) -> RowSpan:
        """Return `num_rows` of the rows, from row `first` on, as a chain."""
        return RowSpan(self.runs, self.context + first, num_rows, (), self.windowed, self.adapter)

    def in_windowed_store(self) -> RowSpan:
        """Return the same rows with the slots of the windowed store."""
        return RowSpan(self.windowed, self.context, self.num_rows, self.parents)

    def paths(self) -> list[Path]:
        """Return the path of each row, or an empty list for a chain."""
        paths: list[Path] = []
        for row, parent in enumerate(self.parents):
            before = paths[parent] if parent >= 0 else Path(self.context + parent + 1, ())
            paths.append(Path(before.shared, (*before.own, self.context + row)))
        return paths
