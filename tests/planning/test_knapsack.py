import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.choices import FULL, SKIP, Choice
from rayspec.planning.knapsack import Solution, finished, follow, quantize
from rayspec.planning.knapsack import solve as steps_of_solve

EXACT: dict[str, Any] = {"min_similarity": -np.inf, "max_states": 10**6, "band": None, "drop_dominated": False}
CHEAPER: tuple[Choice, ...] = (SKIP, "int4", "int8")


def solve(*args: Any, **options: Any) -> Solution:
    return finished(steps_of_solve(*args, **options))


Savings = list[dict[Choice, int]]
Damages = list[dict[Choice, float]]


class Additive:
    """Each choice but full costs its damage. A state is the sum of what damage was avoided, compared to skipping."""

    def __init__(self, damages: Sequence[Mapping[Choice, float]]) -> None:
        self.damages = damages
        self.by_skips = list(itertools.accumulate(each.get(SKIP, 0.0) for each in damages))
        self.num_rows_run: list[int] = []  # by sublayer
        self.varied: list[int] = []
        self.num_similarity_calls = 0

    def start(self) -> Any:
        return np.zeros(1)

    def run(self, sublayer: int, choice: Choice, states: Any) -> Any:
        assert choice == FULL
        assert sublayer == len(self.num_rows_run), "once a sublayer, in order"
        self.num_rows_run.append(len(states))
        return states + self.damages[sublayer].get(SKIP, 0.0)

    def vary(self, sublayer: int, choices: Sequence[Choice], states: Any) -> Any:
        self.varied.append(sublayer)
        changes = {FULL: 0.0, SKIP: 0.0} | {one: self.damages[sublayer].get(one, 0.0) for one in CHEAPER[1:]}
        return states - np.asarray([changes[choice] for choice in choices])

    def similarity(self, sublayer: int, states: Any) -> Any:
        self.num_similarity_calls += 1
        return 1.0 + states - self.by_skips[sublayer]

    def gather(self, batches: Sequence[Any], index: Any) -> Any:
        return np.concatenate(batches)[index]

    def keep(self, batches: Sequence[Any]) -> None:
        pass


def saved_by(savings: Sequence[Mapping[Choice, float]], pattern: Sequence[Choice]) -> float:
    return sum(0 if choice == FULL else each[choice] for each, choice in zip(savings, pattern, strict=True))


def all_patterns(savings: Sequence[Mapping[Choice, int]]) -> list[tuple[Choice, ...]]:
    return list(itertools.product(*[(FULL, *each) for each in savings]))


def brute_force(savings: Savings, damages: Damages, max_saved: int) -> dict[int, float]:
    """The least damage for each saved time. What saves nothing is all in full, by the rule of ties."""
    best: dict[int, float] = {0: 1.0}
    for pattern in all_patterns(savings):
        saved = int(saved_by(savings, pattern))
        if 0 < saved <= max_saved:
            best[saved] = max(best.get(saved, -np.inf), 1 - saved_by(damages, pattern))
    return best


def damage_at(solution: Solution, saved: float) -> float:
    return min((1 - c.similarity for c in solution.candidates if c.saved >= saved), default=np.inf)


def deep_choices(seed: int, num_layers: int = 32) -> tuple[Savings, Damages]:
    """Damages as models have them: the first and last layers matter most. Two cheaper ways to run
    a sublayer do less damage than a skip."""
    rng, weights = np.random.default_rng(seed), [1, 3] * num_layers
    depth = np.linspace(0, 1, 2 * num_layers)
    shape = 0.2 + 3 * np.exp(-depth * 12) + 1.5 * np.exp(-(1 - depth) * 15)
    damages = shape * rng.lognormal(0, 1, 2 * num_layers)
    damages *= 1.2 / damages.sum()
    shares = rng.uniform(0, 0.5, (2, 2 * num_layers))
    savings: Savings = [{SKIP: 8 * weight, "int4": 5 * weight, "int8": 3 * weight} for weight in weights]
    return savings, [
        {SKIP: float(damage), "int4": float(damage * four), "int8": float(damage * eight)}
        for damage, four, eight in zip(damages, *shares, strict=True)
    ]


