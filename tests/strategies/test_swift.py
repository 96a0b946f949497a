from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path

import pytest

from rayspec import demo
from rayspec.choices import SKIP, choices_of
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions
from rayspec.decode.search import Answer, Found, FoundDraft, Question, Trial
from rayspec.decode.strategy import RoundPlan
from rayspec.local_engine import load_engine
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.mask_search import Keep
from rayspec.strategies.swift import Swift, SwiftSearch, odd_layers_skipped
from rayspec.types import ConfigError
from tests.demo_model import EOS, demo_prompts
from tests.engines import complete, tokens_of
from tests.exhaustive import few_of
from tests.families import greedy
from tests.strategy_cases import Asker, latency, result, state

WINDOW = 32


def _scores(search: SwiftSearch, scores: list[float]) -> list[bool]:
    return [search.observe(search.propose(), score) for score in scores]


def _found(keep: Keep, num_agreed: int, num_tokens: int = WINDOW) -> Found:
    return Found([FoundDraft(choices_of(keep), 0.9, num_agreed)], num_tokens, 0.25)


def _kept(trial: Trial) -> Keep:
    """Of a trial of one set."""
    (pattern,) = trial.patterns
    return tuple(choice != SKIP for choice in pattern)


def test_it_starts_by_skipping_odd_layers_but_never_the_last() -> None:
    skipped = [index for index, kept in enumerate(odd_layers_skipped(12)) if not kept]
    assert skipped == [2, 3, 6, 7], "of layers 0 to 5, layers 1 and 3"
    assert [index for index, kept in enumerate(odd_layers_skipped(10)) if not kept] == [2, 3, 6, 7]
    assert SwiftSearch(12).propose() == odd_layers_skipped(12)


@pytest.mark.parametrize(("num_layers", "ratio", "size"), [(32, 0.45, 27), (40, 0.5, 38), (4, 0.45, 1)])
def test_all_others_have_the_same_size_and_keep_the_first_and_last_layer(
    num_layers: int, ratio: float, size: int
) -> None:
    search = SwiftSearch(2 * num_layers, skip_ratio=ratio, suggest_every=5)
    rng = random.Random(0)
    _scores(search, [0.1])
    for _ in range(12):
        keep = search.propose()
        assert sum(not kept for kept in keep) == size
        assert all(keep[:2])
        assert all(keep[-2:])
        search.observe(keep, rng.random())


def test_only_a_higher_score_is_a_gain() -> None:
    search = SwiftSearch(16)
    assert _scores(search, [0.5, 0.4, 0.5, 0.6]) == [True, False, False, True]
    assert search.best_score == 0.6
    assert search.best != odd_layers_skipped(16)


def test_it_ends_above_the_wanted_score_and_not_at_it() -> None:
    search = SwiftSearch(16, max_score=0.75)
    _scores(search, [0.75])
    assert search.end is None
    _scores(search, [0.76])
    assert search.end == "a set agrees on 76.0% of the tokens"


def test_it_ends_after_so_many_tries_without_gain() -> None:
    search = SwiftSearch(16, max_tries_without_gain=4)
    _scores(search, [0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2])
    assert search.end is None
    _scores(search, [0.1])
    assert search.end == "4 sets were tried in vain"


def test_it_ends_after_so_many_tries_in_all() -> None:
    search = SwiftSearch(16, max_tries=6)
    _scores(search, [0.1, 0.2, 0.3, 0.4, 0.5])
    assert search.end is None
    _scores(search, [0.6])
    assert search.end == "6 sets were tried"


def test_where_nothing_is_left_to_skip_it_says_so() -> None:
    with pytest.raises(ConfigError, match="20% leave none to skip"):
        SwiftSearch(8, skip_ratio=0.2)


def test_one_set_a_round_is_tried_and_the_best_drafts() -> None:
    swift = Swift(SpeculationOptions(strategy="swift"), latency())
    agreed = iter([8, 4, 16, 31])

    def reply(question: Question) -> Answer:
        assert isinstance(question, Trial)
        return _found(_kept(question), next(agreed))

    here, asker = state(), Asker(reply)
    assert not swift.choose(here).plan.drafts
    records = []
    for number in range(4):
        assert swift.choose(here).capture
        records.append(swift.search(here, asker))
        assert len(asker.asked) == number + 1
    assert not swift.choose(here).capture
    assert swift.search(here, asker) is None
    trials = [question for question in asker.asked if isinstance(question, Trial)]
    assert {(len(trial.patterns), trial.num_tokens) for trial in trials} == {(1, WINDOW)}
    assert records[1] is None
    first, third, last = records[0], records[2], records[3]
    assert first is not None
    assert third is not None
    assert last is not None
    assert (first.plan.keep, first.plan.num_draft_tokens) == (odd_layers_skipped(8), 16)
    assert (third.plan.keep, third.optimise_s) == (_kept(trials[2]), 0.5), "with the time of the one in vain"
    assert (first.estimated_acceptance, third.estimated_acceptance) == (0.25, 0.5)
    assert first.predicted_tpt < third.predicted_tpt < last.predicted_tpt
    assert "96.9%" in last.reason
    assert swift.choose(here).plan is last.plan
    assert swift.choose(here).keep_drafting == DraftWhileSure(threshold=0.8)
    swift.observe(here, RoundPlan(plan=last.plan), result([5], [3]), 4, 0.5)
    swift.observe(here, RoundPlan(plan=third.plan), result([5], [0]), 1, 0.5)
    assert (last.num_tokens, last.num_accepted_tokens, last.num_tested_tokens) == (4, 3, 4)


def test_a_trial_that_was_cancelled_is_made_again_and_one_that_failed_too() -> None:
    swift = Swift(SpeculationOptions(strategy="swift"), latency())
    futures: list[Future[Answer]] = []
    asked: list[Question] = []

    def search(question: Question) -> Future[Answer]:
        asked.append(question)
        futures.append(Future())
        return futures[-1]

    here = state()
    swift.search(here, Asker(lambda question: _found(odd_layers_skipped(8), 10)))
    assert swift.search(here, lambda question: None) is None, "too few tokens yet"
    assert swift.search(here, search) is None
    futures[0].cancel()
    assert swift.search(here, search) is None
    assert swift.search(here, search) is None
    futures[1].set_exception(RuntimeError("the stage was busy"))
    assert swift.search(here, search) is None
    assert swift.search(here, search) is None
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]
    assert isinstance(asked[0], Trial)
    assert _kept(asked[0]) != odd_layers_skipped(8)
    futures[2].set_result(_found(_kept(asked[0]), 20))
    assert swift.search(here, search) is not None


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.mark.parametrize("gate", few_of([False, True], [True]))
def test_a_loaded_engine_finds_a_set_that_is_right_more_often_than_not(gate: bool, profiles: Path) -> None:
    config = EngineConfig(
        model=demo.model_path(),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        kv_cache_tokens=2048,
        profile_cache=str(profiles),
        speculation={"strategy": "swift", "gate": gate, "num_search_tokens": 16},  # type: ignore[arg-type]
    )
    prompts = demo_prompts(2, 12)
    engine = load_engine(config)
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=60))
    assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 60, eos=(EOS,))
    assert engine.stats.plans
    assert engine.stats.optimise_s > 0
    assert ("drafting is" in engine.stats.gate_reason) == gate
    if not gate:
        assert engine.stats.num_draft_tokens > 20
        assert engine.stats.plans[-1].estimated_acceptance > 0.5
