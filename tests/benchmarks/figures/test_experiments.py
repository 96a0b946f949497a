"""The experiments, with real runs of the bundled model. Times are real and decide nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rayspec
from benchmarks.figures.runs import TimedStrategy, latency_of, local_engine, take_turns
from benchmarks.figures.tpt import Estimates, context_of, predict, run_tpt
from rayspec.choices import FULL, Choices, choices_of
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.knapspec import Candidate
from rayspec.types import Plan
from tests.demo_model import demo_prompts
from tests.engines import require_idle

NUM_SUBLAYERS = 32
EARLY = choices_of([index < 16 for index in range(NUM_SUBLAYERS)])
MOST = choices_of([index != 9 for index in range(NUM_SUBLAYERS)])
ALL = (FULL,) * NUM_SUBLAYERS


@pytest.fixture(scope="module")
def llm() -> Iterator[rayspec.LLM]:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 1, "max_model_len": 1024}
    options["enable_prefix_caching"] = False
    with rayspec.LLM("demo", speculation={"strategy": "knapspec", "max_draft_tokens": 6}, **options) as one:
        yield one


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return demo_prompts(2, 5)


def fixed(choices: Choices, length: int = 4) -> TimedStrategy:
    return TimedStrategy(FixedPlan(Plan(choices=choices, num_draft_tokens=length, source="test")))


def given(*patterns: Choices, num_agreed: int = 12) -> Estimates:
    candidates = tuple(
        Candidate(choices, similarity=0.9, num_agreed=num_agreed, num_captured=16) for choices in patterns
    )
    return Estimates(candidates=candidates, origins=dict.fromkeys(patterns, "random"))


def test_contenders_take_turns_and_write_the_same(llm: rayspec.LLM, prompts: list[list[int]]) -> None:
    engine, seen = local_engine(llm), []
    before = engine._planner.strategy
    contenders = {"plain": fixed(ALL, 0), "all": fixed(ALL), "early": fixed(EARLY), "most": fixed(MOST)}
    for name, contender in contenders.items():
        real = contender.choose

        def choose(at: BatchState, name: str = name, real: Any = real) -> RoundPlan:
            seen.append((name, at.context))
            return real(at)  # type: ignore[no-any-return]

        contender.choose = choose  # type: ignore[method-assign]
    found = take_turns(llm, contenders, prompts, max_tokens=10, seed=1)
    runs = [name for index, (name, _) in enumerate(seen) if index == 0 or seen[index - 1][0] != name]
    assert sorted(runs[:4]) == sorted(contenders), "all write after the first prompt before any goes on"
    assert len(runs) in (7, 8)
    assert engine._planner.strategy is before
    require_idle(engine)
    for name, (first, second) in found.items():
        assert first.num_tokens == second.num_tokens == 9
        assert first.seconds > 0
        assert name == "plain" or first.num_drafted >= first.num_tested >= first.num_accepted > 0
    assert found["plain"][0].num_rounds == 9
    assert found["plain"][0].num_drafted == 0
    for one in found["all"]:
        assert one.num_accepted == one.num_tested == one.num_drafted
        assert one.num_rounds == 2


def test_every_plan_runs_at_every_length(llm: rayspec.LLM, prompts: list[list[int]]) -> None:
    estimates = given(EARLY, ALL, MOST)
    found = run_tpt(llm, estimates, prompts, draft_lengths=(2, 5), max_tokens=14)
    assert found.context == context_of(prompts, 14) == round(np.mean([len(prompt) for prompt in prompts])) + 7
    assert [(point.choices, point.num_draft_tokens) for point in found.points] == [
        (choices, length) for choices in (EARLY, ALL, MOST) for length in (2, 5)
    ]
    assert found.num_tapped_tokens == 16
    assert found.plain_tpt == pytest.approx(1 / latency_of(llm).decode_step_s(context=found.context, batch=1))
    prediction = predict(llm, estimates.candidates, context=found.context, max_draft_tokens=5)
    for index, point in enumerate(found.points):
        assert point.predicted_tpt == pytest.approx(prediction.tpt[index // 2, point.num_draft_tokens - 1])
        assert point.estimated_acceptance == pytest.approx(prediction.acceptance[index // 2])
        assert len(point.measured_by_prompt) == 2
        assert point.measured_tpt == pytest.approx(np.median(point.measured_by_prompt))
        assert point.tpt_as_accepted > point.predicted_tpt or point.observed_acceptance < point.estimated_acceptance
    assert [point.observed_acceptance for point in found.points[2:4]] == [1.0, 1.0]
    assert found.points[0].observed_acceptance < 1.0
