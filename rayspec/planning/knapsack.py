"""The multiple-choice knapsack over sublayers: for every amount of saved time, the draft most similar to the target.

After KnapSpec: state (i, w) holds hidden states after sublayer i, of a draft that has saved w units of time so far. Of
all such drafts, the state is the one most similar to the target's. KnapSpec extends each state by "run sublayer i" and
by "skip it". Here a state is extended by every choice of sublayer i (`rayspec.choices`), and w grows by the time that
the choice saves. Each state runs a sublayer once, in full; its results under the other choices are derived from that
run, at almost no cost. The result is optimal when similarity is a sum over the sublayers, and a heuristic otherwise. No
choice is excluded a priori: the first and the last sublayers may be skipped, and "all in full" is always an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import FULL, SKIP, Choice
from rayspec.planning.learning import BAND

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Codes = NDArray[np.int8]

ROUNDING_TOLERANCE = 0.05  # share of the total time by which quantize() may be wrong
MAX_REFINEMENT = 32
SCALE_STEP = 1.02


class Expansion(Protocol):
    """Defines states and how they grow. A batch holds states as rows; only the expansion knows their content."""

    def start(self) -> Any:
        """Return a batch of one state: the hidden states before sublayer 0."""

    def run(self, sublayer: int, choice: Choice, states: Any) -> Any:
        """Return the batch after each state has run `sublayer` by `choice`, which is not skip. Must not change
        `states`."""

    def vary(self, sublayer: int, choice: Choice, states: Any) -> Any:
        """Approximate cheaply what the states, which have run `sublayer` in full, would be after another choice."""

    def similarity(self, sublayer: int, states: Any) -> Floats:
        """Return [num_states]: similarity of each state to the target's state after `sublayer`; higher is better."""

    def gather(self, batches: Sequence[Any], index: Ints) -> Any:
        """Return the rows `index` of the concatenation of `batches`."""

    def keep(self, batches: Sequence[Any]) -> None:
        """Say that no other batch is used any more, so that their memory can be freed. `start` can be called again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A draft: the choice of each sublayer. saved: units of time that it saves."""

    choices: tuple[Choice, ...]
    saved: int
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """candidates: patterns by rising saved time, of which the first saves nothing. states: the terminal batch, with a
    row for each candidate."""

    candidates: list[Pattern]
    states: Any


@dataclass(frozen=True, slots=True)
class _Batch:
    states: Any
    size: int


@dataclass(frozen=True, slots=True)
class _Menu:
    """The choices of a sublayer, `full` first and `skip` last; the code of each, and the units that it saves."""

    choices: tuple[Choice, ...]
    codes: Codes
    savings: Ints

    @classmethod
    def of(cls, savings: Mapping[Choice, int], code_of: Mapping[Choice, int]) -> _Menu:
        choices = tuple(sorted({FULL, *savings}, key=lambda choice: code_of[choice]))
        codes = np.asarray([code_of[choice] for choice in choices], np.int8)
        return cls(choices, codes, np.asarray([savings.get(choice, 0) for choice in choices], np.int64))


