from __future__ import annotations

from typing import Any

import pytest

from rayspec.choices import FULL, SKIP
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Cosine, Cosines
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies import asd as module
from rayspec.strategies.asd import ASD, without_similar_attention
from tests.strategy_cases import Asker, latency_model, round_of, run_rounds, state

COSINES = [0.99, 0.99, 0.97, 0.2, 0.90, 0.96, 0.951, 0.1]


def _asd(**options: Any) -> ASD:
    return ASD(SpeculationOptions(strategy="asd", max_draft_tokens=10, **options), latency_model(4))


def test_only_attention_above_the_threshold_is_left_out() -> None:
    is_attention = [True, False] * 4
    assert without_similar_attention(is_attention, COSINES, 0.95) == (SKIP, FULL, SKIP, FULL, FULL, FULL, SKIP, FULL)
    assert without_similar_attention(is_attention, COSINES, 0.97) == (SKIP, *(FULL,) * 7), "a threshold is not above"
    assert without_similar_attention(is_attention, COSINES, -1.0) == (SKIP, FULL) * 4
    assert without_similar_attention(is_attention, COSINES, 1.0) == (FULL,) * 8


def test_it_drafts_by_the_newest_cosines_and_looks_again() -> None:
    cosines = list(COSINES)
    asker, asd = Asker(lambda question: Cosines(list(cosines), 0.5)), _asd(search_interval=20, num_search_tokens=3)
    assert not asd.choose(state()).plan.drafts
    (record,) = run_rounds(asd, asker, 6)
    assert asker.asked == [Cosine(num_tokens=3)]
    plan = asd.choose(state()).plan
    assert [index for index, choice in enumerate(plan.choices) if choice == SKIP] == [0, 2, 6]
    assert (plan.num_draft_tokens, plan.source) == (10, "asd")
    assert (record.plan, record.optimise_s) == (plan, 0.5)
    assert run_rounds(asd, asker, 20) == [], "the same again is no news"
    assert asd.choose(state()).plan is plan
    cosines[4] = 0.99
    assert len(run_rounds(asd, asker, 25)) == 1
    assert [index for index, choice in enumerate(asd.choose(state()).plan.choices) if choice == SKIP] == [0, 2, 4, 6]


def test_where_all_attention_matters_it_does_not_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIMILAR", 0.995)
    asd = _asd()
    assert run_rounds(asd, Asker(lambda question: Cosines(COSINES, 0.5)), 30) == []
    assert not asd.choose(state()).plan.drafts


def test_it_gives_a_plan_up_when_attention_has_come_to_matter() -> None:
    cosines = list(COSINES)
    asker, asd = Asker(lambda question: Cosines(list(cosines), 0.5)), _asd(search_interval=1, num_search_tokens=1)
    run_rounds(asd, asker, 5)
    cosines[:] = [0.0] * 8
    (record,) = run_rounds(asd, asker, 5)
    assert not record.plan.drafts
    assert not asd.choose(state()).plan.drafts


def test_the_confidence_at_which_drafts_end_follows_the_acceptance() -> None:
    asd = _asd(draft_threshold=0.6)
    asker = Asker(lambda question: Cosines(COSINES, 0.5))
    run_rounds(asd, asker, 12)
    chosen = asd.choose(state())
    before = chosen.keep_drafting
    assert isinstance(before, DraftWhileSure)
    for _ in range(30):
        asd.observe(state(), chosen, round_of(chosen.plan, 0), 1, 1.0)
    after = asd.choose(state()).keep_drafting
    assert isinstance(after, DraftWhileSure)
    assert after.threshold > before.threshold
    assert before.threshold == pytest.approx(0.6, abs=0.02)