def check_consistent(solution: Solution, savings: Savings, damages: Damages, num_states: int) -> None:
    first = solution.candidates[0]
    assert set(first.choices) <= {FULL}
    assert first.saved == 0
    assert len(solution.candidates) <= num_states
    assert [c.saved for c in solution.candidates] == sorted({c.saved for c in solution.candidates})
    total = sum(each.get(SKIP, 0.0) for each in damages)
    for row, candidate in enumerate(solution.candidates):
        assert candidate.saved == saved_by(savings, candidate.choices)
        damage = saved_by(damages, candidate.choices)
        assert candidate.similarity == pytest.approx(1 - damage, abs=1e-9)
        assert solution.states[row] == pytest.approx(total - damage, abs=1e-9)


sublayers = st.dictionaries(st.sampled_from(CHEAPER), st.tuples(st.integers(0, 9), st.floats(0.001, 1.0)))
items = st.lists(sublayers, min_size=1, max_size=5)


def unzipped(drawn: Sequence[Mapping[Choice, tuple[int, float]]]) -> tuple[Savings, Damages]:
    savings = [{choice: saved for choice, (saved, _) in each.items()} for each in drawn]
    return savings, [{choice: damage for choice, (_, damage) in each.items()} for each in drawn]


@given(drawn=items, share=st.floats(0.0, 1.0))
def test_equals_brute_force_without_pruning(drawn: Sequence[Mapping[Choice, tuple[int, float]]], share: float) -> None:
    savings, damages = unzipped(drawn)
    max_saved = int(share * sum(max(each.values(), default=0) for each in savings))
    solution = solve(savings, Additive(damages), max_saved=max_saved, **EXACT)
    expected = brute_force(savings, damages, max_saved)
    assert {c.saved: c.similarity for c in solution.candidates} == pytest.approx(expected)
    check_consistent(solution, savings, damages, len(expected))


@given(drawn=items, max_states=st.integers(2, 6), band=st.one_of(st.none(), st.floats(0, 0.5)), floor=st.floats(-2, 1))
def test_pruned_is_consistent_never_better_and_never_over_its_limits(
    drawn: Sequence[Mapping[Choice, tuple[int, float]]], max_states: int, band: float | None, floor: float
) -> None:
    savings, damages = unzipped(drawn)
    max_saved = sum(max(each.values(), default=0) for each in savings) // 2
    expansion = Additive(damages)
    limits: dict[str, Any] = {"max_saved": max_saved, "max_states": max_states, "band": band}
    solution = solve(savings, expansion, min_similarity=floor, **limits)
    check_consistent(solution, savings, damages, max_states)
    best = brute_force(savings, damages, max_saved)
    for candidate in solution.candidates:
        assert candidate.similarity <= best[candidate.saved] + 1e-9
        assert candidate.saved == 0 or candidate.similarity >= floor
    assert max(expansion.num_rows_run) <= max_states
    assert len(expansion.varied) == len(set(expansion.varied)), "one variation of all states at most"
    assert expansion.num_similarity_calls == len(savings)


@pytest.mark.parametrize(("max_states", "mean_gap"), [(16, 0.35), (32, 0.2)])
def test_gap_of_a_thinned_search_with_cheaper_choices(max_states: int, mean_gap: float) -> None:
    gaps = list(itertools.chain.from_iterable(gaps_of(*deep_choices(seed), max_states) for seed in range(4)))
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) < mean_gap


def gaps_of(savings: Savings, damages: Damages, max_states: int) -> list[float]:
    total = sum(each[SKIP] for each in savings)
    most = 3 * total // 4
    exact = solve(savings, Additive(damages), max_saved=most, **EXACT)
    thin = solve(savings, Additive(damages), max_saved=most, min_similarity=-np.inf, max_states=max_states)
    return [damage_at(thin, s * total) / damage_at(exact, s * total) - 1 for s in (0.2, 0.35, 0.5, 0.65)]


