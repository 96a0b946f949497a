"""Strategies that ask at an interval: when they ask, by ASD, and what CLaSp and ASD make of the answers."""

from concurrent.futures import Future
from typing import Any

import pytest

from rayspec.choices import FULL, SKIP, Choices, choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Cosine, Found, FoundDraft, LayerKnapsack, Question, Values
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.asd import ASD
from rayspec.strategies.clasp import CLaSp
from rayspec.strategies.periodic import PeriodicStrategy
from rayspec.types import PlanRecord, RayspecError
from tests.strategy_cases import Asker, latency_model, round_of, run_round, run_rounds, state

COSINES = [0.99, 0.99, 0.97, 0.2, 0.90, 0.96, 0.951, 0.1]


class _Later:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[Answer]] = []

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        self.asked.append(Future())
        return self.asked[-1]


def _asd(interval: int = 100, num_tokens: int = 4, **options: Any) -> ASD:
    values = {"search_interval": interval, "num_search_tokens": num_tokens, "max_draft_tokens": 10, **options}
    return ASD(SpeculationOptions(strategy="asd", **values), latency_model(4))


def _clasp(num_layers: int = 6, **options: Any) -> CLaSp:
    return CLaSp(SpeculationOptions(strategy="clasp", max_draft_tokens=10, **options), latency_model(num_layers))


def _choices(strategy: PeriodicStrategy) -> Choices:
    return strategy.choose(state()).plan.choices


@pytest.mark.parametrize(("batch", "num_rounds"), [(1, 4), (3, 2), (8, 1)])
def test_it_asks_when_as_many_new_tokens_were_captured_as_the_question_is_about(batch: int, num_rounds: int) -> None:
    asd, later = _asd(), _Later()
    assert not asd.choose(state()).capture
    run_round(asd, later, batch=batch)
    for _ in range(num_rounds):
        assert asd.choose(state()).capture
        assert not later.asked
        run_round(asd, later, batch=batch)
    assert len(later.asked) == 1
    assert not asd.choose(state()).capture
    later.asked[0].set_result(Values(COSINES, 0.1))
    assert run_round(asd, later, batch=batch) is not None
    assert not asd.choose(state()).capture


def test_a_cancelled_question_is_asked_again_and_a_failed_one_is_not() -> None:
    asd, later = _asd(), _Later()

    def rounds(count: int) -> PlanRecord | None:
        return [run_round(asd, later, batch=4) for _ in range(count)][-1]

    rounds(2)
    later.asked[0].cancel()
    assert rounds(1) is None
    assert asd.choose(state()).capture
    rounds(1)
    assert len(later.asked) == 2
    later.asked[1].set_exception(RayspecError("gone"))
    assert rounds(20) is None
    assert len(later.asked) == 2
    rounds(100)
    assert len(later.asked) == 3


def test_asd_drafts_by_the_newest_cosines_and_not_at_all_where_all_attention_matters() -> None:
    cosines = list(COSINES)
    asker, asd = Asker(lambda question: Values(list(cosines), 0.5)), _asd(20, 3)
    assert not asd.choose(state()).plan.drafts
    (record,) = run_rounds(asd, asker, 6)
    assert asker.asked == [Cosine(num_tokens=3)]
    plan = asd.choose(state()).plan
    assert plan.choices == choices_of([index not in (0, 2, 6) for index in range(8)])
    assert (plan.num_draft_tokens, plan.source) == (10, "asd")
    assert (record.plan, record.optimise_s) == (plan, 0.5)
    assert run_rounds(asd, asker, 20) == [], "the same again is no news"
    assert asd.choose(state()).plan is plan
    cosines[4] = 0.99
    assert len(run_rounds(asd, asker, 25)) == 1
    assert _choices(asd) == choices_of([index not in (0, 2, 4, 6) for index in range(8)])
    cosines[:] = [0.0] * 8
    (record,) = run_rounds(asd, asker, 25)
    assert not record.plan.drafts
    assert not asd.choose(state()).plan.drafts


def test_asd_ends_drafts_at_a_confidence_that_follows_the_acceptance() -> None:
    asd = _asd(draft_threshold=0.6)
    run_rounds(asd, Asker(lambda question: Values(COSINES, 0.5)), 12)
    chosen = asd.choose(state())
    for _ in range(30):
        asd.observe(state(), chosen, round_of(chosen.plan, 0), 1, 1.0)
    before, after = chosen.keep_drafting, asd.choose(state()).keep_drafting
    assert isinstance(before, DraftWhileSure)
    assert isinstance(after, DraftWhileSure)
    assert after.threshold > before.threshold == pytest.approx(0.6, abs=0.02)


def test_clasp_asks_for_the_newest_token_and_takes_the_draft_that_skips_most() -> None:
    def found(question: Question) -> Answer:
        """The first layers are what can best be skipped; fewer skipped ones agree more."""
        assert isinstance(question, LayerKnapsack)
        drafts = [
            FoundDraft(choices_of([index >= 2 * count for index in range(12)]), 1 - count / 10, int(count < 3))
            for count in range(question.num_skipped + 1)
        ]
        return Found(drafts, question.num_tokens, 0.25)

    asker, clasp = Asker(found), _clasp()
    assert not clasp.choose(state()).plan.drafts
    (record,) = run_rounds(clasp, asker, 5)
    assert asker.asked == [LayerKnapsack(num_tokens=1, num_skipped=3)], "half of the layers"
    plan = clasp.choose(state()).plan
    assert plan.choices == (SKIP,) * 6 + (FULL,) * 6
    assert (plan.num_draft_tokens, plan.source) == (10, "clasp")
    assert record.plan is plan
    assert record.optimise_s == 0.25
    assert 0 < record.estimated_acceptance < 1
    assert record.plain_tpt == pytest.approx(1 / 12)
    assert record.num_tokens == 3, "the rounds by the plan"


def test_clasp_ends_drafts_at_the_confidence_of_the_options() -> None:
    assert _clasp().choose(state()).keep_drafting == DraftWhileSure(threshold=0.7)
    rule = _clasp(draft_threshold=0.4).choose(state()).keep_drafting
    assert rule is not None
    assert rule([[0.1, 0.5], [0.9, 0.3], [0.4]]) == [True, False, True]
