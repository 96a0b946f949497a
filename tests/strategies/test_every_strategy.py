"""Every strategy there is, and so every way to draft: no token changes, in one process and over two stages.

What makes a strategy what it is has a test in its own file.
"""

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any, get_args

import pytest

from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions, Strategy
from rayspec.decode import strategy as protocol
from rayspec.decode.search import Answer
from rayspec.decode.stages import LocalStages, Stages
from rayspec.decode.work import Round, RoundResult
from rayspec.pipeline.messages import Begin, Searched
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.by_name import make_strategy
from rayspec.strategies.gate import Gated
from rayspec.types import EngineStats, PlanRecord
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, parts_of
from tests.pipeline.loop import loop_engine
from tests.strategy_cases import latency_model

NUM_LAYERS, NUM_SUBLAYERS = 4, 8
MAX_DRAFT_TOKENS = 6
LENGTHS = (37, 3, 120, 12, 70)  # a batch of five
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@dataclass
class Ran:
    """What an engine did; of two stages, also what was delivered."""

    stats: EngineStats
    delivered: list[Any] = field(default_factory=list)


def require_known_tokens(
    strategy: protocol.Strategy,
    num_stages: int = 1,
    family: str = "qwen3",
    num_tokens: int = NUM_TOKENS,
    **wrap: Any,
) -> Ran:
    """A batch of five in float32 makes the tokens of transformers' generate."""
    options: dict[str, Any] = {"max_num_seqs": 5, "num_beside": 64, "max_draft_tokens": MAX_DRAFT_TOKENS}
    path = checkpoint(family)
    known, params = cases(path, LENGTHS, num_tokens), GREEDY.replace(max_tokens=num_tokens)
    if num_stages == 1:
        engine = engine_with(parts_of(path), strategy, **options, **wrap)
        assert tokens_of(complete(engine, known.prompts, params)) == known.expected
        return Ran(engine.stats)
    with loop_engine(path, num_stages, strategy, **options) as run:
        assert tokens_of(complete(run.engine, known.prompts, params)) == known.expected
        run.require_clean()
        return Ran(run.engine.stats, [message for _, message, _ in run.loop.delivered])


# All but self-sd and knn-ssd, which need saved plans: see the files of their tests.
OPTIONS: dict[str, dict[str, Any]] = {
    "ar": {},
    "static": {"skip": (2,)},
    "lookup": {},
    "recycling": {},
    "lookahead": {},
    "layerskip": {"exit_layer": 3},
    "knapspec": {"optimise_share": 1.0},
    "auto": {"optimise_share": 1.0},
    "clasp": {"search_interval": 16, "draft_threshold": 0.0},
    "del": {"num_search_tokens": 4},
    "asd": {"search_interval": 8, "num_search_tokens": 4, "draft_threshold": 0.0},
    "swift": {"num_search_tokens": 8, "draft_threshold": 0.05},
}
ASKING = ("clasp", "del", "asd", "swift")


def made(strategy: str, *, gate: bool = False) -> protocol.Strategy:
    speculation = SpeculationOptions(
        strategy=strategy, gate=gate, max_draft_tokens=MAX_DRAFT_TOKENS, **OPTIONS[strategy]
    )
    latency = latency_model(NUM_LAYERS, sublayer_s=1e-3, round_s=1.0)  # any draft pays
    return make_strategy(EngineConfig(model="test", speculation=speculation), NUM_SUBLAYERS, latency)


def test_no_strategy_is_left_out() -> None:
    assert {*OPTIONS, "self-sd", "knn-ssd"} == set(get_args(Strategy))


@pytest.mark.parametrize(
    ("strategy", "num_stages"),
    few_of(
        list(product(OPTIONS, [1, 2])),
        [
            (name, 1 + (name in {"auto", "clasp", "lookahead", "recycling", "swift"}))
            for name in OPTIONS
            if name != "ar"
        ],
    ),
)
def test_the_strategy_itself_changes_no_token(strategy: str, num_stages: int) -> None:
    ran = require_known_tokens(made(strategy), num_stages)
    assert (ran.stats.num_draft_tokens > 0) == (strategy != "ar")
    if strategy in ASKING:
        assert ran.stats.optimise_s > 0
        assert {record.plan.source for record in ran.stats.plans if record.plan.drafts} == {strategy}
    if strategy in ASKING and num_stages == 2:
        assert any(message.answer is not None for message in ran.delivered if isinstance(message, Searched))
        rounds = [message.work for message in ran.delivered if isinstance(message, Begin)]
        assert any(isinstance(one.keep_drafting, DraftWhileSure) for one in rounds if isinstance(one, Round))


