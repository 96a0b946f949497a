"""Where the tokens of a sequence are in the KV cache, and rows of a packed batch that belong to one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Run(NamedTuple):
    """Slots of the KV cache that lie side by side, which hold positions of one sequence that follow one another."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def slots(self) -> range:
        return range(self.start, self.end)


# Where the positions of a sequence are, in order, from position 0 on.
Runs: TypeAlias = tuple[Run, ...]


def one_run(start: int, length: int) -> Runs:
    return (Run(start, length),)


def runs_of_pages(pages: Sequence[int], page_size: int) -> Runs:
    """Pages that lie side by side are one run."""
    runs: list[Run] = []
    for page in pages:
        if runs and runs[-1].end == page * page_size:
            runs[-1] = Run(runs[-1].start, runs[-1].length + page_size)
        else:
            runs.append(Run(page * page_size, page_size))
    return tuple(runs)


def is_paged(runs: Runs, page_size: int) -> bool:
    """All runs begin with a page, and all but the last end with one."""
    return all(run.start % page_size == 0 for run in runs) and all(run.length % page_size == 0 for run in runs[:-1])


def joined(runs: Runs, more: Runs) -> Runs:
    """`more` behind `runs`."""
    if runs and more and runs[-1].end == more[0].start:
        return (*runs[:-1], Run(runs[-1].start, runs[-1].length + more[0].length), *more[1:])
    return (*runs, *more)


def runs_between(runs: Runs, first: int, end: int) -> list[Run]:
    """Where positions `first` .. `end` (exclusive) are."""
    found, position = [], 0
    for run in runs:
        low, high = max(first - position, 0), min(end - position, run.length)
        if low < high:
            found.append(Run(run.start + low, high - low))
        position += run.length
    return found


def slots_between(runs: Runs, first: int, end: int) -> list[int]:
    """The slot of each position `first` .. `end` (exclusive)."""
    return [slot for run in runs_between(runs, first, end) for slot in run.slots]


class Path(NamedTuple):
    """What a row of a tree sees of its sequence: the `shared` first places, then the places `own`, of which the last is
    the row's. The n-th place is the slot of position n; a row of a tree lies in another place than its position's."""

    shared: int
    own: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.shared + len(self.own) - 1

    @property
    def is_straight(self) -> bool:
        """It sees all places up to its own."""
        return self.own[-1] == self.position


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of one sequence, whose positions lie in `runs` and of which the first `context` are filled. Row
    r goes to the slot of position `context + r`.

    parents: empty where each row follows the row before it; else of each row the row it follows, an earlier one. A
    negative one is a filled position: -1 the last, -2 the one before, ... A row's position is one more than its
    parent's, and it sees what it follows, directly or not.
    """

    runs: Runs
    context: int
    num_rows: int
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Filled positions, once the rows are."""
        return self.context + self.num_rows

    def rest(self, num_done: int) -> RowSpan:
        """The rows behind the first `num_done`, which are filled by then."""
        parents = tuple(parent - num_done for parent in self.parents[num_done:])
        return RowSpan(self.runs, self.context + num_done, self.num_rows - num_done, parents)

    def paths(self) -> list[Path]:
        """What each row sees. Empty for a chain."""
        paths: list[Path] = []
        for row, parent in enumerate(self.parents):
            before = paths[parent] if parent >= 0 else Path(self.context + parent + 1, ())
            paths.append(Path(before.shared, (*before.own, self.context + row)))
        return paths
