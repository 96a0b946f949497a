"""Tuning by real generation. What tokens cost is made up where speed decides, so that the best plan is known."""

from collections.abc import Callable
from operator import ne
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rayspec.choices import FULL, SKIP
from rayspec.config import EngineConfig, SamplingParams, TuningOptions
from rayspec.decode.engine import Engine
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.local_engine import load_engine
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from rayspec.strategies.self_sd import SelfSD
from rayspec.strategies.tuning import features_of, tune_domains, tune_plan
from rayspec.types import ConfigError, EmptyPromptError, Plan
from tests.engines import complete, engine_with, require_idle, tokens_of
from tests.families import cases, checkpoint, parts_of, ragged_prompts, reference, small_config
from tests.strategy_cases import LENGTHS, saved_plan

PROMPTS = ragged_prompts([30, 12, 50])
FAST = TuningOptions(num_tries=12, max_tokens=10)
MODEL = ModelIdentity(name="m", weights="00", family="llama", num_sublayers=8)


def _engine(**options: Any) -> Engine:
    return engine_with(parts_of(checkpoint("llama")), **options)


def _priced(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Plan], float]) -> list[Plan]:
    """A token of a sequence takes what the plan is said to cost; which plans were measured, round by round."""
    plans, real = [], SelfSD.observe

    def observe(
        self: SelfSD, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, _: float
    ) -> None:
        plans.append(chosen.plan)
        real(self, state, chosen, result, num_tokens, num_tokens * seconds(chosen.plan) / state.batch)

    monkeypatch.setattr(SelfSD, "observe", observe)
    return plans


def test_it_finds_the_fastest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (FULL, SKIP, FULL, FULL, SKIP, SKIP, FULL, FULL)
    seen = _priced(monkeypatch, lambda plan: 1.0 + sum(map(ne, plan.choices, wanted)) if plan.drafts else 1.5)
    engine = _engine()
    before = engine._planner.strategy
    plan = tune_plan(engine, PROMPTS, TuningOptions(num_tries=40, max_tokens=4), domain="law")
    assert plan.choices == wanted
    assert plan.domain == "law"
    assert plan.tokens_per_s == pytest.approx(1.0, rel=0.01)
    assert plan.plain_tokens_per_s == pytest.approx(1 / 1.5)
    assert plan.num_draft_tokens == 16
    assert plan.provenance["method"] == "the fastest of 40 plans by trials"
    assert plan.provenance["calibration"] == "3 prompts, 4 tokens generated from each"
    assert len({one.choices for one in seen if one.drafts}) == 40
    runs = [one for index, one in enumerate(seen) if index == 0 or one is not seen[index - 1]]
    assert not runs[0].drafts, "plain decoding first"
    assert len(runs) == 42, "the speed that is saved is of another run than the choice"
    assert runs[-1].choices == plan.choices
    assert (plan.batch, plan.num_tested_tokens > 0, 0 <= plan.acceptance <= 1) == (3, True, True)
    assert plan.threshold is not None
    assert 0 < abs(plan.threshold - 0.6) < 0.05
    assert engine._planner.strategy is before
    require_idle(engine)


def test_no_plan_is_tried_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _priced(monkeypatch, lambda plan: 1.0)
    ticks = iter([0.0, 0.5, 0.9, 1.1])
    plan = tune_plan(_engine(), PROMPTS, TuningOptions(max_seconds=1.0, max_tokens=4), clock=lambda: next(ticks))
    assert plan.provenance["method"] == "the fastest of 2 plans by trials"
    assert len({one.choices for one in seen if one.drafts}) == 2


def test_without_prompts_or_room_for_drafts_nothing_is_tuned() -> None:
    with pytest.raises(ConfigError, match="no calibration prompts"):
        tune_plan(_engine(), [], FAST)
    with pytest.raises(EmptyPromptError, match="prompt"):
        tune_plan(engine := _engine(), [[]], FAST)
    require_idle(engine)
    with pytest.raises(ConfigError, match="'ar'"):
        tune_plan(_engine(speculation={"strategy": "ar"}), PROMPTS, FAST)
    for domains in ({}, {"": PROMPTS}, {"law": []}):
        with pytest.raises(ConfigError, match=r"domains|prompts"):
            tune_domains(engine, domains, FAST, model=MODEL)


