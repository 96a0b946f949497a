"""The knapsack over sublayers: for every amount of skipped time, the draft most similar to the target.

After KnapSpec: state (i, w) holds the hidden states after sublayer i, with skipped weight w, that are most similar to
what the target computed there. Each state grows by "run sublayer i" and by "skip it, w += weights[i]". The result is
optimal when similarity is a sum over the skipped sublayers, and a heuristic otherwise. Nothing is excluded a priori:
the first and the last sublayers may be skipped, and skipping nothing is always one of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

DEFAULT_BAND = 0.2
USEFUL_FLOOR = 0.25  # of max_weight: lighter drafts can hardly pay, so the band need not keep room for them
ROUNDING_TOLERANCE = 0.05  # of the total time, that quantize() may misplace
MAX_REFINEMENT = 32
SCALE_STEP = 1.02


class Expansion(Protocol):
    """What a state is and how it grows. A batch holds states as rows; only the expansion looks inside one."""

    def start(self) -> Any:
        """A batch of one state: the hidden states before sublayer 0."""

    def run(self, sublayer: int, states: Any) -> Any:
        """The batch after running `sublayer` on each of its states. `states` must stay as it was."""

    def similarity(self, sublayer: int, states: Any) -> Floats:
        """[num_states]: how similar each is to the target's state after `sublayer`; higher is better."""

    def gather(self, batches: Sequence[Any], index: Ints) -> Any:
        """The rows `index` of the concatenation of `batches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerSet:
    """Of a draft: keep[i] tells whether sublayer i runs; weight is what it skips; index is its row in the batch."""

    keep: tuple[bool, ...]
    weight: int
    similarity: float
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Sets by rising skipped weight, the first skips nothing; `states` is the terminal batch, a row for each.

    num_rows_run: states run through each sublayer; times its seconds, what the search has cost.
    """

    candidates: list[SublayerSet]
    states: Any
    num_rows_run: list[int]


@dataclass(frozen=True, slots=True)
class _Row:
    """The states after some sublayer, by rising weight. Row 0 has skipped nothing and is never dropped."""

    weight: Ints
    similarity: Floats
    keep: Flags  # [num_states, num_sublayers]


@dataclass(frozen=True, slots=True)
class _Limits:
    """Which skipped weights a state may have after each sublayer."""

    may_skip: Flags
    low: Ints
    high: Ints

    @classmethod
    def of(cls, weights: Ints, max_weight: int, band: float | None, may_skip: Sequence[bool] | None) -> _Limits:
        allowed = np.ones(len(weights), bool) if may_skip is None else np.asarray(may_skip, bool)
        decided = np.cumsum(np.where(allowed, weights, 0))
        total = int(decided[-1]) if len(decided) else 0
        low, high = np.zeros_like(decided), np.full_like(decided, max_weight)
        if band is not None and total > 0:
            reach = min(max_weight, total) / total
            low = np.ceil(USEFUL_FLOOR * reach * decided - band * total).astype(np.int64)
            high = np.minimum(np.floor(reach * decided + band * total).astype(np.int64), max_weight)
        return cls(allowed, np.maximum(low, 0), high)

    def admit(self, sublayer: int, weight: Ints) -> Flags:
        admitted: Flags = (weight >= self.low[sublayer]) & (weight <= self.high[sublayer])
        return admitted


@dataclass(frozen=True, slots=True)
class _Pruning:
    min_similarity: float
    max_states: int
    drop_dominated: bool

    def choose(self, weight: Ints, similarity: Floats) -> Ints:
        """Indices of the states that go on, by rising weight. State 0, which skips nothing, is the first."""
        alive = np.flatnonzero(similarity >= self.min_similarity)
        alive = alive[weight[alive] > 0]  # weight 0 belongs to state 0
        alive = alive[np.lexsort((-similarity[alive], weight[alive]))]
        alive = alive[np.diff(weight[alive], prepend=0) > 0]
        if self.drop_dominated and len(alive) > 1:
            best_heavier = np.maximum.accumulate(similarity[alive][::-1])[::-1][1:]
            alive = alive[np.append(similarity[alive][:-1] > best_heavier, True)]
        alive = np.insert(alive, 0, 0)
        if len(alive) > self.max_states:
            alive = alive[_thin(weight[alive], similarity[alive], self.max_states)]
        return alive


