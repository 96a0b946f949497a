from __future__ import annotations

import itertools
from typing import Any

import pytest

from rayspec.choices import FULL, SKIP, choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, FoundDraft, LayerKnapsack, Question
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.clasp import CLaSp
from tests.strategy_cases import Asker, latency_model, run_round, run_rounds, state


def _clasp(num_layers: int = 6, **options: Any) -> CLaSp:
    return CLaSp(SpeculationOptions(strategy="clasp", max_draft_tokens=10, **options), latency_model(num_layers))


def _found(question: Question) -> Answer:
    """The first layers are what can best be skipped; fewer skipped ones agree more."""
    assert isinstance(question, LayerKnapsack)
    return Found(
        [
            FoundDraft(choices_of([index >= 2 * count for index in range(12)]), 1 - count / 10, int(count < 3))
            for count in range(question.num_skipped + 1)
        ],
        question.num_tokens,
        0.25,
    )


def test_the_newest_token_is_asked_and_the_draft_that_skips_most_is_taken() -> None:
    asker, clasp = Asker(_found), _clasp()
    assert not clasp.choose(state()).plan.drafts
    (record,) = run_rounds(clasp, asker, 5)
    assert asker.asked == [LayerKnapsack(num_tokens=1, num_skipped=3)]
    plan = clasp.choose(state()).plan
    assert plan.choices == (SKIP,) * 6 + (FULL,) * 6
    assert (plan.num_draft_tokens, plan.source) == (10, "clasp")
    assert record.plan is plan
    assert record.optimise_s == 0.25
    assert 0 < record.estimated_acceptance < 1
    assert record.plain_tpt == pytest.approx(1 / 12)
    assert record.num_tokens == 3, "the rounds by the plan"


@pytest.mark.parametrize(("num_layers", "num_skipped"), [(6, 3), (7, 3), (80, 40), (1, 1)])
def test_half_of_the_layers_are_skipped(num_layers: int, num_skipped: int) -> None:
    asker = Asker(lambda question: Found([FoundDraft((SKIP, SKIP) * num_layers, 0.5, 0)], 1, 0.0))
    run_rounds(_clasp(num_layers), asker, 2)
    assert asker.asked == [LayerKnapsack(num_tokens=1, num_skipped=num_skipped)]


def test_it_searches_again_at_its_interval_of_tokens_of_one_sequence() -> None:
    asker, clasp = Asker(_found), _clasp(search_interval=32)
    clasp_rounds = [run_round(clasp, asker, batch=4, num_accepted=1) is not None for _ in range(60)]
    searched = [number for number, found in enumerate(clasp_rounds) if found]
    assert searched[0] == 1
    assert [later - earlier for earlier, later in itertools.pairwise(searched)] == [17, 16, 16]


def test_drafts_end_at_the_confidence_of_the_options() -> None:
    assert _clasp().choose(state()).keep_drafting == DraftWhileSure(threshold=0.7)
    rule = _clasp(draft_threshold=0.4).choose(state()).keep_drafting
    assert rule is not None
    assert rule([[0.1, 0.5], [0.9, 0.3], [0.4]]) == [True, False, True]
