from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.planning.knapsack import Solution, count_rows, follow, quantize, solve

EXACT: dict[str, Any] = {"min_similarity": -np.inf, "max_states": 10**6, "band": None, "drop_dominated": False}


class Additive:
    """Each sublayer that is skipped costs its damage. A state is the sum of the damages avoided."""

    def __init__(self, damages: Sequence[float]) -> None:
        self.damages = np.asarray(damages, float)
        self.target = np.cumsum(self.damages)
        self.runs: list[tuple[int, int]] = []
        self.num_similarity_calls = 0

    def start(self) -> Any:
        return np.zeros(1)

    def run(self, sublayer: int, states: Any) -> Any:
        self.runs.append((sublayer, len(states)))
        return states + self.damages[sublayer]

    def similarity(self, sublayer: int, states: Any) -> Any:
        self.num_similarity_calls += 1
        return 1.0 + states - self.target[sublayer]

    def gather(self, batches: Sequence[Any], index: Any) -> Any:
        return np.concatenate(batches)[index]


def brute_force(weights: Sequence[int], damages: Sequence[float], max_weight: int) -> dict[int, float]:
    best: dict[int, float] = {}
    for skip in itertools.product((False, True), repeat=len(weights)):
        weight = sum(itertools.compress(weights, skip))
        if weight <= max_weight:
            similarity = 1 - sum(itertools.compress(damages, skip))
            best[weight] = max(best.get(weight, -np.inf), similarity)
    return best


def damage_at(solution: Solution, weight: float) -> float:
    return min((1 - c.similarity for c in solution.candidates if c.weight >= weight), default=np.inf)


def deep_instance(seed: int, num_layers: int = 32) -> tuple[list[int], np.ndarray]:
    """Damages as models have them: the first and last layers matter most, and all differ widely."""
    rng = np.random.default_rng(seed)
    depth = np.linspace(0, 1, 2 * num_layers)
    shape = 0.2 + 3 * np.exp(-depth * 12) + 1.5 * np.exp(-(1 - depth) * 15)
    damages = shape * rng.lognormal(0, 1, 2 * num_layers)
    return [1, 3] * num_layers, 1.2 * damages / damages.sum()


def check_consistent(solution: Solution, weights: Sequence[int], damages: Sequence[float], num_states: int) -> None:
    first = solution.candidates[0]
    assert all(first.keep)
    assert first.weight == 0
    assert len(solution.candidates) <= num_states
    assert [c.weight for c in solution.candidates] == sorted({c.weight for c in solution.candidates})
    for row, candidate in enumerate(solution.candidates):
        skipped = [not kept for kept in candidate.keep]
        assert candidate.index == row
        assert candidate.weight == sum(itertools.compress(weights, skipped))
        damage = sum(itertools.compress(damages, skipped))
        assert candidate.similarity == pytest.approx(1 - damage, abs=1e-9)
        assert solution.states[row] == pytest.approx(sum(damages) - damage, abs=1e-9)


items = st.lists(st.tuples(st.integers(1, 9), st.floats(0.001, 1.0)), min_size=1, max_size=9)


@given(items=items, share=st.floats(0.0, 1.0))
def test_equals_brute_force_without_pruning(items: list[tuple[int, float]], share: float) -> None:
    weights, damages = zip(*items, strict=True)
    max_weight = int(share * sum(weights))
    solution = solve(weights, Additive(damages), max_weight=max_weight, **EXACT)
    expected = brute_force(weights, damages, max_weight)
    assert {c.weight: c.similarity for c in solution.candidates} == pytest.approx(expected)
    check_consistent(solution, weights, damages, len(expected))


@given(items=items, max_states=st.integers(2, 6), band=st.one_of(st.none(), st.floats(0, 0.5)), floor=st.floats(-2, 1))
def test_pruned_is_consistent_never_better_and_never_over_its_limits(
    items: list[tuple[int, float]], max_states: int, band: float | None, floor: float
) -> None:
    weights, damages = zip(*items, strict=True)
    max_weight = sum(weights) // 2
    expansion = Additive(damages)
    limits: dict[str, Any] = {"max_weight": max_weight, "max_states": max_states, "band": band}
    solution = solve(weights, expansion, min_similarity=floor, **limits)
    check_consistent(solution, weights, damages, max_states)
    best = brute_force(weights, damages, max_weight)
    for candidate in solution.candidates:
        assert candidate.similarity <= best[candidate.weight] + 1e-9
        assert candidate.weight == 0 or candidate.similarity >= floor
    assert [sublayer for sublayer, _ in expansion.runs] == list(range(len(weights)))
    assert expansion.num_similarity_calls == len(weights)
    assert solution.num_rows_run == [size for _, size in expansion.runs]
    bound = count_rows(weights, **limits)
    assert all(ran <= most for ran, most in zip(solution.num_rows_run, bound, strict=True))


