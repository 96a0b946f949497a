from collections.abc import Iterable
from concurrent.futures import Future

import pytest

from rayspec.choices import Choices, choices_of
from rayspec.config import SpeculationOptions
from rayspec.decode.search import Answer, Found, FoundDraft, Question, Trial
from rayspec.decode.strategy import RoundPlan
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.swift import Swift, odd_layers_skipped
from rayspec.types import ConfigError
from tests.strategy_cases import Asker, latency, result, state

NUM_TOKENS = 32
ODD_LAYERS = choices_of(odd_layers_skipped(8))


def _swift(agreed: Iterable[int], *, num_layers: int = 4) -> tuple[Swift, Asker]:
    """The strategy, and answers: of 32 tokens, so many agree."""
    numbers = iter(agreed)

    def reply(question: Question) -> Answer:
        assert isinstance(question, Trial)
        (pattern,) = question.patterns
        return Found([FoundDraft(tuple(pattern), 0.9, next(numbers))], question.num_tokens, 0.25)

    return Swift(SpeculationOptions(strategy="swift"), latency(2 * num_layers)), Asker(reply)


def _tried(asker: Asker) -> list[Choices]:
    trials = [question for question in asker.asked if isinstance(question, Trial)]
    assert {(len(trial.patterns), trial.num_tokens) for trial in trials} == {(1, NUM_TOKENS)}
    return [tuple(trial.patterns[0]) for trial in trials]


@pytest.mark.parametrize(
    ("agreed", "num_tries", "reason"),
    [([30, 31], 2, "a set agrees on 96.9% of the tokens"), ([3, 4, *[4] * 999], 302, "300 sets were tried in vain")],
    ids=["good enough", "no gain"],
)
def test_the_search_ends(agreed: list[int], num_tries: int, reason: str) -> None:
    swift, asker = _swift(agreed)
    records = [swift.search(state(), asker) for _ in range(320)]
    assert len(asker.asked) == num_tries
    (last,) = [record for record in records if record is not None][2:] or [records[num_tries - 1]]
    assert last is not None
    assert last.reason == f"the search is over: {reason}"
    assert not swift.choose(state()).capture


def test_where_nothing_is_left_to_skip_it_says_so() -> None:
    with pytest.raises(ConfigError, match="of the 2 sublayers between them, 45% leave none to skip"):
        Swift(SpeculationOptions(strategy="swift"), latency(6))


def test_one_set_a_round_is_tried_and_the_best_drafts() -> None:
    swift, asker = _swift([8, 4, 16, 31])
    here = state()
    assert not swift.choose(here).plan.drafts
    records = []
    for number in range(4):
        assert swift.choose(here).capture
        records.append(swift.search(here, asker))
        assert len(asker.asked) == number + 1
    assert swift.search(here, asker) is None
    assert records[1] is None, "only a higher score is a gain"
    first, _, third, last = records
    assert first is not None
    assert third is not None
    assert last is not None
    assert (first.plan.choices, first.plan.num_draft_tokens) == (ODD_LAYERS, 16)
    assert (third.plan.choices, third.optimise_s) == (_tried(asker)[2], 0.5), "with the time of the one in vain"
    assert (first.estimated_acceptance, third.estimated_acceptance) == (0.25, 0.5)
    assert first.predicted_tpt < third.predicted_tpt < last.predicted_tpt
    assert swift.choose(here).plan is last.plan
    assert swift.choose(here).keep_drafting == DraftWhileSure(threshold=0.8)
    swift.observe(here, RoundPlan(plan=last.plan), result([5], [3]), 4, 0.5)
    swift.observe(here, RoundPlan(plan=third.plan), result([5], [0]), 1, 0.5)
    assert (last.num_tokens, last.num_accepted_tokens, last.num_tested_tokens) == (4, 3, 4)


def test_a_trial_that_was_cancelled_is_made_again_and_one_that_failed_too() -> None:
    swift, asker = _swift([10, 20])
    pending: list[Future[Answer]] = []

    def search(question: Question) -> Future[Answer]:
        asker.asked.append(question)
        pending.append(Future())
        return pending[-1]

    here = state()
    swift.search(here, asker)
    assert swift.search(here, lambda question: None) is None, "too few tokens yet"
    for end in (lambda future: future.cancel(), lambda future: future.set_exception(RuntimeError("busy"))):
        assert swift.search(here, search) is None
        end(pending[-1])
        assert swift.search(here, search) is None
    assert swift.search(here, asker) is not None
    first, *again = _tried(asker)
    assert first == ODD_LAYERS
    assert len(again) == 3
    assert len({*again, first}) == 2