def solve(
    savings: Sequence[Mapping[Choice, int]],
    expansion: Expansion,
    *,
    max_saved: int,
    min_similarity: float,
    max_states: int,
    band: float | None = BAND,
    drop_dominated: bool = True,
) -> Solution:
    """Return the most similar draft for each saved time up to `max_saved`.

    savings: for each sublayer, the units of time that each choice saves compared with `full`. `full` is always a choice
    and saves 0; a sublayer without `skip` is never skipped. The search calls `run` and `similarity` once per sublayer,
    and `vary` once per sublayer and choice other than full and skip.

    The search drops states less similar than `min_similarity` (or NaN). Two diagonals lead to `band` times
    `max_saved` and to `max_saved`; the search drops states that lie outside them by more than `band`, a share of the
    most that could be saved. With `drop_dominated`, it drops states that save no more than another state and are
    no more similar. A row of more than `max_states` states is thinned over saved time. band=None, drop_dominated=False,
    min_similarity=-inf and a large `max_states` give the exact recurrence. A choice that saves 0 competes with `full`
    at equal saved time: it is taken only where the state becomes more similar and another sublayer saves time.
    """
    names = _names(savings)
    menus = _menus(savings, names)
    low, high = _limits(menus, max_saved, band)
    # A row of the dynamic program: the states after a sublayer, by rising saved time. State 0 has saved nothing and is
    # never dropped.
    batch, saved = _Batch(expansion.start(), 1), np.zeros(1, np.int64)
    similarity = np.ones(1)
    codes: Codes = np.zeros((1, len(menus)), np.int8)  # [num_states, num_sublayers]: the choices made
    for sublayer, menu in enumerate(menus):
        grown = saved + menu.savings[:, None]
        admitted = (grown >= low[sublayer]) & (grown <= high[sublayer])
        admitted[0, 0] = True
        option, source = np.nonzero(admitted)  # of each new state, choice by choice
        parents = {choice: source[option == position] for position, choice in enumerate(menu.choices)}
        batch = _grow_cheaply(sublayer, batch, parents, expansion)
        saved = grown[admitted]
        similarity = np.asarray(expansion.similarity(sublayer, batch.states), float)
        kept = _kept(saved, similarity, min_similarity, max_states, drop_dominated)
        codes = codes[source[kept]]
        codes[:, sublayer] = menu.codes[option[kept]]
        batch, saved, similarity = _take([batch], kept, expansion), saved[kept], similarity[kept]
        expansion.keep([batch.states])
    found = zip(codes.tolist(), saved.tolist(), similarity.tolist(), strict=True)
    candidates = [
        Pattern(choices=tuple(names[code] for code in chosen), saved=units, similarity=similar)
        for chosen, units, similar in found
    ]
    return Solution(candidates=candidates, states=batch.states)


def follow(choice_patterns: Sequence[Sequence[Choice]], expansion: Expansion) -> Any:
    """Return the terminal states of given drafts, a row for each, in their order. Drafts that begin alike share a
    state, which runs once per sublayer and choice. There is at least one draft, and all have the same length."""
    names = _names([dict.fromkeys(pattern) for pattern in choice_patterns])
    batch = _Batch(expansion.start(), 1)
    row_of = np.zeros(len(choice_patterns), np.int64)  # by draft
    for sublayer, chosen in enumerate(np.asarray(choice_patterns).T):
        parents, rows, num_rows = {}, row_of, 0
        row_of = np.zeros_like(rows)
        for choice in names:
            made = chosen == choice
            parents[choice] = np.unique(rows[made])
            row_of[made] = num_rows + np.searchsorted(parents[choice], rows[made])
            num_rows += len(parents[choice])
        batch = _grow(sublayer, batch, parents, expansion)
    return _take([batch], row_of, expansion).states


def count_rows(
    savings: Sequence[Mapping[Choice, int]],
    *,
    max_saved: int,
    max_states: int,
    band: float | None = BAND,
) -> list[int]:
    """Return the most states that `solve` can run through each sublayer, to predict the search time in advance."""
    menus = _menus(savings, _names(savings))
    reachable, counts = 1, []  # bit w: a state that saves w is reachable
    for menu, least, most in zip(menus, *map(np.ndarray.tolist, _limits(menus, max_saved, band)), strict=True):
        counts.append(min(max_states, reachable.bit_count()))
        admitted = ((1 << (most + 1)) - 1) >> least << least
        grown = 1
        for saved in menu.savings:
            grown |= reachable << int(saved) & admitted
        reachable = grown
    return counts


