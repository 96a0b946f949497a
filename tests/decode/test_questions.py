"""Answers about tapped tokens, against what brute force, and transformers itself, say of the same tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rayspec.choices import FULL, SKIP, Choice, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.search import (
    Agreement,
    Answer,
    Cosine,
    Cosines,
    Feature,
    Features,
    Found,
    LayerKnapsack,
    PlanSearch,
    Question,
    Trial,
    answer,
)
from rayspec.decode.work import TappedToken
from rayspec.model.rows import RowSpan
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import Plan
from tests.engines import engine_with, random_plan, requests_for
from tests.families import cases, checkpoint, parts_of, reference

NUM_TOKENS = 6
NUM_SUBLAYERS = 8


@dataclass
class _Asked:
    """An engine in the middle of generation, with tokens that can be asked."""

    engine: Engine
    tokens: list[TappedToken]
    rows: list[RowSpan]

    def ask(self, question: Question) -> Answer:
        return self.engine.stages.search(self.tokens, self.rows, question).result()

    def try_out(self, keeps: Sequence[tuple[bool, ...]]) -> Found:
        found = self.ask(Trial(num_tokens=NUM_TOKENS, patterns=[choices_of(keep) for keep in keeps]))
        assert isinstance(found, Found)
        return found

    @property
    def search(self) -> PlanSearch:
        stages: Any = self.engine.stages
        search: PlanSearch = stages.plan_search(self.tokens, self.rows)
        return search

    def hidden_states(self, path: str) -> list[torch.Tensor]:
        """transformers' own at the tapped tokens: [hidden_size] after the final norm, each."""
        texts = {sequence.sequence_id: sequence.token_ids for sequence in self.engine._scheduler.running}
        states = []
        for token in self.tokens:
            ids = torch.tensor([texts[token.sequence_id][: token.position + 1]])
            states.append(reference(path)(ids, output_hidden_states=True).hidden_states[-1][0, -1])
        return states


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def path(request: Any) -> str:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def asked(path: str) -> _Asked:
    prompts = cases(path, (37, 3, 150), 16).prompts
    plan = Plan(choices=(FULL,) * NUM_SUBLAYERS, num_draft_tokens=2, source="all")
    engine = engine_with(parts_of(path), FixedPlan(plan, capture=True), max_num_seqs=3)
    for request in requests_for(prompts, SamplingParams(temperature=0, max_tokens=64)):
        engine.add(request)
    for _ in range(4):
        engine.step()
    sequences = {sequence.sequence_id: sequence for sequence in engine._scheduler.running}
    tokens = engine._planner.taps.tokens[-NUM_TOKENS:]
    return _Asked(engine, tokens, [sequences[token.sequence_id].rows(token.position, 1) for token in tokens])


@torch.inference_mode()
def test_a_trial_says_what_each_draft_alone_would_have_done(asked: _Asked) -> None:
    rng = random.Random(1)
    keeps = [random_plan(rng, NUM_SUBLAYERS, 1).keep for _ in range(28)]  # more rows than one piece of the head
    keeps += [(True,) * NUM_SUBLAYERS, (False,) * NUM_SUBLAYERS, keeps[0]]
    found = asked.try_out(keeps)
    assert [draft.choices for draft in found.drafts] == [choices_of(keep) for keep in keeps]
    assert found.num_tokens == NUM_TOKENS
    search, stages = asked.search, asked.engine.stages
    target = search._targets[-1, :, 0]
    assert search._next_tokens is not None
    for keep, draft in zip(keeps, found.drafts, strict=True):
        state = search.start()
        for index in range(NUM_SUBLAYERS):
            state = search.run(index, FULL, state) if keep[index] else state
        probabilities = stages.runner.head(state.view(1, NUM_TOKENS, -1)).softmax(-1)  # type: ignore[attr-defined]
        best, tokens = probabilities.max(-1)
        agrees = tokens == search._next_tokens
        cosine = torch.nn.functional.cosine_similarity(state[:, 0], target, dim=-1).mean()
        assert draft.similarity == pytest.approx(float(cosine), abs=1e-5)
        assert draft.num_agreed == int(agrees.sum())
        assert (draft.confidence is None) == (not agrees.any())
        assert (draft.missed_confidence is None) == bool(agrees.all())
        if draft.confidence is not None:
            assert draft.confidence == pytest.approx(float(best[agrees].mean()), abs=1e-5)
        if draft.missed_confidence is not None:
            assert draft.missed_confidence == pytest.approx(float(best[~agrees].mean()), abs=1e-5)
    assert found.drafts[-3].num_agreed == NUM_TOKENS
    assert found.drafts[0] == found.drafts[-1]
    assert len({draft.num_agreed for draft in found.drafts}) > 1


