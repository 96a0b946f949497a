from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rayspec.choices import SKIP
from rayspec.config import SamplingParams, SpeculationOptions
from rayspec.decode.search import Answer, Feature, Question, Values
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.knn_ssd import KnnSSD, radius, representatives, unit_rows
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlan, SavedPlans
from rayspec.strategies.tuning import features_of
from rayspec.types import Plan, PlanRecord, RayspecError
from tests.engines import complete, engine_with, requests_for, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, parts_of
from tests.pipeline.loop import loop_engine
from tests.strategy_cases import LENGTHS, latency, round_of, saved_plan, state

LAW = saved_plan("law", [2, 3, 4, 5], anchors=((1.0, 0.0), (0.8, 0.6)), radius=0.1)
CODE = saved_plan("code", [5], anchors=((0.0, 1.0),), radius=0.02)
ANY = saved_plan("", [7])
NEAR_LAW, NEAR_CODE, NOWHERE = [3.0, 2.2], [0.0, 2.0], [-1.0, 0.1]


def _saved(*plans: SavedPlan, num_sublayers: int = 8) -> SavedPlans:
    model = ModelIdentity(name="m", weights="00", family="llama", num_sublayers=num_sublayers)
    return SavedPlans(model=model, plans=plans)


def _knn(*plans: SavedPlan, gate: bool = False, **options: Any) -> KnnSSD:
    return KnnSSD(_saved(*plans), _options(gate=gate, **options), latency())


def _options(*, gate: bool = False, **options: Any) -> SpeculationOptions:
    return SpeculationOptions(strategy="knn-ssd", warm_start="p.json", gate=gate, **options)


class _Texts:
    """Sequences and the features of their beginnings; answers when it is asked, or only when it is told to."""

    def __init__(self, features: Mapping[str, Sequence[float]], *, at_once: bool = True) -> None:
        self._features = features
        self._at_once = at_once
        self.asked: list[str] = []
        self.futures: dict[str, Future[Answer]] = {}

    def __call__(self, question: Question, sequence_id: str | None = None) -> Future[Answer] | None:
        assert question == Feature(num_tokens=1)
        assert sequence_id is not None
        self.asked.append(sequence_id)
        if sequence_id not in self._features:
            return None
        self.futures[sequence_id] = Future()
        if self._at_once:
            self.answer(sequence_id)
        return self.futures[sequence_id]

    def answer(self, sequence_id: str) -> None:
        self.futures[sequence_id].set_result(Values(self._features[sequence_id], 0.5))


def _round(
    knn: KnnSSD, texts: _Texts, *names: str, seconds: Callable[[Plan], float] = lambda plan: 0.1
) -> tuple[list[int], bool, PlanRecord | None]:
    """A round of these sequences, as the engine goes about it: sublayers that its draft skips, whether it captured
    states, what was reported afterwards."""
    here = state(batch=len(names), sequence_ids=names)
    chosen = knn.choose(here)
    length = chosen.plan.num_draft_tokens
    drafts = round_of(chosen.plan, length, batch=len(names))
    knn.observe(here, chosen, drafts, (1 + length) * len(names), seconds(chosen.plan))
    record = knn.search(here, texts)
    return _skipped(chosen.plan), chosen.capture, record


def _skipped(plan: Plan) -> list[int]:
    return [index for index, choice in enumerate(plan.choices) if choice == SKIP]


def _skipped_for(knn: KnnSSD, name: str) -> list[int]:
    """Sublayers that a draft of this sequence alone skips; none before its domain is known, and without a domain."""
    return _skipped(knn.choose(state(sequence_ids=(name,))).plan)


def test_a_texts_first_round_is_looked_at_and_its_second_drafts_by_the_plan_of_its_domain() -> None:
    knn, texts = _knn(LAW, CODE), _Texts({"a": NEAR_LAW})
    assert _round(knn, texts, "a") == ([], True, None)
    skipped, tapped, record = _round(knn, texts, "a")
    assert (skipped, tapped) == ([2, 3, 4, 5], False)
    chosen = knn.choose(state(sequence_ids=("a",)))
    assert chosen.plan.num_draft_tokens == 5
    assert chosen.keep_drafting == DraftWhileSure(threshold=0.8)
    assert record is not None
    assert (record.reason, record.estimated_acceptance) == ("the plan for 'law'", 0.75)
    assert (record.predicted_tpt, record.plain_tpt, record.num_tokens) == (30.0, 20.0, 6)
    assert knn.status.endswith("; the last text began 0.000 from 'law'")
    for _ in range(20):
        assert _round(knn, texts, "a") == ([2, 3, 4, 5], False, None), "it is looked at once"
    assert texts.asked == ["a"]
    assert record.num_tokens == 6 * 21
    assert knn.choose(state(sequence_ids=("a",))).keep_drafting == DraftWhileSure(threshold=0.8), "it is fixed"


