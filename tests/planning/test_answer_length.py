from __future__ import annotations

import random

import pytest

from rayspec.planning.answer_length import AnswerLength
from rayspec.planning.constants import ANSWERS_HALF_LIFE


def test_without_an_end_the_limit_is_expected() -> None:
    length = AnswerLength()
    assert length.expected(256) == 256.0
    length.observe(num_tokens=1000, num_ends=0)
    assert length.expected(256) == 256.0
    assert length.expected(0) == 0.0


def test_short_answers_are_expected_after_short_answers() -> None:
    length = AnswerLength()
    for _ in range(20):
        length.observe(num_tokens=50, num_ends=1)
    assert length.expected(10_000) == pytest.approx(50)
    assert length.expected(50) == pytest.approx(50 * (1 - 0.98**50))
    assert length.expected(1) == pytest.approx(1)


def test_answers_under_way_count_so_those_that_end_first_do_not_bias() -> None:
    """Eight answers at a time, of 20 or 400 tokens. After some steps mostly short ones have ended."""
    length, rng = AnswerLength(), random.Random(0)
    left = [rng.choice([20, 400]) for _ in range(8)]
    for _ in range(200):
        left = [each - 1 for each in left]
        num_ends = left.count(0)
        length.observe(num_tokens=8, num_ends=num_ends)
        left = [each or rng.choice([20, 400]) for each in left]
    assert length.expected(100_000) > 100


def test_other_work_is_learned_in_a_few_half_lives() -> None:
    length = AnswerLength()
    for num_tokens in (10, 1000):
        for _ in range(round(6 * ANSWERS_HALF_LIFE)):
            length.observe(num_tokens=num_tokens, num_ends=1)
    assert 900 < length.expected(1_000_000) < 1000


def test_rounds_that_commit_nothing_say_nothing() -> None:
    length = AnswerLength()
    length.observe(num_tokens=0, num_ends=0)
    assert length.expected(7) == 7.0


def test_an_end_at_every_token() -> None:
    length = AnswerLength()
    length.observe(num_tokens=3, num_ends=3)
    assert length.expected(512) == 1.0
