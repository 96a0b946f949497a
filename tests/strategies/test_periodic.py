"""When questions are asked, by ASD: its question is about four tokens."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Cosines, Question
from rayspec.strategies.asd import ASD
from rayspec.types import PlanRecord, RayspecError
from tests.strategy_cases import latency_model, run_round, state

ANSWER = Cosines([0.99, 0.1] * 4, 0.1)


class _Later:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[Answer]] = []

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        self.asked.append(Future())
        return self.asked[-1]


def _asd(interval: int = 100) -> ASD:
    return ASD(SpeculationOptions(strategy="asd", search_interval=interval, num_search_tokens=4), latency_model(4))


@pytest.mark.parametrize(("batch", "num_rounds"), [(1, 4), (2, 2), (3, 2), (8, 1)])
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
    later.asked[0].set_result(ANSWER)
    assert run_round(asd, later, batch=batch) is not None
    assert not asd.choose(state()).capture


def test_the_next_question_begins_an_interval_after_the_last_began() -> None:
    asd, later = _asd(30), _Later()
    for _ in range(100):
        if later.asked and not later.asked[-1].done():
            later.asked[-1].set_result(ANSWER)
        run_round(asd, later, batch=4)
    assert len(later.asked) == 4, "after rounds 2, 32, 62 and 92"


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


def test_while_there_are_too_few_tokens_it_goes_on_capturing() -> None:
    asd = _asd()
    for _ in range(3):
        run_round(asd, lambda question, sequence_id=None: None, batch=4)
        assert asd.choose(state()).capture
