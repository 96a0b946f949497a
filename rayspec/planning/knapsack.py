"""The multiple-choice knapsack over sublayers: for every amount of saved time, the draft most similar to the target.

After KnapSpec: state (i, w) is the draft most similar to the target after sublayer i, of those that have saved w units
of time. Here each state is extended by every choice of sublayer i, not only by run and skip. A state runs a sublayer
once, in full; other choices are derived from that run. The result is optimal if similarity is a sum over the sublayers.
No choice is excluded a priori.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import FULL, SKIP, Choice, combined, weights_of
from rayspec.planning.learning import BAND, CHEAPER_COST

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Codes = NDArray[np.int8]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Work in steps, of about a sublayer each, and its result."""

UNITS = 4096  # of saved time, in the time of all sublayers in full; `solve` bounds its states itself


class Expansion(Protocol):
    """Defines states and how they grow. A batch holds states as rows; only the expansion knows their content."""

    def start(self) -> Any:
        """Return a batch of one state: the hidden states before sublayer 0."""

    def run(self, sublayer: int, choice: Choice, states: Any) -> Any:
        """Return the batch after each state has run `sublayer` by `choice`, not skip. Must not change `states`."""

    def vary(self, sublayer: int, choices: Sequence[Choice], states: Any) -> Any:
        """Approximate cheaply what each state, which has run `sublayer` in full, would be after its own choice. For
        `full` and `skip` a state stays as it is."""

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
    """candidates: patterns by rising saved time, of which the first saves nothing. others: the given patterns. states:
    the terminal batch, with a row for each candidate, then for each of the others."""

    candidates: list[Pattern]
    others: list[Pattern]
    states: Any


@dataclass(frozen=True, slots=True)
class _Batch:
    states: Any
    size: int


