"""Plan searches over tapped tokens, against what drafts compute, what brute force finds, and transformers itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from benchmarks.device.host_reads import ReadCounter
from benchmarks.device.launches import LaunchRecorder
from rayspec.choices import FULL, SKIP, Choice, Choices, choices_of
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.round_planner import SEARCH_STEPS
from rayspec.decode.rounds import Head
from rayspec.decode.search import (
    Answer,
    Cosine,
    Feature,
    Found,
    Knapsack,
    LayerKnapsack,
    PlanSearch,
    Question,
    Trial,
    Values,
)
from rayspec.decode.stages import SpanRunner
from rayspec.decode.strategy import Ask, BatchState, Strategy
from rayspec.decode.work import TappedToken, TapsGoneError
from rayspec.model.fused import fuse
from rayspec.model.rows import RowSpan, slots_between
from rayspec.model.sublayers import Decomposition
from rayspec.planning.knapsack import finished, follow
from rayspec.strategies.fixed import FixedPlan
from rayspec.types import OutOfMemoryError, Plan, no_draft
from tests.demo_model import demo_parts, demo_prompts
from tests.engines import (
    ALL_CHOICES,
    RowClock,
    complete,
    engine_with,
    random_plan,
    requests_for,
    tiny_budgets,
    varied,
    ways_of,
)
from tests.families import cases, checkpoint, modules_of, parts_of, reference

NUM_TOKENS = 6
NUM_SUBLAYERS = 8
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@dataclass
class _Asked:
    """An engine in the middle of generation, with tokens that can be asked."""

    engine: Engine
    tokens: list[TappedToken]
    rows: list[RowSpan]

    @classmethod
    def of(
        cls, parts: Decomposition, prompts: list[list[int]], num_steps: int, choices: Sequence[Choice] = (FULL, SKIP)
    ) -> _Asked:
        plan = Plan(choices=(FULL,) * len(parts.sublayers), num_draft_tokens=3, source="all")
        engine = engine_with(parts, FixedPlan(plan, capture=True), max_num_seqs=len(prompts), choices=choices)
        for request in requests_for(prompts, SamplingParams(temperature=0, max_tokens=64)):
            engine.add(request)
        for _ in range(num_steps):
            engine.step()
        sequences = {sequence.sequence_id: sequence for sequence in engine._scheduler.running}
        tokens = engine._planner.tapped[-NUM_TOKENS:]
        return cls(engine, tokens, [sequences[token.sequence_id].rows(token.position, 1) for token in tokens])

    def ask(self, question: Question) -> Answer:
        asked = self.engine.stages.search(self.tokens, self.rows, question)
        while not asked.done():
            self.engine.stages.continue_search(1.0)
        found = asked.result()
        assert 0 < found.seconds < 10
        return found

    def try_out(self, patterns: Sequence[Choices]) -> Found:
        found = self.ask(Trial(num_tokens=NUM_TOKENS, patterns=patterns))
        assert isinstance(found, Found)
        return found

    @property
    def search(self) -> PlanSearch:
        stages: Any = self.engine.stages
        search: PlanSearch = stages.plan_search(self.tokens, self.rows)
        return search

    @torch.inference_mode()
    def require_drafts(self, patterns: Sequence[Choices], tolerance: float) -> None:
        """The states under these plans are those of drafts of one token."""
        search, runner = self.search, self.engine.stages.runner  # type: ignore[attr-defined]
        states, inputs = finished(follow(patterns, search)), search.start()[:, 0]
        for at, row in enumerate(search.tokens):
            slots = {
                layer: slots_between(
                    row.windowed if layer in runner.cache.windowed_layers else row.runs, row.context, row.end
                )[0]
                for layer in runner.cache.keys
            }
            saved = [
                (cached[layer], slot, cached[layer][:, slot].clone())
                for cached in (runner.cache.keys, runner.cache.values)
                for layer, slot in slots.items()
            ]
            for number, pattern in enumerate(patterns):
                drafted = runner.run(runner.batch([row]), inputs[at][None, None], choices=pattern)
                difference = states[at, number] - drafted[0, 0]
                assert difference.norm() < tolerance * drafted.norm()
            for cached, slot, content in saved:
                cached[:, slot] = content


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def path(request: Any) -> str:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def asked(path: str) -> _Asked:
    return _Asked.of(parts_of(path), cases(path, (37, 3, 150), 16).prompts, 4)


@pytest.fixture(scope="module")
def choosing() -> _Asked:
    """On the demo model, with all choices; its contexts of about 200 tokens exceed the budgets of keys by far."""
    return _Asked.of(demo_parts("float32", ("int8", "int4")), demo_prompts(2, 8), 8, ALL_CHOICES)


def _random_patterns(seed: int, number: int) -> list[Choices]:
    rng = random.Random(seed)
    return [choices_of(random_plan(rng, NUM_SUBLAYERS, 1).keep) for _ in range(number)]


def test_a_branch_is_what_a_draft_of_one_token_computes(asked: _Asked) -> None:
    assert asked.search.num_tokens == NUM_TOKENS
    asked.require_drafts(_random_patterns(0, 10), 1e-4)


def test_few_keys_and_copies_of_a_branch_are_those_of_a_draft(choosing: _Asked) -> None:
    rng, ways = random.Random(1), ways_of(choosing.search._runner.parts)
    everything = Plan(choices=(FULL,) * 32, num_draft_tokens=1, source="all")
    patterns = [varied(rng, everything, ways).choices for _ in range(12)]
    assert len({choice for pattern in patterns for choice in pattern}) == len(ALL_CHOICES) - 1
    choosing.require_drafts(patterns, 0.02)  # int4 copies round rows to bfloat16


@torch.inference_mode()
def test_a_trial_says_what_each_draft_alone_would_have_done(asked: _Asked) -> None:
    patterns = _random_patterns(1, 28)  # more rows than one piece of the head
    patterns += [(FULL,) * NUM_SUBLAYERS, (SKIP,) * NUM_SUBLAYERS, patterns[0]]
    found = asked.try_out(patterns)
    assert [draft.choices for draft in found.drafts] == patterns
    assert found.num_tokens == NUM_TOKENS
    search, stages = asked.search, asked.engine.stages
    assert search._next_tokens is not None
    states = finished(follow(patterns, search))
    for number, draft in enumerate(found.drafts):
        state = states[:, number]
        best, tokens = stages.runner.head(state[None]).softmax(-1).max(-1)  # type: ignore[attr-defined]
        agrees = tokens == search._next_tokens
        cosine = cosine_similarity(state, search._targets[-1, :, 0], dim=-1).mean()
        assert draft.similarity == pytest.approx(float(cosine), abs=1e-5)
        assert draft.num_agreed == int(agrees.sum())
        for told, those in ((draft.confidence, agrees), (draft.missed_confidence, ~agrees)):
            assert told == (pytest.approx(float(best[those].mean()), abs=1e-5) if those.any() else None)
    assert found.drafts[-3].num_agreed == NUM_TOKENS
    assert found.drafts[0] == found.drafts[-1]
    assert len({draft.num_agreed for draft in found.drafts}) > 1
    with pytest.raises(ValueError, match="8 choices"):
        asked.try_out([(FULL,) * 6])


def test_the_drafts_of_a_layer_knapsack_are_as_similar_as_a_trial_says(asked: _Asked) -> None:
    found = asked.ask(LayerKnapsack(num_tokens=NUM_TOKENS, num_skipped=3))
    assert isinstance(found, Found)
    assert [draft.choices.count(SKIP) for draft in found.drafts] == [0, 2, 4, 6]
    assert all(draft.choices[0::2] == draft.choices[1::2] for draft in found.drafts)
    tried = asked.try_out([draft.choices for draft in found.drafts])
    for draft, again in zip(found.drafts, tried.drafts, strict=True):
        assert draft.similarity == pytest.approx(again.similarity, abs=1e-5)
        assert draft.num_agreed == again.num_agreed


def _knapsack(num_sublayers: int) -> Knapsack:
    of_attention: dict[Choice, int] = {SKIP: 6, "int4": 3, "int8": 1, "window": 2, "int4+window": 4}
    of_mlp: dict[Choice, int] = {SKIP: 6, "int4": 3}
    return Knapsack(
        num_tokens=NUM_TOKENS,
        savings=[of_attention, of_mlp] * (num_sublayers // 2),
        max_saved=5 * num_sublayers,
        min_similarity=-1.0,
        max_states=8,
        also=[one * (num_sublayers // 2) for one in (("int4", "int4"), ("window", FULL), (FULL, "int4"))],
    )


def test_drafts_of_a_knapsack_are_nearly_those_of_a_trial(choosing: _Asked) -> None:
    """Other choices than full and skip are derived from the target's states."""
    question = _knapsack(32)
    found = choosing.ask(question)
    assert isinstance(found, Found)
    assert [one.choices for one in found.drafts[-3:]] == list(question.also)
    assert any(len(set(one.choices)) > 2 for one in found.drafts[:-3])
    tried = choosing.try_out([one.choices for one in found.drafts])
    useful = [pair for pair in zip(found.drafts, tried.drafts, strict=True) if pair[1].similarity > 0.5]
    assert len(useful) > 5
    for draft, again in useful:
        assert draft.similarity == pytest.approx(again.similarity, abs=0.1)
        assert abs(draft.num_agreed - again.num_agreed) <= 1