def test_a_batch_has_the_plan_of_most_of_it_and_what_is_new_has_no_say() -> None:
    features = {"a": NEAR_CODE, "b": NEAR_LAW, "c": NEAR_LAW, "d": NOWHERE, "e": NOWHERE, "f": NOWHERE}
    knn, texts = _knn(LAW, CODE), _Texts(features)
    _round(knn, texts, "a")
    assert _round(knn, texts, "a", "b", "c")[:2] == ([5], True), "by the only one that is known"
    assert _round(knn, texts, "a", "b", "c")[:2] == ([2, 3, 4, 5], False)
    assert _round(knn, texts, "b", "c", "d", "e", "f")[:2] == ([2, 3, 4, 5], True)
    assert _round(knn, texts, "b", "c", "d", "e", "f")[:2] == ([], False), "most of it is of no domain"
    assert _round(knn, texts, "a", "d")[0] == [5], "the first of equals"
    assert texts.asked == list("abcdef")


@pytest.mark.parametrize("feature", [[0.0, 0.0], [float("nan"), 1.0], [1.0, 0.0, 0.0]])
def test_a_text_whose_feature_is_near_to_no_anchor_is_of_no_domain(feature: Sequence[float]) -> None:
    """A final norm makes zeros of states that overflow, and the anchors of a file may have another length."""
    knn, texts = _knn(LAW, CODE), _Texts({"a": feature, "b": NEAR_CODE})
    _round(knn, texts, "a")
    assert "the last text was not classified: " in knn.status
    assert _round(knn, texts, "a") == ([], False, None)
    _round(knn, texts, "b")
    assert _skipped_for(knn, "b") == [5]


def test_a_text_that_moved_is_looked_at_again_and_one_that_cannot_be_asked_is_of_no_domain() -> None:
    knn, texts = _knn(LAW, CODE), _Texts({"a": NEAR_LAW, "b": NEAR_CODE}, at_once=False)
    _round(knn, texts, "a")
    texts.futures["a"].cancel()
    _round(knn, texts, "a")
    assert _round(knn, texts, "a")[1], "it is tapped again"
    texts.answer("a")
    _round(knn, texts, "a")
    assert _skipped_for(knn, "a") == [2, 3, 4, 5]
    _round(knn, texts, "b")
    texts.futures["b"].set_exception(RayspecError("gone"))
    _round(knn, texts, "b")
    _round(knn, texts, "unknown")
    for name in ("b", "unknown"):
        assert _round(knn, texts, name)[:2] == ([], False)
        assert _skipped_for(knn, name) == []
    assert texts.asked.count("b") == texts.asked.count("unknown") == 1


@pytest.mark.parametrize("num_stages", few_of([1, 2], [2]))
def test_real_texts_are_told_apart_and_their_tokens_stay_the_same(num_stages: int) -> None:
    """A batch of five, three at a time: each is near itself; the last is of no domain."""
    path = checkpoint("llama")
    known = cases(path, LENGTHS, 16)
    directions = unit_rows(features_of(engine_with(parts_of(path)), known.prompts)).tolist()
    saved = _saved(
        *(
            saved_plan(domain, [skip], radius=1e-4, anchors=tuple(map(tuple, directions[at:4:2])))
            for at, (domain, skip) in enumerate({"law": 3, "code": 4}.items())
        )
    )
    speculation = _options(draft_threshold=0.05)
    knn = KnnSSD(saved, speculation, latency())
    params = SamplingParams(temperature=0, max_tokens=16)
    if num_stages == 1:
        engine = engine_with(parts_of(path), knn, speculation=speculation, max_num_seqs=3)
        assert tokens_of(complete(engine, known.prompts, params)) == known.expected
    else:
        with loop_engine(path, num_stages, knn, max_num_seqs=3) as run:
            assert tokens_of(complete(run.engine, known.prompts, params)) == known.expected
            run.require_clean()
        engine = run.engine
    names = [f"{number}/{request.request_id}/0" for number, request in enumerate(requests_for(known.prompts), 1)]
    assert [_skipped_for(knn, name) for name in names] == [[3], [4], [3], [4], []]
    assert engine.stats.num_accepted_tokens > 0


def test_representatives_are_the_samples_nearest_to_the_centres() -> None:
    """Three tight clusters: the sample nearest to each cluster's mean, found by trying."""
    rng = np.random.default_rng(1)
    clusters = [unit_rows(centre + 0.05 * rng.normal(size=(7, 3))) for centre in np.eye(3)]
    expected = {
        tuple(cluster[np.linalg.norm(cluster - cluster.mean(axis=0), axis=1).argmin()].round(9).tolist())
        for cluster in clusters
    }
    rows = representatives(np.concatenate(clusters) * 3.0, 3)
    assert {tuple(row.round(9).tolist()) for row in rows} == expected
    assert representatives([[2.0, 0.0], [0.0, 3.0], [4.0, 0.0]], 5).tolist() == [[0.0, 1.0], [1.0, 0.0]], "few samples"


def test_where_other_domains_are_known_it_is_half_way_to_the_nearest_of_their_anchors() -> None:
    rng = np.random.default_rng(3)
    centres = np.eye(5)[:3]
    domains = [unit_rows(centre + 0.02 * rng.normal(size=(6, 5))) for centre in centres]
    own, others = domains[0], [rows[:4] for rows in domains[1:]]
    gap = min(1 - float(one @ other) for one in own[:3] for rows in others for other in rows)
    assert radius(own * 3.0, own[:3], others) == pytest.approx(gap / 2)
    near = unit_rows(centres[0] + 0.02 * rng.normal(size=(6, 5)))
    assert radius(own, own[:3], [near]) == radius(own, own[:3]), "never less than the samples need"