def solve(
    weights: Sequence[int],
    expansion: Expansion,
    *,
    max_weight: int,
    min_similarity: float,
    max_states: int,
    band: float | None = DEFAULT_BAND,
    may_skip: Sequence[bool] | None = None,
    drop_dominated: bool = True,
) -> Solution:
    """The most similar draft for each skipped weight up to `max_weight`; one `run` and one `similarity` a sublayer.

    Dropped on the way: states less similar than `min_similarity` (or NaN); states further than `band` (a share of the
    skippable weight) from the diagonals that lead to a quarter of `max_weight` and to `max_weight`; with
    `drop_dominated`, states that skip no more than another and are no more similar; and the rest of a row over
    `max_states`, thinned over weight. band=None, drop_dominated=False, min_similarity=-inf and a large
    `max_states` give the exact recurrence. A skip that weighs 0 competes with running at equal weight: it happens only
    where it makes the state more similar. Raises ValueError on arguments that do not fit.
    """
    item_weights = _checked(weights, max_weight, max_states, band, may_skip)
    limits = _Limits.of(item_weights, max_weight, band, may_skip)
    pruning = _Pruning(min_similarity, max_states, drop_dominated)
    row = _Row(np.zeros(1, np.int64), np.ones(1), np.ones((1, len(item_weights)), bool))
    states, num_rows_run = expansion.start(), []
    for sublayer in range(len(item_weights)):
        num_rows_run.append(len(row.weight))
        row, states = _expand(sublayer, int(item_weights[sublayer]), row, states, expansion, limits, pruning)
    candidates = [
        SublayerSet(keep=tuple(keep), weight=int(weight), similarity=float(similarity), index=index)
        for index, (keep, weight, similarity) in enumerate(
            zip(row.keep.tolist(), row.weight, row.similarity, strict=True)
        )
    ]
    return Solution(candidates=candidates, states=states, num_rows_run=num_rows_run)


def follow(keeps: Sequence[Sequence[bool]], expansion: Expansion) -> Any:
    """The terminal states of given drafts, a row for each, in their order. Drafts with the same past are one state:
    what they have in common is run once. Raises ValueError when there are none, or of different lengths."""
    if len(keeps) == 0 or len({len(keep) for keep in keeps}) != 1:
        raise ValueError(f"{len(keeps)} drafts cannot be followed: give one or more, each with a flag a sublayer")
    flags = np.asarray(keeps, bool)
    states, num_states = expansion.start(), 1
    row_of = np.zeros(len(flags), np.int64)  # by draft
    for sublayer, kept in enumerate(flags.T):
        if not kept.any():
            continue
        running = np.unique(row_of[kept])
        ran = expansion.run(sublayer, _take(expansion, (states,), running, num_states))
        branches = np.where(kept, np.searchsorted(running, row_of), len(running) + row_of)
        index, row_of = np.unique(branches, return_inverse=True)
        states, num_states = _take(expansion, (ran, states), index, len(running)), len(index)
    return _take(expansion, (states,), row_of, num_states)


def count_rows(
    weights: Sequence[int],
    *,
    max_weight: int,
    max_states: int,
    band: float | None = DEFAULT_BAND,
    may_skip: Sequence[bool] | None = None,
) -> list[int]:
    """The most states that `solve` can run through each sublayer: with the latency model, its price in advance."""
    item_weights = _checked(weights, max_weight, max_states, band, may_skip)
    limits = _Limits.of(item_weights, max_weight, band, may_skip)
    reachable, counts = 1, []  # bit w: some state skips w
    for sublayer, weight in enumerate(item_weights.tolist()):
        counts.append(min(max_states, reachable.bit_count()))
        if limits.may_skip[sublayer]:
            reachable |= reachable << weight
        low, high = int(limits.low[sublayer]), int(limits.high[sublayer])
        reachable &= ((1 << (high + 1)) - 1) >> low << low | 1
    return counts


