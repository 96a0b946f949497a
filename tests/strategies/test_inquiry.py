from __future__ import annotations

from concurrent.futures import Future

import pytest

from rayspec.decode.search import Answer, Cosine, Cosines, Question
from rayspec.strategies.inquiry import Inquiry
from rayspec.types import RayspecError
from tests.decode.selecting import state

QUESTION = Cosine(num_tokens=4)
ANSWER = Cosines([0.5], 0.1)


class _Search:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[Answer]] = []

    def __call__(self, question: Question) -> Future[Answer] | None:
        self.futures.append(Future())
        return self.futures[-1]


def _after(inquiry: Inquiry, search: _Search, *, num_tokens: float = 1.0, batch: int = 1) -> Answer | None:
    """A round."""
    inquiry.observe(num_tokens)
    return inquiry.advance(state(batch), search, QUESTION)


@pytest.mark.parametrize(("batch", "num_rounds"), [(1, 4), (2, 2), (3, 2), (8, 1)])
def test_it_asks_when_as_many_new_tokens_were_tapped_as_the_question_is_about(batch: int, num_rounds: int) -> None:
    inquiry, search = Inquiry(100), _Search()
    assert not inquiry.wants_taps
    assert _after(inquiry, search, batch=batch) is None
    for _ in range(num_rounds):
        assert inquiry.wants_taps
        assert not search.futures
        _after(inquiry, search, batch=batch)
    assert len(search.futures) == 1
    assert not inquiry.wants_taps
    search.futures[0].set_result(ANSWER)
    assert _after(inquiry, search, batch=batch) is ANSWER
    assert not inquiry.wants_taps


def test_the_next_question_begins_an_interval_after_the_last_began() -> None:
    inquiry, search = Inquiry(30), _Search()
    answered_at = []
    for number in range(100):
        if search.futures and not search.futures[-1].done():
            search.futures[-1].set_result(ANSWER)
        if _after(inquiry, search, batch=4) is ANSWER:
            answered_at.append(number)
    assert answered_at == [2, 32, 62, 92]


def test_an_interval_of_one_token_asks_in_every_round() -> None:
    inquiry = Inquiry(1)
    answers = 0

    def at_once(question: Question) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(ANSWER)
        return future

    for _ in range(10):
        inquiry.observe(1.0)
        answers += inquiry.advance(state(4), at_once, QUESTION) is ANSWER
    assert answers == 9


def test_a_cancelled_question_is_asked_again_and_a_failed_one_is_not() -> None:
    inquiry, search = Inquiry(100), _Search()
    _after(inquiry, search, batch=4)
    _after(inquiry, search, batch=4)
    search.futures[0].cancel()
    assert _after(inquiry, search, batch=4) is None
    assert inquiry.wants_taps
    _after(inquiry, search, batch=4)
    assert len(search.futures) == 2
    search.futures[1].set_exception(RayspecError("gone"))
    for _ in range(20):
        assert _after(inquiry, search, batch=4) is None
    assert len(search.futures) == 2
    _after(inquiry, search, num_tokens=100, batch=4)
    assert inquiry.wants_taps


def test_while_there_are_too_few_tokens_it_goes_on_tapping() -> None:
    inquiry = Inquiry(100)
    for _ in range(3):
        inquiry.advance(state(4), lambda question: None, QUESTION)
        assert inquiry.wants_taps