def quantize(seconds: Sequence[Mapping[Choice, float]], resolution: int) -> list[dict[Choice, int]]:
    """Return savings for `solve`, in units of total / resolution or finer, where total is the seconds of all in full.

    seconds: for each sublayer, the seconds of each choice, `full` included. Each saving is rounded to the nearest unit,
    so a skip may save 0. Consider offloaded sublayers that take 800 times as long: rounding the others up to 1 would
    make them half of the budget, although they take a thousandth of the time. For the same reason there is no cap.
    Where rounding could be wrong by more than 5 % of the time (a deep model has more sublayers than units), the unit is
    made finer, by a factor of at most 32; `solve` bounds its states itself.

    The result leaves out `full` and choices that are not faster. It also leaves out choices other than `skip` that save
    less than half a unit, because trying these would cost more than they can save.
    """
    total = float(sum(costs[FULL] for costs in seconds))
    shares = [
        {choice: (costs[FULL] - cost) / total for choice, cost in costs.items() if cost < costs[FULL]}
        for costs in seconds
    ]
    units = _units(shares, resolution)
    rounded = [{choice: round(share * units) for choice, share in each.items()} for each in shares]
    return [{choice: saved for choice, saved in each.items() if saved or choice == SKIP} for each in rounded]


def _units(shares: Sequence[Mapping[Choice, float]], resolution: int) -> float:
    """Return the number of units per total with the least rounding error, or the first number whose error is small
    enough. The error is that of the worst case: each sublayer takes the choice whose saving is rounded most."""
    exact = np.zeros((len(shares), max(map(len, shares), default=0)))
    for row, each in zip(exact, shares, strict=True):
        row[: len(each)] = list(each.values())
    best = units = float(resolution)
    best_error = np.inf
    while units <= MAX_REFINEMENT * resolution and best_error > ROUNDING_TOLERANCE:
        scaled = exact * units
        error = float(np.abs(np.rint(scaled) - scaled).max(axis=1, initial=0.0).sum()) / units
        if error < best_error:
            best, best_error = units, error
        units *= SCALE_STEP
    return best


def _limits(menus: Sequence[_Menu], max_saved: int, band: float | None) -> tuple[Ints, Ints]:
    """Return the least and the most units that a state may have saved after each sublayer."""
    decided = np.cumsum([menu.savings.max() for menu in menus], dtype=np.int64)
    total = int(decided[-1]) if len(decided) else 0
    low, high = np.zeros_like(decided), np.full_like(decided, max_saved)
    if band is not None and total > 0:
        reach = min(max_saved, total) / total
        low = np.ceil(band * (reach * decided - total)).astype(np.int64)
        high = np.minimum(np.floor(reach * decided + band * total).astype(np.int64), max_saved)
    return np.maximum(low, 0), high


def _kept(saved: Ints, similarity: Floats, min_similarity: float, max_states: int, drop_dominated: bool) -> Ints:
    """Return the indices of the states to keep, by rising saved time. State 0, all in full, is the first."""
    alive = np.flatnonzero(similarity >= min_similarity)
    alive = alive[saved[alive] > 0]  # only state 0 may save nothing
    alive = alive[np.lexsort((-similarity[alive], saved[alive]))]
    alive = alive[np.diff(saved[alive], prepend=0) > 0]
    if drop_dominated and len(alive) > 1:
        best_faster = np.maximum.accumulate(similarity[alive][::-1])[::-1][1:]
        alive = alive[np.append(similarity[alive][:-1] > best_faster, True)]
    alive = np.insert(alive, 0, 0)
    return alive[_thin(saved[alive], similarity[alive], max_states)] if len(alive) > max_states else alive


def _grow_cheaply(sublayer: int, batch: _Batch, parents: Mapping[Choice, Ints], expansion: Expansion) -> _Batch:
    """Grow as `_grow` does, but run every state once, in full, and derive the other choices from that."""
    running = np.unique(np.concatenate([rows for choice, rows in parents.items() if choice != SKIP]))
    ran = _Batch(expansion.run(sublayer, FULL, _take([batch], running, expansion).states), len(running))
    grown = []
    for choice, rows in parents.items():
        if choice == SKIP or not len(rows):
            continue
        states = _take([ran], np.searchsorted(running, rows), expansion).states
        grown.append(_Batch(states if choice == FULL else expansion.vary(sublayer, choice, states), len(rows)))
        expansion.keep([one.states for one in (batch, ran, *grown)])
    return _with_skipped(grown, batch, parents, expansion)