def test_a_search_launches_few_operations_and_reads_one_result_a_sublayer() -> None:
    """On a GPU, launches and reads are the cost of a search. All its sublayers share the packed rows."""
    path = checkpoint("llama")
    parts = fuse(modules_of(path), use_operators=True, quantised=("int8", "int4"))
    with tiny_budgets():
        asked = _Asked.of(parts, cases(path, (150,), 16).prompts, 8, ALL_CHOICES)
    launches, reads = LaunchRecorder(), ReadCounter(torch.device("cpu"))
    with torch.no_grad(), launches, reads:
        found = asked.ask(_knapsack(NUM_SUBLAYERS))
    assert isinstance(found, Found)
    assert {choice for one in found.drafts for choice in one.choices} >= {SKIP, "int4", "window"}
    assert len(launches.launches) < 80 * NUM_SUBLAYERS
    assert reads.counts["numpy"] == NUM_SUBLAYERS + 1, "similarities, and the agreement"


def _slowly_searching(
    strategy: Strategy, sublayer_s: float, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int = 2
) -> tuple[Engine, RowClock]:
    """Each sublayer of a search takes seconds by the engine's clock, as each row of a pass takes one."""
    run, clock = PlanSearch.run, RowClock()

    def slow(search: PlanSearch, sublayer: int, choice: Choice, states: Any) -> torch.Tensor:
        clock.now_s += sublayer_s
        return run(search, sublayer, choice, states)

    monkeypatch.setattr(PlanSearch, "run", slow)
    parts = parts_of(checkpoint("llama"))
    return engine_with(parts, strategy, wrap=clock.count, clock=clock, max_num_seqs=max_num_seqs), clock