@pytest.mark.parametrize("strategy", few_of(["clasp", "swift"], ["swift"]))
def test_nor_where_norms_and_windows_differ_and_the_time_of_all_questions_counts(strategy: str) -> None:
    spent_s: list[float] = []

    def timed(stages: LocalStages) -> Stages:
        search = stages.search

        def note(answer: Future[Answer]) -> None:
            if not answer.cancelled():
                spent_s.append(answer.result().seconds)

        def search_timed(*arguments: Any) -> Future[Answer]:
            answer = search(*arguments)
            answer.add_done_callback(note)
            return answer

        stages.search = search_timed  # type: ignore[method-assign]
        return stages

    stats = require_known_tokens(made(strategy), family="gemma2", num_tokens=40, wrap=timed).stats
    assert len(spent_s) > 1
    assert stats.optimise_s >= sum(spent_s) * (1 - 1e-9), "questions that changed nothing took time too"


@pytest.mark.parametrize("strategy", ["asd", "recycling"])
def test_nor_does_one_behind_the_gate(strategy: str) -> None:
    gated = made(strategy, gate=True)
    assert isinstance(gated, Gated)
    assert require_known_tokens(gated).stats.gate_reason == gated.status


class _Noted:
    """A strategy, and what it is told of: batches and the sequences that may draft."""

    def __init__(self, strategy: protocol.Strategy) -> None:
        self._strategy = strategy
        self.chosen, self.observed = list[protocol.BatchState](), list[protocol.BatchState]()

    @property
    def status(self) -> str:
        return self._strategy.status

    def choose(self, state: protocol.BatchState) -> protocol.RoundPlan:
        self.chosen.append(state)
        return self._strategy.choose(state)

    def observe(
        self,
        state: protocol.BatchState,
        chosen: protocol.RoundPlan,
        result: RoundResult,
        num_tokens: int,
        seconds: float,
    ) -> None:
        self.observed.append(state)
        self._strategy.observe(state, chosen, result, num_tokens, seconds)

    def search(self, state: protocol.BatchState, ask: protocol.Ask) -> PlanRecord | None:
        return self._strategy.search(state, ask)


SAMPLED = SamplingParams(temperature=1.2, seed=7, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    ("strategy", "num_stages", "params"),
    few_of(
        list(product(OPTIONS, [1, 2], [GREEDY, SAMPLED])),
        [("auto", 1, SAMPLED), ("lookahead", 2, GREEDY)],
    ),
)
def test_a_request_without_drafts_has_none_beside_others_and_the_same_text(
    strategy: str, num_stages: int, params: SamplingParams
) -> None:
    path = checkpoint("qwen3")
    prompts = cases(path, LENGTHS, NUM_TOKENS).prompts
    expected = tokens_of(complete(engine_with(parts_of(path)), prompts, params))
    noted, plainly = _Noted(made(strategy)), params.replace(use_drafts=False)
    speculation = SpeculationOptions(strategy=strategy, max_draft_tokens=MAX_DRAFT_TOKENS, **OPTIONS[strategy])
    options: dict[str, Any] = {"max_num_seqs": 5, "num_beside": 64, "max_draft_tokens": MAX_DRAFT_TOKENS}
    with ExitStack() as stack:
        if num_stages == 1:
            engine = engine_with(parts_of(path), noted, speculation=speculation, **options)
        else:
            engine = stack.enter_context(loop_engine(path, num_stages, noted, **options)).engine
        assert tokens_of(complete(engine, prompts, plainly)) == expected
        assert engine.stats.num_draft_tokens == 0
        assert engine.stats.num_plain_rounds == engine.stats.num_rounds
        assert noted.chosen == []
        assert not any(memory.corpus for memory in engine._planner.proposer._memories.values())
        mixed = [params if index % 2 else plainly for index in range(len(prompts))]
        outputs = complete(engine, prompts, mixed)
    assert tokens_of(outputs) == expected
    num_drafted = [output.metrics.num_draft_tokens for output in outputs]
    assert not any(num_drafted[::2])
    if params is GREEDY:  # a sampled text of a random model has nothing to copy
        assert any(num_drafted) == (strategy != "ar")
    assert any(0 < len(state.sequence_ids) < state.batch for state in noted.chosen)
    assert all(len(state.sequence_ids) == state.batch and state.is_observed for state in noted.observed)
    assert engine.stats.num_compared_rounds <= sum(len(state.sequence_ids) for state in noted.observed)
