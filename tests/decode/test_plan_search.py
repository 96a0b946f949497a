from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rayspec.choices import FULL, SKIP, Choice, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.search import PlanSearch
from rayspec.model.architecture import Decomposition
from rayspec.model.kv_cache import KVCache
from rayspec.model.rows import RowSpan, slots_between
from rayspec.planning.knapsack import follow, solve
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


def _slot(cache: KVCache, row: RowSpan, layer: int) -> int:
    """The slot that the row is written to in this layer."""
    runs = row.windowed if layer in cache.windowed_layers else row.runs
    return slots_between(runs, row.context, row.end)[0]


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
    states, inputs = follow([choices_of(keep) for keep in keeps], search), search.start()[:, 0]
    with torch.inference_mode():
        for at, row in enumerate(search.tokens):
            slots = {layer: _slot(runner.cache, row, layer) for layer in runner.cache.keys}
            for number, keep in enumerate(keeps):
                batch = runner.batch([row])
                saved = {k: v[:, slots[k]].clone() for k, v in runner.cache.keys.items()}
                values = {k: v[:, slots[k]].clone() for k, v in runner.cache.values.items()}
                drafted = runner.run(batch, inputs[at][None, None], choices=choices_of(keep))
                torch.testing.assert_close(states[at, number], drafted[0, 0], atol=1e-4, rtol=1e-4)
                for layer, key in saved.items():
                    runner.cache.keys[layer][:, slots[layer]] = key
                    runner.cache.values[layer][:, slots[layer]] = values[layer]


@pytest.fixture(scope="module")
def choosing() -> PlanSearch:
    """A search on the demo model, whose drafts have all choices; its contexts of about 200 tokens exceed the budgets of
    keys by far."""
    plan = Plan(choices=(FULL,) * 32, num_draft_tokens=3, source="all")
    return _search(demo_parts("float32", ("int8", "int4")), demo_prompts(2, 8), plan, 8, ALL_CHOICES)[0]


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
            cache = runner.cache
            saved = {
                index: (cache.keys[index][:, slot].clone(), cache.values[index][:, slot].clone())
                for index in cache.keys
            }
            for number, pattern in enumerate(patterns):
                drafted = runner.run(runner.batch([row]), inputs[at][None, None], choices=pattern)
                torch.testing.assert_close(states[at, number], drafted[0, 0], atol=2e-3, rtol=2e-3)
            for index, (keys, values) in saved.items():
                cache.keys[index][:, slot], cache.values[index][:, slot] = keys, values


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


def _saved(savings: Sequence[dict[Choice, int]], pattern: Sequence[Choice]) -> int:
    return sum(each.get(choice, 0) for each, choice in zip(savings, pattern, strict=True))
