from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from rayspec.choices import FULL, SKIP, Choice, choices_of, keys_of
from rayspec.config import SamplingParams
from rayspec.decode.search import PlanSearch
from rayspec.model.architecture import Decomposition
from rayspec.model.kv_arena import KVArena
from rayspec.model.rows import RowSpan, slots_between
from rayspec.planning.knapsack import Solution, follow, solve
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import ALL_CHOICES, engine_with, random_plan, requests_for, varied, ways_of
from tests.families import MATRIX, cases, checkpoint, parts_of


def _search(
    parts: Decomposition,
    prompts: list[list[int]],
    plan: Plan,
    num_steps: int,
    choices: Sequence[Choice] = (FULL, SKIP),
) -> tuple[PlanSearch, Any]:
    """A search in the middle of generation, and the runner it looks at."""
    strategy = FixedPlan(plan, capture=True)
    engine = engine_with(parts, strategy, max_num_seqs=len(prompts), max_model_len=1024, choices=choices)
    for request in requests_for(prompts, SamplingParams(temperature=0, max_tokens=64)):
        engine.add(request)
    for _ in range(num_steps):
        engine.step()
    stages: Any = engine.stages
    sequences = {sequence.sequence_id: sequence for sequence in engine._scheduler.running}
    tokens = engine._planner.taps.tokens[-6:]
    rows = [sequences[token.sequence_id].rows(token.position, 1) for token in tokens]
    return stages.plan_search(tokens, rows), stages.runner


def _slot(arena: KVArena, row: RowSpan, layer: int) -> int:
    """The slot that the row is written to in this layer."""
    runs = row.windowed if layer in arena.windowed_layers else row.runs
    return slots_between(runs, row.context, row.end)[0]


def _branch(search: PlanSearch, keep: tuple[bool, ...]) -> torch.Tensor:
    states = search.start()
    for index, kept in enumerate(keep):
        states = search.run(index, FULL, states) if kept else states
    return states


@pytest.mark.parametrize("family", MATRIX)
def test_a_branch_is_what_a_draft_of_one_token_computes(family: str) -> None:
    parts = parts_of(checkpoint(family))
    num_sublayers = len(parts.sublayers)
    prompts = cases(checkpoint(family), (1, 300, 37, 3, 150, 12, 70), 16).prompts[2:5]
    plan = Plan(choices=(FULL,) * num_sublayers, num_draft_tokens=2, source="all")
    search, runner = _search(parts, prompts, plan, 4)
    assert search.num_tokens == 6
    rng = random.Random(0)
    keeps = [random_plan(rng, num_sublayers, 1).keep for _ in range(10)]
    states = [_branch(search, keep) for keep in keeps]
    inputs = search.start()[:, 0]
    with torch.inference_mode():
        for at, row in enumerate(search.tokens):
            slots = {layer: _slot(runner.arena, row, layer) for layer in runner.arena.keys}
            for keep, state in zip(keeps, states, strict=True):
                batch = runner.batch([row])
                saved = {k: v[:, slots[k]].clone() for k, v in runner.arena.keys.items()}
                values = {k: v[:, slots[k]].clone() for k, v in runner.arena.values.items()}
                drafted = runner.run(batch, inputs[at][None, None], choices=choices_of(keep))
                torch.testing.assert_close(state[at, 0], drafted[0, 0], atol=1e-4, rtol=1e-4)
                for layer, key in saved.items():
                    runner.arena.keys[layer][:, slots[layer]] = key
                    runner.arena.values[layer][:, slots[layer]] = values[layer]


def test_many_branches_at_once_are_the_branches_one_by_one() -> None:
    parts = parts_of(checkpoint("gemma2"))
    prompts = cases(checkpoint("gemma2"), (1, 300, 37, 3, 150, 12, 70), 16).prompts[2:4]
    search, _ = _search(parts, prompts, Plan(choices=(FULL,) * 8, num_draft_tokens=2, source="all"), 4)
    start = search.start()
    ran = search.run(0, FULL, start)
    many = search.gather((ran, start), np.array([1, 0, 0]))
    assert torch.equal(many[:, :1], start)
    assert torch.equal(many[:, 1:2], ran)
    together = search.run(2, FULL, search.run(1, FULL, many))
    for at, one in enumerate((start, ran, ran)):
        alone = search.run(2, FULL, search.run(1, FULL, one))
        torch.testing.assert_close(together[:, at : at + 1], alone, atol=1e-5, rtol=1e-5)


def test_running_everything_is_the_target_itself() -> None:
    parts = demo_parts()
    search, _ = _search(parts, demo_prompts(2, 8), Plan(choices=(FULL,) * 32, num_draft_tokens=3, source="all"), 6)
    states = search.start()
    for index in range(32):
        states = search.run(index, FULL, states)
        assert search.similarity(index, states) == pytest.approx([1.0], abs=1e-5)
    assert search.agreement(states).num_agreed.tolist() == [search.num_tokens]
    worse = search.gather((states, search.start()), np.array([0, 1]))
    assert search.similarity(31, worse)[1] < 0.9
    assert search.agreement(worse).num_agreed[1] < search.num_tokens