class _Asking(FixedPlan):
    """Asks once, and never drafts."""

    def __init__(self, question: Question) -> None:
        super().__init__(no_draft(NUM_SUBLAYERS, "asking"), capture=True)
        self._question = question
        self.asked: Future[Answer] | None = None

    def search(self, state: BatchState, ask: Ask) -> None:
        self.asked = self.asked or ask(self._question)


@pytest.mark.parametrize("sublayer_s", [0.5, 10.0])
def test_a_search_holds_up_no_round_for_long(sublayer_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of two sequences takes two seconds, and the search four or eighty."""
    strategy = _Asking(Trial(num_tokens=NUM_TOKENS, patterns=[(FULL,) * NUM_SUBLAYERS]))
    engine, clock = _slowly_searching(strategy, sublayer_s, monkeypatch)
    for request in requests_for(cases(checkpoint("llama"), (5, 7), 16).prompts, LONG):
        engine.add(request)
    engine.step()
    durations = []
    while strategy.asked is None or not strategy.asked.done():
        began = clock()
        engine.step()
        durations.append(clock() - began)
    assert max(durations) <= (1 + SEARCH_STEPS) * 2.0 + 2 * sublayer_s
    assert strategy.asked.result().seconds == sublayer_s * NUM_SUBLAYERS
    assert engine.stats.optimise_s == pytest.approx(sublayer_s * NUM_SUBLAYERS)


def test_a_search_ends_with_its_own_sequences_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of one sequence are asked about; the other ends first."""
    strategy = _Asking(Trial(num_tokens=1, patterns=[(FULL,) * NUM_SUBLAYERS]))
    engine, _ = _slowly_searching(strategy, 5.0, monkeypatch)
    for request in requests_for(cases(checkpoint("llama"), (5, 7), 16).prompts, LONG):
        engine.add(request)
    while strategy.asked is None:
        engine.step()
    _, own, _ = engine._planner.tapped[-1].sequence_id.split("/")
    other = {"0": "1", "1": "0"}[own]
    engine.abort(other)
    engine.step()
    assert not strategy.asked.cancelled()
    engine.abort(own)
    assert strategy.asked.cancelled()


def test_where_all_sequences_are_short_a_search_takes_more_time_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rounds of one second for each sequence, and a search of 80 seconds."""
    num_asked = 0

    class Insisting(_Asking):
        def search(self, state: BatchState, ask: Ask) -> None:
            nonlocal num_asked
            if self.asked is None or self.asked.cancelled():
                self.asked = ask(self._question)
                num_asked += self.asked is not None

    strategy = Insisting(Trial(num_tokens=2, patterns=[(FULL,) * NUM_SUBLAYERS]))
    engine, _ = _slowly_searching(strategy, 10.0, monkeypatch, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    complete(engine, [cases(checkpoint("llama"), (5, 7), 16).prompts[0]] * 8, params)
    assert strategy.asked is not None
    assert strategy.asked.done()
    assert not strategy.asked.cancelled()
    assert 1 < num_asked < 8


def test_a_search_that_finds_no_memory_fails_alone(asked: _Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpanRunner, "search", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    found = asked.engine.stages.search(asked.tokens, asked.rows, Cosine(num_tokens=NUM_TOKENS))
    assert isinstance(found.exception(0), OutOfMemoryError)


def test_cosines_are_of_the_states_around_each_sublayer(asked: _Asked) -> None:
    found = asked.ask(Cosine(num_tokens=NUM_TOKENS))
    assert isinstance(found, Values)
    stages: Any = asked.engine.stages
    for index, cosine in enumerate(found.values):
        states = [stages.span._taps[token][index : index + 2] for token in asked.tokens]
        expected = [float(cosine_similarity(before, after, dim=0)) for before, after in states]
        assert cosine == pytest.approx(np.mean(expected), abs=1e-5)
    assert len({round(cosine, 6) for cosine in found.values}) == NUM_SUBLAYERS


@torch.no_grad()
def test_a_feature_is_the_mean_of_the_last_hidden_states_of_transformers(asked: _Asked, path: str) -> None:
    features = asked.ask(Feature(num_tokens=NUM_TOKENS))
    assert isinstance(features, Values)
    texts = {sequence.sequence_id: sequence.token_ids for sequence in asked.engine._scheduler.running}
    states = []
    for token in asked.tokens:
        ids = torch.tensor([texts[token.sequence_id][: token.position + 1]])
        states.append(reference(path)(ids, output_hidden_states=True).hidden_states[-1][0, -1])
    assert features.values == pytest.approx(torch.stack(states).mean(0).tolist(), abs=1e-4)


def test_what_follows_captured_tokens_is_kept_of_the_newest_only() -> None:
    head = Head(lambda hidden: hidden, vocab_size=4, device=torch.device("cpu"), verification="coupled", num_taps=2)
    tokens = [TappedToken("1", position) for position in range(3)]
    head.note_taps(list(enumerate(tokens)), torch.eye(3, 4))
    assert head.next_tokens(tokens[1:]).tolist() == [1, 2]
    with pytest.raises(TapsGoneError):
        head.next_tokens(tokens)