def finished(steps: Steps[T]) -> T:
    """Take all steps, and return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


def solve(
    savings: Sequence[Mapping[Choice, int]],
    expansion: Expansion,
    *,
    max_saved: int,
    min_similarity: float,
    max_states: int,
    band: float | None = BAND,
    drop_dominated: bool = True,
    others: Sequence[Sequence[Choice]] = (),
) -> Steps[Solution]:
    """Return the most similar draft for each saved time up to `max_saved`.

    savings: for each sublayer, the units of time that each choice saves compared with `full`, which is always a choice;
    a sublayer without `skip` is never skipped. The search drops states less similar than `min_similarity` (or NaN), and
    states outside two diagonals to `max_saved`, by more than the share `band` of the most that could be saved. With
    `drop_dominated`, it drops states that save no more than another state and are no more similar. More than
    `max_states` states are thinned over saved time. band=None, drop_dominated=False, min_similarity=-inf and a large
    `max_states` give the exact recurrence. others: patterns whose states are computed in the same runs.
    """
    names = _names([*savings, *map(dict.fromkeys, others)])
    menus = [[choice for choice in names if choice == FULL or choice in each] for each in savings]
    gains = [np.asarray([each.get(choice, 0) for choice in menu]) for each, menu in zip(savings, menus, strict=True)]
    low, high = _limits(gains, max_saved, band)
    given: Codes = np.array([[names.index(choice) for choice in pattern] for pattern in others], np.int8)
    given = given.reshape(len(others), len(menus))
    # A row of the dynamic program: the states after a sublayer, by rising saved time. State 0 has saved nothing and is
    # never dropped. The states of the other patterns come last in a batch.
    saved, similarity = np.zeros(1, np.int64), np.ones(1 + len(others))
    batch = _take(_Batch(expansion.start(), 1), np.zeros(1 + len(others), np.int64), expansion)
    codes: Codes = np.zeros((1, len(menus)), np.int8)  # [num_states, num_sublayers]: the choices made
    for sublayer, (menu, gain) in enumerate(zip(menus, gains, strict=True)):
        grown = saved + gain[:, None]
        admitted = (grown >= low[sublayer]) & (grown <= high[sublayer])
        admitted[0, 0] = True
        option, source = np.nonzero(admitted)  # of each new state, choice by choice
        chosen = np.asarray([names.index(choice) for choice in menu], np.int8)[option]
        ends = len(source) + np.arange(len(others))
        batch = _grow(
            sublayer,
            batch,
            np.append(source, len(saved) + np.arange(len(others))),
            [names[code] for code in (*chosen, *given[:, sublayer])],
            expansion,
        )
        saved = grown[admitted]
        similarity = np.asarray(expansion.similarity(sublayer, batch.states), float)
        kept = _kept(saved, similarity[: len(saved)], min_similarity, max_states, drop_dominated)
        codes = codes[source[kept]]
        codes[:, sublayer] = chosen[kept]
        kept_rows = np.append(kept, ends)
        batch, saved, similarity = _take(batch, kept_rows, expansion), saved[kept], similarity[kept_rows]
        expansion.keep([batch.states])
        yield
    saved = np.append(saved, [sum(each.get(one, 0) for each, one in zip(savings, own, strict=True)) for own in others])
    patterns = [
        Pattern(choices=tuple(names[code] for code in chosen), saved=int(units), similarity=similar)
        for chosen, units, similar in zip([*codes.tolist(), *given.tolist()], saved, similarity.tolist(), strict=True)
    ]
    return Solution(candidates=patterns[: len(codes)], others=patterns[len(codes) :], states=batch.states)


def follow(choice_patterns: Sequence[Sequence[Choice]], expansion: Expansion) -> Steps[Any]:
    """Return the terminal states of given drafts, a row for each, in their order. Drafts that begin alike share a
    state, which runs once per sublayer and choice. There is at least one draft, and all have the same length."""
    names = _names([dict.fromkeys(pattern) for pattern in choice_patterns])
    batch = _Batch(expansion.start(), 1)
    row_of = np.zeros(len(choice_patterns), np.int64)  # by draft
    for sublayer, chosen in enumerate(np.asarray(choice_patterns).T):
        grown: list[_Batch] = []
        rows, num_rows = row_of, 0
        row_of, skipped = np.zeros_like(rows), np.zeros(0, np.int64)
        for choice in names:
            made = chosen == choice
            parents = np.unique(rows[made])
            row_of[made] = num_rows + np.searchsorted(parents, rows[made])
            num_rows += len(parents)
            if choice == SKIP:
                skipped = parents
            elif len(parents):
                states = expansion.run(sublayer, choice, _take(batch, parents, expansion).states)
                grown.append(_Batch(states, len(parents)))
                expansion.keep([one.states for one in (batch, *grown)])
        num_grown = sum(each.size for each in grown)
        batch = _gather([*grown, batch], np.append(np.arange(num_grown), num_grown + skipped), expansion)
        expansion.keep([batch.states])
        yield
    return _take(batch, row_of, expansion).states


def quantize(seconds: Sequence[Mapping[Choice, float]]) -> list[dict[Choice, int]]:
    """Return savings for `solve`, in units of 1 / UNITS of the seconds of all in full. A skip may save 0.

    seconds: for each sublayer, the seconds of each choice, `full` included. The result leaves out `full`. A choice
    other than `skip` must save a unit, and take less than CHEAPER_COST of the time in full, or of the time with the
    same weights and all keys: trying others would cost more than they can save.
    """
    total = float(sum(costs[FULL] for costs in seconds))
    savings: list[dict[Choice, int]] = [{} for _ in seconds]
    for saved, costs in zip(savings, seconds, strict=True):
        for choice, cost in costs.items():
            units = round(UNITS * (costs[FULL] - cost) / total) if total else 0
            with_all_keys = combined(weights_of(choice), "all")
            slower_s = costs[FULL if with_all_keys == choice else with_all_keys]
            if (choice == SKIP and cost < costs[FULL]) or (units > 0 and cost < CHEAPER_COST * slower_s):
                saved[choice] = units
    return savings


def _limits(gains: Sequence[Ints], max_saved: int, band: float | None) -> tuple[Ints, Ints]:
    decided = np.cumsum([gain.max() for gain in gains], dtype=np.int64)
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


def _grow(sublayer: int, batch: _Batch, parents: Ints, choices: Sequence[Choice], expansion: Expansion) -> _Batch:
    """Return a state for each of the rows `parents` and its choice. Each row runs once, in full; see `vary`."""
    runs = np.asarray([choice != SKIP for choice in choices])
    running = np.unique(parents[runs])
    in_full = _Batch(expansion.run(sublayer, FULL, _take(batch, running, expansion).states), len(running))
    index = np.where(runs, np.searchsorted(running, parents), len(running) + parents)
    grown = _gather([in_full, batch], index, expansion)
    if set(choices) - {FULL, SKIP}:
        grown = _Batch(expansion.vary(sublayer, choices, grown.states), grown.size)
    expansion.keep([grown.states])
    return grown


def _take(batch: _Batch, index: Ints, expansion: Expansion) -> _Batch:
    return _gather([batch], index, expansion)


def _gather(batches: Sequence[_Batch], index: Ints, expansion: Expansion) -> _Batch:
    """Gather the rows `index`, or return the first batch itself if these are exactly its rows."""
    if len(index) == batches[0].size and np.array_equal(index, np.arange(len(index))):
        return batches[0]
    return _Batch(expansion.gather([batch.states for batch in batches], index), len(index))


def _thin(saved: Ints, similarity: Floats, num_kept: int) -> Ints:
    """Return `num_kept` positions out of states by rising saved time, the first state included. States on the concave
    hull of (saved, similarity) are taken first, evenly over saved time: the best draft of a hull budget passes through
    hull states only. Then those farthest in saved time from the states taken."""
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
    """Return the positions on the upper concave hull: every line to it from the left is steeper than every line from it
    to the right. First and last are included; `saved` rises strictly."""
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