@pytest.mark.parametrize("num_steps", [4, 12])
def test_the_knapsack_finds_nearly_what_brute_force_finds_on_the_demo_model(num_steps: int) -> None:
    """All 2^10 ways to skip sublayers of a window, against the search, at every budget."""
    parts = demo_parts()
    window = range(12, 22)
    search, _ = _search(
        parts, demo_prompts(2, 8), Plan(choices=(FULL,) * 32, num_draft_tokens=3, source="all"), num_steps
    )
    weights = [5 if index % 2 == 0 else 3 for index in range(32)]
    best = _brute_force(search, window, weights)
    solution = solve(
        [{SKIP: weight} if index in window else {} for index, weight in enumerate(weights)],
        search,
        max_saved=sum(weights[index] for index in window),
        min_similarity=0.0,
        max_states=16,
    )
    found = {one.saved: one.similarity for one in solution.candidates}
    assert found[0] == pytest.approx(1.0, abs=1e-5)
    shares = []
    for budget in range(5, sum(weights[index] for index in window) + 1):
        most_similar = max(similarity for weight, similarity in best.items() if budget - 4 <= weight <= budget)
        reached = max((s for weight, s in found.items() if weight >= budget - 4), default=0.0)
        shares.append(reached / most_similar)
    assert min(shares) >= 0.98
    assert np.mean(shares) >= 0.99
    for one in solution.candidates:
        whole = _branch(search, tuple(choice == FULL for choice in one.choices))
        assert search.similarity(31, whole)[0] == pytest.approx(one.similarity, abs=1e-4)


@pytest.fixture(scope="module")
def choosing() -> PlanSearch:
    """A search on the demo model, whose drafts have all choices; its contexts of about 200 tokens exceed the budgets of
    keys by far."""
    plan = Plan(choices=(FULL,) * 32, num_draft_tokens=3, source="all")
    return _search(demo_parts("float32", ("int8", "int4")), demo_prompts(2, 8), plan, 8, ALL_CHOICES)[0]


def _ways(search: PlanSearch) -> list[list[Choice]]:
    return [[one for one in ways if one not in (FULL, SKIP)] for ways in ways_of(search._runner.parts)]


def test_a_choice_varies_the_targets_own_states_exactly(choosing: PlanSearch) -> None:
    for index, ways in enumerate(_ways(choosing)):
        before, after = choosing._targets[index], choosing._targets[index + 1]
        for choice in ways:
            exact, full = choosing.run(index, choice, before), choosing.run(index, FULL, before)
            torch.testing.assert_close(choosing.vary(index, choice, full), exact, atol=1e-4, rtol=1e-4)
            assert not torch.allclose(exact, after, atol=1e-3), f"{choice} changes nothing in sublayer {index}"


def test_few_keys_and_copies_of_a_branch_are_those_of_a_draft(choosing: PlanSearch) -> None:
    """As `test_a_branch_is_what_a_draft_of_one_token_computes`, with all choices."""
    rng, runner = random.Random(1), choosing._runner
    everything = Plan(choices=(FULL,) * 32, num_draft_tokens=1, source="all")
    patterns = [varied(rng, everything, ways_of(runner.parts)).choices for _ in range(12)]
    states, inputs = follow(patterns, choosing), choosing.start()[:, 0]
    assert len({choice for pattern in patterns for choice in pattern}) == len(ALL_CHOICES) - 1
    with torch.inference_mode():
        for at, row in enumerate(choosing.tokens):
            slot = slots_between(row.runs, row.context, row.end)[0]
            arena = runner.arena
            saved = {
                index: (arena.keys[index][:, slot].clone(), arena.values[index][:, slot].clone())
                for index in arena.keys
            }
            for number, pattern in enumerate(patterns):
                drafted = runner.run(runner.batch([row]), inputs[at][None, None], choices=pattern)
                torch.testing.assert_close(states[at, number], drafted[0, 0], atol=2e-3, rtol=2e-3)
            for index, (keys, values) in saved.items():
                arena.keys[index][:, slot], arena.values[index][:, slot] = keys, values