def test_what_fails_in_the_middle_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, real = _engine(), SelfSD.observe
    before = engine._planner.strategy

    def observe(self: SelfSD, state: BatchState, chosen: RoundPlan, *others: Any) -> None:
        if chosen.plan.drafts:
            raise KeyboardInterrupt
        real(self, state, chosen, *others)

    monkeypatch.setattr(SelfSD, "observe", observe)
    with pytest.raises(KeyboardInterrupt):
        tune_plan(engine, PROMPTS, FAST)
    assert engine._planner.strategy is before
    require_idle(engine)


def test_a_feature_is_the_last_state_of_the_first_token_of_an_answer() -> None:
    path = checkpoint("llama")
    known = cases(path, LENGTHS[:2], 12)
    engine = _engine()
    features = features_of(engine, known.prompts)
    assert engine.stats.num_generated_tokens <= 4, "it stops when it has looked"
    require_idle(engine)
    for feature, prompt, output in zip(features, known.prompts, known.expected, strict=True):
        with torch.no_grad():
            states = reference(path).model(torch.tensor([[*prompt, *output]])).last_hidden_state[0]
        np.testing.assert_allclose(feature, states[len(prompt)].numpy(), atol=1e-4)


def test_a_prompt_that_fills_the_model_has_no_feature() -> None:
    with pytest.raises(ConfigError, match="no room for an answer"):
        features_of(_engine(max_model_len=31), ragged_prompts([30]))


def test_each_domain_gets_its_plan_and_its_anchors() -> None:
    domains = {"law": ragged_prompts([30, 20, 25, 31], seed=1), "code": ragged_prompts([40, 18], seed=2)}
    options = TuningOptions(num_tries=3, max_tokens=12)
    engine = _engine()
    saved = tune_domains(engine, domains, options, model=MODEL)
    assert [(plan.domain, len(plan.anchors)) for plan in saved.plans] == [("law", 4), ("code", 2)]
    for plan in saved.plans:
        features = features_of(engine, domains[plan.domain])
        directions = [np.asarray(feature) / np.linalg.norm(feature) for feature in features]
        for anchor in plan.anchors:
            assert min(float(np.linalg.norm(direction - anchor)) for direction in directions) < 1e-3
        assert plan.radius > 0


def test_what_was_tuned_is_what_self_sd_and_knn_ssd_draft_by(tmp_path: Path) -> None:
    path, file = checkpoint("llama"), tmp_path / "plans.json"
    known = cases(path, (37, 12, 70), 16)

    def config(**speculation: Any) -> EngineConfig:
        return small_config(path, profile_cache=str(tmp_path), speculation=speculation)

    tuned = tune_domains(
        load_engine(config(strategy="static", skip=(0,), draft_threshold=0.05), with_tokenizer=False),
        {"some": known.prompts},
        TuningOptions(num_tries=6, max_tokens=16),
        model=ModelIdentity.of(config(), 8),
    )
    some = msgspec.structs.replace(tuned.plans[0], radius=2.0)
    SavedPlans(model=tuned.model, plans=(some, saved_plan("", [1]))).save(file)
    for strategy in ("self-sd", "knn-ssd"):
        engine = load_engine(
            config(strategy=strategy, warm_start=str(file), gate=False, draft_threshold=0.05), with_tokenizer=False
        )
        outputs = complete(engine, known.prompts, SamplingParams(temperature=0, max_tokens=16))
        assert tokens_of(outputs) == known.expected
        assert engine.stats.num_draft_tokens > 0
        expected = saved_plan("", [1]) if strategy == "self-sd" else tuned.plans[0]
        assert engine.stats.plans[0].plan.choices == expected.choices
    assert SavedPlans.load(file, ModelIdentity.of(config(), 8)).of_domain("some") == some
