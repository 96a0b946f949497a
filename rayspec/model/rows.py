"""The KV cache slots of a sequence's tokens, the rows of a packed batch that belong to one sequence, and the shapes of
passes: those of one bucket launch the same kernels with the same arguments, so they share one graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
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

    def divided(self, most: int, border: int) -> Iterator[RowSpan]:
        """Yield the rows of a chain as chains of at most `most` rows. One that begins before the place `border`, or
        twice, four times... that, ends there."""
        first = 0
        while first < self.num_rows:
            place, end = self.context + first, border
            while end <= place:
                end *= 2
            number = min(most, self.num_rows - first, end - place)
            yield self.chain(first, number)
            first += number

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


# Rows of a tree are bits of one int64. Up to so many rows of a sequence, a row's bits do not depend on their number.
MAX_TREE_ROWS = 63
# Splits of a context in attention on a GPU, and the length that they have at least: short contexts have fewer splits.
# Above so many places, and at each doubling of these, splits become longer.
MOST_SPLITS, LEAST_SPLIT_LENGTH = 64, 256
SPLIT_BORDER = MOST_SPLITS * LEAST_SPLIT_LENGTH
MAX_PADDED_ROWS = 512


class Bucket(NamedTuple):
    """Shape of a pass. num_rows, num_sequences: numbers with padding. max_rows: the most rows of one sequence. is_tree:
    each row has bits for the rows that it sees."""

    num_rows: int
    num_sequences: int
    max_rows: int
    is_tree: bool


def bucket_of(spans: Sequence[RowSpan], paths: Sequence[Sequence[Path]]) -> Bucket:
    """Return the smallest bucket for these rows. Above 512 rows, as in prompt chunks, the number of rows is not padded.
    Three kinds of passes have separate buckets: single rows (decoding, drafting), chains and trees (verifying)."""
    lengths = [span.num_rows for span in spans]
    longest = max(lengths, default=1)
    return Bucket(
        num_rows=padded_rows(sum(lengths)),
        num_sequences=power_of_two(len(spans)),
        max_rows=1 if longest == 1 else MAX_TREE_ROWS if longest <= MAX_TREE_ROWS else padded_rows(longest),
        is_tree=any(paths),
    )


def decode_and_verify_buckets(max_sequences: int, max_draft_tokens: int) -> list[Bucket]:
    """Return the buckets of decoding and drafting with up to `max_sequences` sequences, then those of verifying chains.
    Buckets for drafts of more than 62 tokens are left out."""
    sizes = dict.fromkeys(power_of_two(number) for number in range(1, max_sequences + 1))
    decode = dict.fromkeys(
        Bucket(padded_rows(number), power_of_two(number), 1, False) for number in range(1, max_sequences + 1)
    )
    if max_draft_tokens == 0:
        return list(decode)
    max_rows = min(max_draft_tokens + 1, MAX_TREE_ROWS)
    verify = dict.fromkeys(
        Bucket(padded_rows(number), size, MAX_TREE_ROWS, False)
        for size in sizes
        for number in range(size // 2 + 2, min(size, max_sequences) * max_rows + 1)
    )
    return [*decode, *verify]


@cache
def padded_rows(num_rows: int) -> int:
    """Round up to 1, 2, 4, 8, a multiple of 8 up to 64, then in steps of an eighth to a quarter of the number. Numbers
    above 512 stay as they are."""
    if num_rows > MAX_PADDED_ROWS:
        return num_rows
    if num_rows <= 8:
        return power_of_two(num_rows)
    step = max(power_of_two(num_rows) // 8, 8)
    return -(-num_rows // step) * step


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << max(number - 1, 0).bit_length()