def test_the_drafts_of_a_layer_knapsack_are_as_similar_as_a_trial_says(asked: _Asked) -> None:
    found = asked.ask(LayerKnapsack(num_tokens=NUM_TOKENS, num_skipped=3))
    assert isinstance(found, Found)
    assert [draft.choices.count(SKIP) for draft in found.drafts] == [0, 2, 4, 6]
    assert all(draft.choices[0::2] == draft.choices[1::2] for draft in found.drafts)
    tried = asked.try_out([tuple(choice == FULL for choice in draft.choices) for draft in found.drafts])
    for draft, again in zip(found.drafts, tried.drafts, strict=True):
        assert draft.similarity == pytest.approx(again.similarity, abs=1e-5)
        assert draft.num_agreed == again.num_agreed
    one_less = [tuple(index // 2 != layer for index in range(NUM_SUBLAYERS)) for layer in range(4)]
    best = max(draft.similarity for draft in asked.try_out(one_less).drafts)
    assert found.drafts[1].similarity == pytest.approx(best, abs=1e-5), "one skipped layer is searched exhaustively"


def test_cosines_are_of_the_states_around_each_sublayer(asked: _Asked) -> None:
    found = asked.ask(Cosine(num_tokens=NUM_TOKENS))
    assert isinstance(found, Cosines)
    assert len(found.cosines) == NUM_SUBLAYERS
    stages: Any = asked.engine.stages
    for index, cosine in enumerate(found.cosines):
        expected = []
        for token in asked.tokens:
            before, after = stages.span._taps[token][index], stages.span._taps[token][index + 1]
            expected.append(float(before @ after / before.norm() / after.norm()))
        assert cosine == pytest.approx(np.mean(expected), abs=1e-5)
    assert len({round(cosine, 6) for cosine in found.cosines}) == NUM_SUBLAYERS


@torch.no_grad()
def test_a_feature_is_the_mean_of_the_last_hidden_states_of_transformers(asked: _Asked, path: str) -> None:
    features = asked.ask(Feature(num_tokens=NUM_TOKENS))
    assert isinstance(features, Features)
    expected = torch.stack(asked.hidden_states(path)).mean(0)
    assert features.vector == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_trial_of_another_models_drafts_is_refused(asked: _Asked) -> None:
    with pytest.raises(ValueError, match="8 choices"):
        asked.try_out([(True,) * 6])


@dataclass
class _Additive:
    """States whose similarity is the sum of what each skipped sublayer costs: a state is that sum."""

    costs: Sequence[float]
    rows: list[int] = field(default_factory=list)

    def start(self) -> NDArray[np.float64]:
        return np.zeros(1)

    def run(self, sublayer: int, choice: Choice, states: Any) -> Any:
        assert choice == FULL
        self.rows.append(len(states))
        return states + self.costs[sublayer]

    def vary(self, sublayer: int, choice: Choice, states: Any) -> Any:
        raise AssertionError("no draft here has cheaper choices")

    def similarity(self, sublayer: int, states: Any) -> Any:
        return states - sum(self.costs[: sublayer + 1])

    def gather(self, batches: Sequence[Any], index: NDArray[np.int64]) -> Any:
        return np.concatenate(batches)[index]

    def keep(self, batches: Sequence[Any]) -> None:
        pass

    def agreement(self, states: Any) -> Agreement:
        nothing = np.zeros(len(states))
        return Agreement(1, nothing.astype(np.int64), nothing, nothing)

    def cosines(self) -> list[float]:
        return []

    def feature(self) -> list[float]:
        return []


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_chosen_as_well_as_by_trying_all_sets_of_them(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randint(2, 7)
    costs = [rng.uniform(0.01, 1) for _ in range(2 * num_layers)]
    num_skipped = rng.randint(1, num_layers)
    question = LayerKnapsack(num_tokens=1, num_skipped=num_skipped)
    found = answer(question, _Additive(costs), num_sublayers=2 * num_layers, started=0.0)
    assert isinstance(found, Found)
    assert len(found.drafts) == num_skipped + 1
    of_layer = [costs[2 * layer] + costs[2 * layer + 1] for layer in range(num_layers)]
    for count, draft in enumerate(found.drafts):
        best = min(sum(chosen) for chosen in itertools.combinations(of_layer, count))
        skipped = [layer for layer in range(num_layers) if draft.choices[2 * layer] == SKIP]
        assert len(skipped) == count
        assert sum(of_layer[layer] for layer in skipped) == pytest.approx(best)
        assert draft.similarity == pytest.approx(-best)


def test_all_early_exits_together_cost_one_full_pass() -> None:
    tapped = _Additive([1.0] * 12)
    patterns = [choices_of([index < end for index in range(12)]) for end in range(2, 12, 2)]
    found = answer(Trial(num_tokens=1, patterns=patterns), tapped, num_sublayers=12, started=0.0)
    assert isinstance(found, Found)
    assert [draft.similarity for draft in found.drafts] == [-10, -8, -6, -4, -2]
    assert tapped.rows == [1] * 10