def test_dominated_states_lose_nothing_that_is_best_for_its_saved_time_or_more() -> None:
    savings, damages = deep_choices(0, num_layers=6)
    total = sum(each[SKIP] for each in savings)
    exact = solve(savings, Additive(damages), max_saved=total, **EXACT)
    frontier = solve(savings, Additive(damages), max_saved=total, **{**EXACT, "drop_dominated": True})
    for saved in range(total + 1):
        assert damage_at(frontier, saved) == pytest.approx(damage_at(exact, saved))


def test_a_state_whose_similarity_is_no_number_is_dropped() -> None:
    savings: Savings = [{SKIP: 1, "int4": 2}, {SKIP: 1}]
    damages: Damages = [{SKIP: 0.1, "int4": float("nan")}, {SKIP: 0.1}]
    solution = solve(savings, Additive(damages), max_saved=3, min_similarity=0.5, max_states=8)
    assert [candidate.saved for candidate in solution.candidates] == [0, 1, 2]


def test_savings_in_units_of_the_whole() -> None:
    assert quantize([{FULL: 1.0, SKIP: 0.0}, {FULL: 3.0, SKIP: 0.0}]) == [{SKIP: 1024}, {SKIP: 3072}]
    assert quantize([{FULL: 1.0, "int4": 0.5}, {FULL: 3.0, "int4": 2.0}]) == [{"int4": 512}, {"int4": 1024}]
    assert quantize([{FULL: 1.0, "int4": 0.91, "int8": 2.0}]) == [{}], "hardly faster"
    assert quantize([{FULL: 1.0, "int4": 0.5, "pages": 0.8, "int4+pages": 0.48}]) == [{"int4": 2048, "pages": 819}]
    assert quantize([{FULL: 0.0, SKIP: 0.0}] * 2) == [{}, {}]
    offloaded = quantize([{FULL: s, SKIP: 0.0, "int4": s / 2} for s in [800.0] * 48 + [1.0] * 112])
    assert min(each["int4"] for each in offloaded[:48]) > 0
    assert offloaded[48:] == [{SKIP: 0}] * 112, "what saves nothing is not tried in several ways"


class _Histories:
    """States that remember what ran; counts the rows of every run."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, Choice, int]] = []

    def start(self) -> list[tuple[Any, ...]]:
        return [()]

    def run(self, sublayer: int, choice: Choice, states: Any) -> Any:
        self.runs.append((sublayer, choice, len(states)))
        return [(*state, (sublayer, choice)) for state in states]

    def vary(self, sublayer: int, choices: Sequence[Choice], states: Any) -> Any:
        raise AssertionError("drafts that are followed run exactly")

    def similarity(self, sublayer: int, states: Any) -> Any:
        return np.zeros(len(states))

    def gather(self, batches: Any, index: Any) -> Any:
        joined = [state for batch in batches for state in batch]
        return [joined[row] for row in index]

    def keep(self, batches: Sequence[Any]) -> None:
        pass


@pytest.mark.parametrize("seed", range(8))
def test_followed_drafts_end_in_their_own_states_and_share_their_past(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names: list[Choice] = [FULL, SKIP, "int4", "pages"]
    chances = rng.dirichlet(np.ones(4))
    drawn = rng.choice(4, (rng.integers(1, 9), 7), p=chances)
    patterns = [tuple(names[code] for code in row) for row in drawn.tolist()]
    histories = _Histories()
    ended = finished(follow(patterns, histories))
    assert ended == [tuple((i, choice) for i, choice in enumerate(one) if choice != SKIP) for one in patterns]
    expected = {
        (index, choice): len({one[:index] for one in patterns if one[index] == choice})
        for index in range(7)
        for choice in names
        if choice != SKIP and any(one[index] == choice for one in patterns)
    }
    assert {(index, choice): count for index, choice, count in histories.runs} == expected
    assert len(histories.runs) == len(expected)