def test_a_choice_changes_other_states_nearly_as_it_changes_the_targets(choosing: PlanSearch) -> None:
    rng = random.Random(2)
    guessed: dict[Choice, list[float]] = defaultdict(list)
    unvaried: dict[Choice, list[float]] = defaultdict(list)
    patterns = [tuple(rng.choice((FULL, FULL, FULL, SKIP)) for _ in range(32)) for _ in range(6)]
    states = choosing.gather([choosing.start()], np.zeros(len(patterns), np.int64))
    for index, ways in enumerate(_ways(choosing)):
        full = choosing.run(index, FULL, states)
        for choice in ways:
            exact = choosing.run(index, choice, states)
            guessed[choice] += cosine_similarity(choosing.vary(index, choice, full), exact, dim=-1).flatten().tolist()
            unvaried[choice] += cosine_similarity(full, exact, dim=-1).flatten().tolist()
        skipped = torch.tensor([pattern[index] == SKIP for pattern in patterns])
        states = torch.where(skipped[None, :, None], states, full)
    assert set(guessed) == set(ALL_CHOICES) - {FULL, SKIP}
    for choice, each in guessed.items():
        least = {"int8": 0.9999, "int4": 0.999}.get(choice, 0.98)
        assert np.mean(each) >= least
        if keys_of(choice) != "all":
            assert 1 - np.mean(each) < 0.6 * (1 - np.mean(unvaried[choice])), "better than no change at all"


# Units saved by each choice, of a sublayer that takes 10.
_ATTENTION: dict[Choice, int] = {SKIP: 10, "int4": 4, "window": 3}
_MLP: dict[Choice, int] = {SKIP: 10, "int4": 6, "int8": 4}


def _savings(window: range) -> list[dict[Choice, int]]:
    return [(_MLP if index % 2 else _ATTENTION) if index in window else {} for index in range(32)]


@pytest.mark.parametrize("window", [range(12, 17), pytest.param(range(23, 28), marks=pytest.mark.exhaustive)])
def test_a_search_with_four_choices_a_sublayer_finds_nearly_what_brute_force_finds(
    choosing: PlanSearch, window: range
) -> None:
    """All 4^5 drafts, each sublayer of them run exactly, against the search at every budget."""
    savings = _savings(window)
    patterns = list(itertools.product(*((FULL, *each) for each in savings)))
    similarity = choosing.similarity(31, follow(patterns, choosing))
    saved = np.asarray([_saved(savings, pattern) for pattern in patterns])
    solution = solve(savings, choosing, max_saved=50, min_similarity=0.0, max_states=16)
    truly = {one.saved: similarity[patterns.index(one.choices)] for one in solution.candidates}
    shares = [
        max((value for units, value in truly.items() if units >= budget), default=0.0)
        / similarity[saved >= budget].max()
        for budget in range(1, 51)
    ]
    assert min(shares) >= 0.98
    assert np.mean(shares) >= 0.99


def test_a_thinned_search_over_eight_sublayers_finds_nearly_what_the_whole_recurrence_finds(
    choosing: PlanSearch,
) -> None:
    savings = _savings(range(14, 22))
    exact = solve(
        savings, choosing, max_saved=80, min_similarity=-1.0, max_states=10**6, band=None, drop_dominated=False
    )
    thin = solve(savings, choosing, max_saved=80, min_similarity=0.0, max_states=16)
    best, found = (_by_saved(choosing, solution) for solution in (exact, thin))
    # 16 states are 5 units apart.
    near = [_best_from(found, budget - 4) / _best_from(best, budget) for budget in range(1, 81)]
    assert min(near) >= 0.98
    shares = [_best_from(found, budget) / _best_from(best, budget) for budget in range(1, 81)]
    assert np.mean(shares) >= 0.99


def _saved(savings: Sequence[dict[Choice, int]], pattern: Sequence[Choice]) -> int:
    return sum(each.get(choice, 0) for each, choice in zip(savings, pattern, strict=True))


def _by_saved(search: PlanSearch, solution: Solution) -> dict[int, float]:
    """The similarity of the candidates when each sublayer of them is run exactly."""
    states = follow([one.choices for one in solution.candidates], search)
    similarity = search.similarity(31, states).tolist()
    return {one.saved: value for one, value in zip(solution.candidates, similarity, strict=True)}


def _best_from(by_saved: dict[int, float], budget: int) -> float:
    return max((similarity for saved, similarity in by_saved.items() if saved >= budget), default=0.0)


def _brute_force(search: PlanSearch, window: range, weights: list[int]) -> dict[int, float]:
    """The best mean cosine at the end of the model, by skipped weight."""
    states = search.start()
    for index in range(window.start):
        states = search.run(index, FULL, states)
    skipped = np.zeros(1, np.int64)
    for index in window:
        ran = search.run(index, FULL, states)
        states = search.gather((ran, states), np.arange(2 * len(skipped)))
        skipped = np.concatenate([skipped, skipped + weights[index]])
    for index in range(window.stop, 32):
        states = search.run(index, FULL, states)
    assert len(skipped) == 2 ** len(window)
    best: dict[int, float] = {}
    for weight, similarity in zip(skipped.tolist(), search.similarity(31, states).tolist(), strict=True):
        best[weight] = max(best.get(weight, -1.0), similarity)
    assert len(set(itertools.islice(best, 100))) > 10
    return best