@pytest.mark.parametrize(("max_states", "mean_gap"), [(16, 0.35), (32, 0.15)])
def test_gap_of_a_thinned_search(max_states: int, mean_gap: float) -> None:
    """Mean excess damage at 20, 35, 50 and 65 % skipped, over 8 instances of 64 sublayers."""
    gaps = []
    for seed in range(8):
        weights, damages = deep_instance(seed)
        total = sum(weights)
        exact = solve(weights, Additive(damages), max_weight=3 * total // 4, **EXACT)
        thin = solve(
            weights, Additive(damages), max_weight=3 * total // 4, min_similarity=-np.inf, max_states=max_states
        )
        gaps += [damage_at(thin, s * total) / damage_at(exact, s * total) - 1 for s in (0.2, 0.35, 0.5, 0.65)]
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) < mean_gap


def test_dominated_states_lose_nothing_that_is_best_for_its_weight_or_more() -> None:
    weights, damages = deep_instance(0, num_layers=6)
    total = sum(weights)
    exact = solve(weights, Additive(damages), max_weight=total, **EXACT)
    frontier = solve(weights, Additive(damages), max_weight=total, **{**EXACT, "drop_dominated": True})
    for weight in range(total + 1):
        assert damage_at(frontier, weight) == pytest.approx(damage_at(exact, weight))


def test_may_skip_is_obeyed() -> None:
    weights, damages = deep_instance(1, num_layers=4)
    may_skip = [k % 3 != 0 for k in range(8)]
    solution = solve(weights, Additive(damages), max_weight=sum(weights), may_skip=may_skip, **EXACT)
    assert all(kept or allowed for c in solution.candidates for kept, allowed in zip(c.keep, may_skip, strict=True))
    assert len(solution.candidates) > 1


def test_offloaded_sublayers_are_skipped_first() -> None:
    seconds = [800.0 if k % 3 == 0 else 1.0 for k in range(60)]
    weights = quantize(seconds, 128)
    solution = solve(weights, Additive([0.01] * 60), max_weight=sum(weights), min_similarity=0.5, max_states=16)
    lightest = min(solution.candidates, key=lambda c: sum(s for s, kept in zip(seconds, c.keep, strict=True) if kept))
    assert not any(kept for s, kept in zip(seconds, lightest.keep, strict=True) if s > 1)


class Spoiled(Additive):
    def similarity(self, sublayer: int, states: Any) -> Any:
        return np.full(len(states), np.nan)


def test_nothing_finite_leaves_the_one_that_skips_nothing() -> None:
    solution = solve([1, 2], Spoiled([1, 1]), max_weight=3, min_similarity=0.5, max_states=4)
    assert [c.keep for c in solution.candidates] == [(True, True)]


@pytest.mark.parametrize(
    "changes", [{"max_weight": -1}, {"max_states": 1}, {"band": -0.1}, {"may_skip": [True]}, {"weights": [1, -1]}]
)
def test_arguments_that_cannot_be(changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"weights": [1, 1], "max_weight": 1, "min_similarity": 0.0, "max_states": 4, **changes}
    with pytest.raises(ValueError):
        solve(arguments.pop("weights"), Additive([1, 1]), **arguments)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=80), st.integers(16, 256))
def test_quantize_keeps_the_proportions(seconds: list[float], resolution: int) -> None:
    weights = np.asarray(quantize(seconds, resolution))
    assert (weights >= 0).all()
    share = weights / weights.sum()
    assert np.abs(share - np.asarray(seconds) / sum(seconds)).sum() < 0.11
    assert weights.sum() < 33.5 * resolution


def test_quantize_examples() -> None:
    assert quantize([1.0, 3.0], 16) == [4, 12]
    assert quantize([0.0, 0.0], 16) == [0, 0]
    deep = quantize([120e-6, 545e-6] * 126, 128)  # more sublayers than units: the unit gets finer
    assert min(deep) > 0
    assert 3.5 < deep[1] / deep[0] < 6
    offloaded = quantize([800.0] * 48 + [1.0] * 112, 128)
    assert min(offloaded[:48]) > 0
    assert max(offloaded[48:]) == 0
    with pytest.raises(ValueError):
        quantize([1.0, float("nan")], 16)


class _Histories:
    """States that remember which sublayers ran; counts the rows of every run."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def start(self) -> list[tuple[int, ...]]:
        return [()]

    def run(self, sublayer: int, states: Any) -> Any:
        self.num_rows.append(len(states))
        return [(*state, sublayer) for state in states]

    def similarity(self, sublayer: int, states: Any) -> Any:
        return np.zeros(len(states))

    def gather(self, batches: Any, index: Any) -> Any:
        joined = [state for batch in batches for state in batch]
        return [joined[row] for row in index]


@pytest.mark.parametrize("seed", range(30))
def test_followed_drafts_end_in_their_own_states_and_share_their_past(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keeps = [tuple(row) for row in (rng.random((rng.integers(1, 9), 7)) < rng.random()).tolist()]
    histories = _Histories()
    ended = follow(keeps, histories)
    assert ended == [tuple(index for index, kept in enumerate(keep) if kept) for keep in keeps]
    runs = [len({keep[:index] for keep in keeps if keep[index]}) for index in range(7)]
    assert histories.num_rows == [count for count in runs if count]


@pytest.mark.parametrize("keeps", [[], [(True,), (True, False)]])
def test_drafts_that_cannot_be_followed_are_refused(keeps: Any) -> None:
    with pytest.raises(ValueError, match="cannot be followed"):
        follow(keeps, _Histories())
