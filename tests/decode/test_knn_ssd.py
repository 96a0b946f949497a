from __future__ import annotations

from collections.abc import Sequence

import pytest

from rayspec.config import KnnSSDOptions, SpeculationOptions
from rayspec.decode.questions import Answer, Feature, Features, Question
from rayspec.decode.selection.anchors import Nearest
from rayspec.decode.selection.knn_ssd import Domains, KnnSSD
from rayspec.decode.selection.saved_plans import ModelIdentity, SavedPlan, SavedPlans
from rayspec.planning.stopping import DraftWhileSure
from rayspec.types import ConfigError, PlanRecord
from tests.strategies import answered, latency, require_lossless, result, saved_plan, situation

LAW = saved_plan("law", [2, 3, 4, 5], anchors=((1.0, 0.0), (0.8, 0.6)), radius=0.1)
CODE = saved_plan("code", [5], anchors=((0.0, 1.0),), radius=0.02)
ANY = saved_plan("", [7])


def _saved(*plans: SavedPlan, num_sublayers: int = 8) -> SavedPlans:
    model = ModelIdentity(name="m", weights="00", family="llama", num_sublayers=num_sublayers)
    return SavedPlans(model=model, plans=plans)


def _knn(*plans: SavedPlan, **options: object) -> KnnSSD:
    values = {"num_tokens": 4, "interval_tokens": 10, "reject_distance": None} | options
    speculation = SpeculationOptions(strategy="knn-ssd", warm_start="p.json", knn_ssd=values)  # type: ignore[arg-type]
    return KnnSSD(_saved(*plans), speculation, latency())


def _look(knn: KnnSSD, vector: Sequence[float], *, batch: int = 1) -> PlanRecord | None:
    """Plays rounds of a token a sequence until it has looked."""
    here, asked, records = situation(batch=batch), [], []

    def answer(question: Question) -> Answer:
        asked.append(question)
        return Features(vector, 0.5)

    for _ in range(40):
        knn.observe(here, knn.plan(here), result([0] * batch, [0] * batch), batch, 0.1)
        records.append(knn.improve(here, answered(answer)))
        if asked:
            break
    assert asked == [Feature(num_tokens=4)]
    return records[-1]


@pytest.mark.parametrize(
    ("domain", "distance", "expected"),
    [("law", 0.1, LAW), ("law", 0.1001, ANY), ("code", 0.02, CODE), ("code", 0.1, ANY)],
)
def test_beyond_the_radius_of_the_nearest_domain_it_is_none(domain: str, distance: float, expected: SavedPlan) -> None:
    domains = Domains(_saved(LAW, CODE, ANY), KnnSSDOptions(reject_distance=None))
    assert domains.plan_for(Nearest(domain=domain, distance=distance)) is expected


def test_the_option_wins_over_what_was_saved_and_without_a_default_there_is_no_plan() -> None:
    domains = Domains(_saved(LAW, CODE), KnnSSDOptions(reject_distance=0.5))
    assert domains.plan_for(Nearest(domain="code", distance=0.5)) is CODE
    assert domains.plan_for(Nearest(domain="code", distance=0.51)) is None


def test_plans_without_anchors_are_of_no_use() -> None:
    with pytest.raises(ConfigError, match="by anchors"):
        Domains(_saved(ANY), KnnSSDOptions())


def test_the_plan_of_the_nearest_domain_drafts() -> None:
    knn, here = _knn(LAW, CODE), situation()
    assert not knn.plan(here).drafts
    record = _look(knn, [3.0, 2.2])
    assert record is not None
    assert [index for index, kept in enumerate(knn.plan(here).keep) if not kept] == [2, 3, 4, 5]
    assert knn.plan(here).num_draft_tokens == 5
    assert knn.keep_drafting(here) == DraftWhileSure(threshold=0.8)
    assert "the plan for 'law': 0.000" in record.reason
    assert record.estimated_acceptance == 0.75
    assert record.optimise_s == 0.5
    assert record.predicted_tpt > record.plain_tpt


def test_it_looks_again_after_its_interval_and_not_before() -> None:
    knn, here = _knn(LAW, CODE), situation(batch=2)
    wants = []
    for _ in range(24):
        knn.observe(here, knn.plan(here), result([0, 0], [0, 0]), 2, 0.1)
        knn.improve(here, answered(lambda question: Features([1.0, 0.0], 0.5)))
        wants.append(knn.wants_taps)
    looks = [True, True] + [False] * 8  # two rounds tap the four tokens; the next ten tokens later
    assert wants == (looks * 3)[:24]


def test_other_text_gets_another_plan_and_the_same_text_no_new_record() -> None:
    knn, here = _knn(LAW, CODE), situation()
    _look(knn, [1.0, 0.0])
    assert _look(knn, [0.99, 0.05]) is None
    record = _look(knn, [0.0, 2.0])
    assert record is not None
    assert [index for index, kept in enumerate(knn.plan(here).keep) if not kept] == [5]
    stray = _look(knn, [-1.0, 0.1])
    assert stray is not None
    assert stray.reason.startswith("too far")
    assert not knn.plan(here).drafts
    assert stray.predicted_tpt == stray.plain_tpt


def test_that_the_first_text_is_of_no_domain_is_told_too() -> None:
    knn = _knn(LAW)
    record = _look(knn, [-1.0, 0.1])
    assert record is not None
    assert record.reason == "too far: 1.736 from 'law'"
    assert not record.plan.drafts
    assert _look(knn, [-1.0, 0.2]) is None


def test_far_text_gets_the_plan_for_any() -> None:
    knn, here = _knn(LAW, ANY), situation()
    record = _look(knn, [-1.0, 0.1])
    assert record is not None
    assert [index for index, kept in enumerate(knn.plan(here).keep) if not kept] == [7]


def test_greedy_tokens_stay_the_same_in_one_process_and_over_two_stages() -> None:
    anchor = (1.0,) + (0.0,) * 63
    saved = _saved(saved_plan("all", [3], anchors=(anchor,), radius=2.0))
    options = SpeculationOptions(
        strategy="knn-ssd",
        warm_start="p.json",
        knn_ssd={"threshold": 0.05, "interval_tokens": 6, "reject_distance": None},  # type: ignore[arg-type]
    )
    for one in require_lossless(lambda: KnnSSD(saved, options, latency())):
        assert one.num_accepted_tokens > 0
        assert len(one.plans) == 1, "it is always the same domain"
        assert "'all'" in one.plans[0].reason