def quantize(seconds: Sequence[float], resolution: int) -> list[int]:
    """Integer weights proportional to `seconds`, in units of total / resolution or finer.

    Each is rounded to the nearest, so a sublayer may weigh 0: beside offloaded ones that take 800 times as long,
    rounding the others up to 1 would make them half of the budget while they are a thousandth of the time, and there
    is no cap, for the same reason. Where plain rounding would misplace more than 5 % of the time (a deep model has
    more sublayers than units), the unit is refined, at most 32 times; `solve` bounds its states itself.
    """
    exact = np.asarray(seconds, float)
    total = float(exact.sum())
    if resolution < 1 or not np.isfinite(total) or (exact < 0).any():
        raise ValueError(f"cannot cut seconds {list(seconds)} into {resolution} units: need finite seconds >= 0")
    if total == 0:
        return [0] * len(exact)
    best, best_error = np.zeros_like(exact), np.inf
    units = float(resolution)
    while units <= MAX_REFINEMENT * resolution and best_error > ROUNDING_TOLERANCE:
        scaled = exact * (units / total)
        error = float(np.abs(np.rint(scaled) - scaled).sum()) / units
        if error < best_error:
            best, best_error = np.rint(scaled), error
        units *= SCALE_STEP
    return [int(weight) for weight in best]


def _expand(
    sublayer: int, weight: int, row: _Row, states: Any, expansion: Expansion, limits: _Limits, pruning: _Pruning
) -> tuple[_Row, Any]:
    num_states = len(row.weight)
    source = np.arange(2 * num_states if limits.may_skip[sublayer] else num_states)  # run ones, then skipped ones
    grown = row.weight[source % num_states] + weight * (source >= num_states)
    admitted = limits.admit(sublayer, grown)
    admitted[0] = True
    source, grown = source[admitted], grown[admitted]

    ran = expansion.run(sublayer, states)
    merged = _take(expansion, (ran, states), source, num_states)
    similarity = np.asarray(expansion.similarity(sublayer, merged), float)
    if similarity.shape != source.shape:
        raise ValueError(f"similarity() returned shape {similarity.shape} for {len(source)} states")

    chosen = pruning.choose(grown, similarity)
    keep = row.keep[source[chosen] % num_states]
    keep[:, sublayer] = source[chosen] < num_states
    return _Row(grown[chosen], similarity[chosen], keep), _take(expansion, (merged,), chosen, len(source))


def _take(expansion: Expansion, batches: tuple[Any, ...], index: Ints, first_size: int) -> Any:
    """gather(), or the first batch itself where that is all there is to take."""
    if len(index) == first_size and np.array_equal(index, np.arange(first_size)):
        return batches[0]
    return expansion.gather(batches, index)


def _thin(weight: Ints, similarity: Floats, num_kept: int) -> Ints:
    """`num_kept` positions out of states by rising weight, the first among them.

    States on the concave hull of (weight, similarity) go first, evenly over weight: for a similarity that is a sum,
    the best draft of a hull budget passes through hull states only. Taking the most similar state of each weight
    bucket instead would take its lightest, row after row, and lose the drafts that skip much. What is left goes to
    the states farthest in weight from those taken.
    """
    hull = _hull(weight, similarity)
    targets = np.linspace(weight[0], weight[-1], num_kept)
    taken = np.unique(hull[np.abs(weight[hull] - targets[:, None]).argmin(axis=1)] if len(hull) > num_kept else hull)
    distance = np.abs(weight[:, None] - weight[taken]).min(axis=1)
    while len(taken) < num_kept:
        farthest = distance.argmax()
        taken = np.append(taken, farthest)
        distance = np.minimum(distance, np.abs(weight - weight[farthest]))
    return np.sort(taken)


def _hull(weight: Ints, similarity: Floats) -> Ints:
    """Positions on the upper concave hull, first and last included; weights rise strictly."""
    points = list(zip(weight.tolist(), similarity.tolist(), strict=True))
    hull: list[int] = []
    for k, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (y1 - y0) * (x - x1) > (y - y1) * (x1 - x0):
                break
            hull.pop()
        hull.append(k)
    return np.asarray(hull, np.int64)


def _checked(
    weights: Sequence[int], max_weight: int, max_states: int, band: float | None, may_skip: Sequence[bool] | None
) -> Ints:
    item_weights = np.asarray(weights, np.int64)
    if (item_weights < 0).any() or max_weight < 0:
        raise ValueError(f"weights and max_weight ({max_weight}) must be 0 or more")
    if max_states < 2:
        raise ValueError(f"max_states is {max_states}; the search needs 2 or more")
    if band is not None and band < 0:
        raise ValueError(f"band is {band}; use None to switch it off")
    if may_skip is not None and len(may_skip) != len(item_weights):
        raise ValueError(f"may_skip has {len(may_skip)} flags for {len(item_weights)} sublayers")
    return item_weights