def _grow(sublayer: int, batch: _Batch, parents: Mapping[Choice, Ints], expansion: Expansion) -> _Batch:
    """Return the states after each choice: for each, its rows `parents` of the batch. `skip` comes last."""
    ran: list[_Batch] = []
    for choice, rows in parents.items():
        if choice != SKIP and len(rows):
            ran.append(_Batch(expansion.run(sublayer, choice, _take([batch], rows, expansion).states), len(rows)))
            expansion.keep([one.states for one in (batch, *ran)])
    return _with_skipped(ran, batch, parents, expansion)


def _with_skipped(ran: Sequence[_Batch], batch: _Batch, parents: Mapping[Choice, Ints], expansion: Expansion) -> _Batch:
    """Return the states that ran, followed by the rows of the batch that skip the sublayer."""
    num_ran = sum(each.size for each in ran)
    index = np.append(np.arange(num_ran), num_ran + parents.get(SKIP, np.zeros(0, np.int64)))
    merged = _take([*ran, batch], index, expansion)
    expansion.keep([merged.states])
    return merged


def _take(batches: Sequence[_Batch], index: Ints, expansion: Expansion) -> _Batch:
    """Gather the rows `index`, or return the first batch itself if these are exactly its rows."""
    if len(index) == batches[0].size and np.array_equal(index, np.arange(len(index))):
        return batches[0]
    return _Batch(expansion.gather([batch.states for batch in batches], index), len(index))


def _thin(saved: Ints, similarity: Floats, num_kept: int) -> Ints:
    """Return `num_kept` positions out of states by rising saved time, the first state included.

    States on the concave hull of (saved, similarity) are taken first, evenly over saved time: for a similarity that is
    a sum, the best draft of a hull budget passes through hull states only. The most similar state of each bucket of
    saved time would be the bucket's slowest, row after row; so drafts that save much would be lost. The remaining
    places go to the states farthest in saved time from those taken.
    """
    hull = _hull(saved, similarity)
    targets = np.linspace(saved[0], saved[-1], num_kept)
    taken = np.unique(hull[np.abs(saved[hull] - targets[:, None]).argmin(axis=1)] if len(hull) > num_kept else hull)
    distance = np.abs(saved[:, None] - saved[taken]).min(axis=1)
    while len(taken) < num_kept:
        farthest = distance.argmax()
        taken = np.append(taken, farthest)
        distance = np.minimum(distance, np.abs(saved - saved[farthest]))
    return np.sort(taken)


def _hull(saved: Ints, similarity: Floats) -> Ints:
    """Return the positions on the upper concave hull, first and last included; `saved` rises strictly.

    A point is on the hull where every line to it from the left is steeper than every line from it to the right.
    """
    before = np.tri(len(saved), k=-1, dtype=bool)  # [of, to]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (similarity[:, None] - similarity) / (saved[:, None] - saved)
    from_left = np.where(before, slope, np.inf).min(axis=1)
    to_right = np.where(before.T, slope, -np.inf).max(axis=1)
    return np.flatnonzero(from_left > to_right)


def _names(used: Sequence[Mapping[Choice, object]]) -> tuple[Choice, ...]:
    """Return all choices in use: full first, skip last. The position of a choice is its code."""
    others = dict.fromkeys(choice for each in used for choice in each if choice not in (FULL, SKIP))
    return (FULL, *others, SKIP)


def _menus(savings: Sequence[Mapping[Choice, int]], names: Sequence[Choice]) -> list[_Menu]:
    code_of = {choice: code for code, choice in enumerate(names)}
    return [_Menu.of(each, code_of) for each in savings]
