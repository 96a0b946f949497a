from typing import Any

import pytest

from rayspec.choices import FULL
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, FoundDraft, Question, Trial
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.dynamic_exit import DEL, ExitRecord, early_exits
from rayspec.types import ConfigError
from tests.strategy_cases import Asker, latency_model, run_rounds, state

NUM_LAYERS = 6


def _del(max_draft_tokens: int = 8, **options: Any) -> DEL:
    speculation = SpeculationOptions(strategy="del", max_draft_tokens=max_draft_tokens, **options)
    return DEL(speculation, latency_model(NUM_LAYERS))


def _replies(shares: list[float], confidence: float = 0.9, missed: float = 0.3) -> Any:
    """So large a share of the tokens agrees at each exit."""

    def reply(question: Question) -> Answer:
        assert isinstance(question, Trial)
        count = question.num_tokens
        drafts = [
            FoundDraft(pattern, 0.5, round(share * count), confidence if share else None, missed if share < 1 else None)
            for pattern, share in zip(question.patterns, shares, strict=True)
        ]
        return Found(drafts, count, 0.25)

    return reply


def test_by_latency_what_layers_take_decides() -> None:
    """Seconds of a draft step: two a layer; of a verify: twelve, less those that were drafted already."""
    shares = [0.5, 0.5, 0.75, 1.0, 1.0]
    chooser = _del(num_search_tokens=8, max_draft_tokens=4)
    (record,) = run_rounds(chooser, Asker(_replies(shares)), 9)
    ways = {
        (layer, length): sum(shares[layer - 1] ** count for count in range(length + 1)) / (2 * layer * length + 12)
        for layer in range(1, NUM_LAYERS)
        for length in range(1, 5)
    }
    layer, length = max(ways, key=lambda way: ways[way])
    assert (record.plan.choices.count(FULL), record.plan.num_draft_tokens) == (2 * layer, length)
    assert record.predicted_tpt == pytest.approx(ways[layer, length])
    assert record.plain_tpt == pytest.approx(1 / 12)
    assert record.estimated_acceptance == shares[layer - 1]


def test_looking_every_round_costs_the_rows_that_the_verify_could_have_reused() -> None:
    """Drafts of four tokens by five of six layers: 5 in 40 + 16 s or, all rows anew, in 40 + 36 s; plain: 1 in 12 s."""
    shares = [0.0, 0.0, 0.0, 0.0, 1.0]
    for interval, drafts in ((1, False), (8, True)):
        options = SpeculationOptions(strategy="del", max_draft_tokens=4, search_interval=interval)
        chooser = DEL(options, latency_model(NUM_LAYERS, row_s=0.5))
        records = run_rounds(chooser, Asker(_replies(shares)), 9)
        assert chooser.choose(state()).plan.drafts == drafts
        if drafts:
            assert records[0].predicted_tpt == pytest.approx(5 / 56)


def test_it_first_looks_at_some_tokens_and_then_at_the_newest_of_each_sequence() -> None:
    asker, chooser = Asker(_replies([0.0, 0.5, 1.0, 1.0, 1.0])), _del(num_search_tokens=8)
    run_rounds(chooser, asker, 7, batch=3)
    asked = [question for question in asker.asked if isinstance(question, Trial)]
    assert [question.num_tokens for question in asked] == [8, 3, 3, 3], "three rounds to tap the first eight"
    assert all(list(question.patterns) == early_exits(2 * NUM_LAYERS) for question in asked)


def test_the_record_fades_look_by_look() -> None:
    record = ExitRecord(2, memory=0.5)
    patterns = early_exits(6)
    record.observe([FoundDraft(patterns[0], 0.1, 1, 0.8, 0.2), FoundDraft(patterns[1], 0.1, 4, 0.9, None)], 4)
    assert record.acceptance == pytest.approx([0.25, 1.0])
    assert record.threshold(0) == pytest.approx((0.8 + 0.2) / 2)
    assert record.threshold(1) is None, "no miss"
    record.observe([FoundDraft(patterns[0], 0.1, 2, 0.6, None), FoundDraft(patterns[1], 0.1, 0, None, 0.4)], 2)
    assert record.acceptance == pytest.approx([(0.5 * 1 + 2) / 4, (0.5 * 4 + 0) / 4])
    assert record.threshold(0) == pytest.approx(((0.5 * 0.8 + 2 * 0.6) / 2.5 + 0.2) / 2)
    assert record.threshold(1) == pytest.approx((0.9 + 0.4) / 2)
    assert ExitRecord(2, memory=0.5).threshold(0) is None


def test_drafts_end_between_the_confidence_of_matches_and_misses() -> None:
    chooser = _del(num_search_tokens=8)
    run_rounds(chooser, Asker(_replies([0.0, 0.875, 0.875, 0.875, 0.875], confidence=0.9, missed=0.3)), 9)
    assert chooser.choose(state()).plan.drafts
    rule = chooser.choose(state()).keep_drafting
    assert isinstance(rule, DraftWhileSure)
    assert rule.threshold == pytest.approx(0.6)


def test_a_model_of_one_layer_has_no_exits() -> None:
    with pytest.raises(ConfigError, match="2 layers or more"):
        DEL(SpeculationOptions(strategy="del"), latency_model(1))
