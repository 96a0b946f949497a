import itertools
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest

from rayspec.decode.drafting.lookup import AMBIGUOUS, SINGLE, UNANIMOUS, LookupRecord, match_classes
from rayspec.planning.acceptance import DraftUntilFound, DraftWhileWorth, best_lookup, survival
from rayspec.planning.learning import CalibrationCurve

WORTH = DraftWhileWorth(
    curve=CalibrationCurve(confidence=(0.0, 1.0), excess=(0.0, 0.0)), usual=0.8, rate=1.0, step_s=0.5, row_s=0.01
)


def matching(num_matched: int, num_tokens: int = 8, support: int = SINGLE) -> list[int]:
    """Evidence of tokens behind a match of so many."""
    return list(match_classes(num_matched, [support] * num_tokens))


def first_token(record: LookupRecord, num_matched: int, support: int = SINGLE) -> float:
    return survival(record.by_class, matching(num_matched, 1, support))[0]


def test_acceptance_is_learned_by_how_much_matched() -> None:
    record, rng = LookupRecord(), random.Random(0)
    before = first_token(record, 24)
    seen: dict[int, list[float]] = {3: [], 24: []}
    for _ in range(2000):
        for num_matched, right in ((3, 0.2), (24, 0.95)):
            record.observe(matching(num_matched), [1] * 8, [1 if rng.random() < right else 2 for _ in range(6)])
            seen[num_matched].append(first_token(record, num_matched))
    few, many = (sum(one[100:]) / len(one[100:]) for one in seen.values())
    assert few == pytest.approx(0.2, abs=0.08)
    assert many == pytest.approx(0.95, abs=0.03)
    assert many > before
    assert first_token(record, 10**6) == first_token(record, 24)


def test_text_copied_by_the_word_is_told_from_text_copied_by_the_page() -> None:
    """Words: what goes on for two tokens and no further, by a match of two that becomes one of four."""
    words, pages = LookupRecord(), LookupRecord()
    for _ in range(200):
        words.observe(matching(2), [1] * 8, [1, 1, 2])
        pages.observe(matching(2), [1] * 8, [1] * 9)
    assert survival(words.by_class, matching(2, 4)) == pytest.approx([1, 1, 0, 0], abs=0.1)
    assert survival(pages.by_class, matching(2, 8)) == pytest.approx([1] * 8, abs=0.15)


def test_places_that_go_on_otherwise_speak_against_a_token() -> None:
    record = LookupRecord()
    known = [first_token(record, 4, support) for support in (AMBIGUOUS, SINGLE, UNANIMOUS)]
    assert known == sorted(known)
    for _ in range(20):
        record.observe(matching(4, support=AMBIGUOUS), [1], [2])
        record.observe(matching(4, support=UNANIMOUS), [1], [1])
    assert first_token(record, 4, AMBIGUOUS) < 0.1
    assert first_token(record, 4, UNANIMOUS) > 0.95
    assert first_token(record, 4, SINGLE) == known[SINGLE]


def test_only_what_is_known_counts() -> None:
    """Of a plain round one token is known: it says nothing of the tokens after it."""
    record, other = LookupRecord(), LookupRecord()
    for _ in range(50):
        record.observe(matching(4), [1, 2, 3], [1])
        other.observe(matching(4), [1, 2, 3], [1, 9])
    assert first_token(record, 4) == first_token(other, 4) > 0.9
    assert first_token(record, 5) == first_token(LookupRecord(), 5)
    assert first_token(other, 5) < 0.1
    nothing = LookupRecord()
    nothing.observe(matching(4), [1], [])
    assert nothing.by_class == LookupRecord().by_class


@pytest.mark.parametrize("row_s", [0.001, 0.03, 0.2, 2.0])
def test_the_number_of_tokens_is_the_best_there_is(row_s: float) -> None:
    survivals = [list(accumulate([right] * count, mul)) for right, count in ((0.9, 16), (0.5, 3), (0.0, 0), (0.7, 10))]

    def seconds(taken: Sequence[int]) -> float:
        return 1.0 + row_s * sum(taken)

    def rate(lengths: Sequence[int]) -> float:
        tokens = [1 + sum(one[:length]) if length else 1.5 for one, length in zip(survivals, lengths, strict=True)]
        return sum(tokens) / seconds(lengths)

    lengths, found = best_lookup(survivals, seconds, committed_without=1.5)
    all_lengths = itertools.product(*(range(len(one) + 1) for one in survivals))
    best = max(rate(lengths) for lengths in all_lengths if any(lengths))
    assert found == pytest.approx(rate(lengths))
    assert found >= 0.9 * best


def test_weak_matches_of_a_batch_give_way_to_strong_ones() -> None:
    strong, weak = [0.95**count for count in range(1, 17)], [0.2**count for count in range(1, 17)]
    lengths, _ = best_lookup([strong, weak, []], lambda lengths: 1.0 + 0.1 * sum(lengths), committed_without=2.0)
    assert lengths[0] >= 8
    assert lengths[1:] == (0, 0), "the model can draft for these"
    assert best_lookup([weak], lambda lengths: 1.0 + 0.01 * sum(lengths))[0][0] in (1, 2)


def rule(*, right: float = 0.9, min_survival: float = 0.2, gain: float = 1.5) -> DraftUntilFound:
    by_class = (right,) * len(LookupRecord().by_class)
    return DraftUntilFound(worth=WORTH, by_class=by_class, min_survival=min_survival, drafting_gain=gain)


def test_where_nothing_is_found_the_draft_goes_on() -> None:
    assert rule().num_looked_up(0.9, []) == 0
    confidences = [[0.9, 0.9], [0.001]]
    assert rule()(confidences) == WORTH(confidences) == [True, False]


@pytest.mark.parametrize("min_survival", [0.01, 0.2, 0.5, 0.95])
def test_as_many_go_on_the_draft_as_are_worth_their_rows(min_survival: float) -> None:
    one = rule(min_survival=min_survival, gain=1.0)
    reached = [0.8 * 0.9**count for count in range(1, 17)]
    assert one.num_looked_up(0.8, matching(5, 16)) == sum(chance > min_survival for chance in reached)
    assert one.num_looked_up(0.4, matching(5, 16)) == sum(chance / 2 > min_survival for chance in reached)


def test_it_is_drafted_on_where_that_is_worth_more() -> None:
    """Two tokens at 0.5 and 0.25, less their rows, bring 0.35 of a token, and more on a draft that is as sound."""
    assert rule(right=0.5, gain=1.34).num_looked_up(1.0, matching(5, 16)) == 2
    assert rule(right=0.5, gain=1.36).num_looked_up(1.0, matching(5, 16)) == 0
    assert rule(right=0.5, gain=3.0).num_looked_up(1.0, matching(5, 16)) == 0
    assert rule(right=0.95, gain=3.0).num_looked_up(1.0, matching(5, 16)) == 16
