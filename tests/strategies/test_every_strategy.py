"""Every strategy there is, by name: plans of its kind change no token, in one process and over two stages.

What makes a strategy what it is has a test in its own file; here are those without one, whose plan is fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

import pytest

from rayspec import demo
from rayspec.choices import choices_of
from rayspec.config import EngineConfig, SamplingParams, SpeculationOptions, Strategy
from rayspec.decode import strategy as protocol
from rayspec.decode.search import Answer
from rayspec.decode.stages import LocalStages, Stages
from rayspec.decode.strategy import BatchState, RoundPlan
from rayspec.decode.work import Round, RoundResult
from rayspec.local_engine import load_engine
from rayspec.pipeline.messages import Begin, Searched
from rayspec.planning.learning import DraftWhileSure
from rayspec.strategies.by_name import make_strategy
from rayspec.strategies.fixed import early_exit_plan, lookahead_plan, lookup_plan, static_plan
from rayspec.strategies.gate import Gated
from rayspec.types import EngineStats, Plan, no_draft
from tests.demo_model import EOS, demo_prompts
from tests.engines import complete, engine_with, tokens_of
from tests.exhaustive import few_of
from tests.families import cases, checkpoint, greedy, parts_of
from tests.pipeline.loop import TravellingPlans, loop_engine
from tests.strategy_cases import latency_model

NUM_LAYERS, NUM_SUBLAYERS = 4, 8
MAX_DRAFT_TOKENS = 6
LENGTHS = (37, 3, 120, 12, 70)  # a batch of five
NUM_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def skipping(rng: random.Random, source: str, among: range, *, at_least: int = 0) -> Plan:
    """Some of these sublayers are left out."""
    skip = rng.sample(among, rng.randint(at_least, len(among) // 2))
    return replace(static_plan(skip, NUM_SUBLAYERS, rng.randint(1, MAX_DRAFT_TOKENS)), source=source)


def any_sublayers(rng: random.Random, source: str) -> Plan:
    return skipping(rng, source, range(NUM_SUBLAYERS))


def whole_layers(rng: random.Random) -> Plan:
    layers = rng.sample(range(NUM_LAYERS), rng.randint(1, NUM_LAYERS // 2))
    skip = [2 * layer + half for layer in layers for half in range(2)]
    return replace(static_plan(skip, NUM_SUBLAYERS, rng.randint(1, MAX_DRAFT_TOKENS)), source="clasp")


def trees(rng: random.Random) -> Plan:
    """The first and the last layer stay."""
    plan = skipping(rng, "swift", range(2, NUM_SUBLAYERS - 2), at_least=1)
    return replace(plan, tree_widths=tuple(sorted(rng.randint(1, 8) for _ in range(4))))


def exits(rng: random.Random, source: str) -> Plan:
    options = SpeculationOptions(
        exit_layer=rng.randint(1, NUM_LAYERS - 1), max_draft_tokens=rng.randint(1, MAX_DRAFT_TOKENS)
    )
    return replace(early_exit_plan(options, NUM_SUBLAYERS), source=source)


def one_of_three(rng: random.Random) -> Plan:
    """A domain's plan, or that of no domain, which does not draft."""
    domains = [(2,), (1, 5), None]
    skip = rng.choice(domains)
    return no_draft(NUM_SUBLAYERS, "knn-ssd") if skip is None else static_plan(skip, NUM_SUBLAYERS, MAX_DRAFT_TOKENS)


def looked_up(rng: random.Random) -> Plan:
    return lookup_plan(NUM_SUBLAYERS, rng.randint(1, MAX_DRAFT_TOKENS))


def both_ways(rng: random.Random) -> Plan:
    if rng.random() < 0.5:
        return replace(looked_up(rng), source="auto")
    return replace(any_sublayers(rng, "auto"), num_lookup_tokens=rng.choice([0, 4]))


KINDS: dict[str, Callable[[random.Random], Plan]] = {
    "ar": lambda rng: no_draft(NUM_SUBLAYERS, "ar"),
    "static": lambda rng: any_sublayers(rng, "static"),
    "knapspec": lambda rng: any_sublayers(rng, "knapspec"),
    "self-sd": lambda rng: any_sublayers(rng, "self-sd"),
    "knn-ssd": one_of_three,
    "clasp": whole_layers,
    "swift": trees,
    "del": lambda rng: exits(rng, "del"),
    "layerskip": lambda rng: exits(rng, "layerskip"),
    "asd": lambda rng: skipping(rng, "asd", range(0, NUM_SUBLAYERS, 2), at_least=1),
    "lookup": looked_up,
    "lookahead": lambda rng: lookahead_plan(NUM_SUBLAYERS),
    "auto": both_ways,
}
ONE_PLAN = {"ar", "lookahead"}


class PlansOfAKind(TravellingPlans):
    """Another one in every round."""

    def __init__(self, draw: Callable[[random.Random], Plan], seed: int) -> None:
        super().__init__(seed, NUM_SUBLAYERS, MAX_DRAFT_TOKENS)
        self._draw = draw

    def choose(self, state: BatchState) -> RoundPlan:
        self.plans.append(self._draw(self._rng))
        return RoundPlan(plan=self.plans[-1], keep_drafting=self.rule(), capture=self._rng.random() < 0.25)


@dataclass
class Ran:
    """What an engine did; of two stages, also what was delivered."""

    stats: EngineStats
    delivered: list[Any] = field(default_factory=list)


def require_known_tokens(strategy: protocol.Strategy, num_stages: int = 1, family: str = "qwen3", **wrap: Any) -> Ran:
    """A batch of five in float32 makes the tokens of transformers' generate."""
    options: dict[str, Any] = {"max_num_seqs": 5, "num_beside": 64, "max_draft_tokens": MAX_DRAFT_TOKENS}
    path = checkpoint(family)
    known = cases(path, LENGTHS, NUM_TOKENS)
    if num_stages == 1:
        engine = engine_with(parts_of(path), strategy, **options, **wrap)
        assert tokens_of(complete(engine, known.prompts, GREEDY)) == known.expected
        return Ran(engine.stats)
    with loop_engine(path, num_stages, strategy, **options) as run:
        assert tokens_of(complete(run.engine, known.prompts, GREEDY)) == known.expected
        run.require_clean()
        return Ran(run.engine.stats, [message for _, message in run.loop.delivered])


def test_no_strategy_is_left_out() -> None:
    assert set(KINDS) == set(get_args(Strategy))


@pytest.mark.parametrize(
    ("strategy", "num_stages"),
    few_of(
        list(product(KINDS, [1, 2])),
        # Over two stages, a kind of each way to draft: the others leave out sublayers in a chain, as knapspec does.
        [*((name, 1) for name in KINDS), *((name, 2) for name in ("knapspec", "swift", "lookahead", "auto"))],
    ),
)
def test_random_plans_of_its_kind_change_no_token(strategy: str, num_stages: int) -> None:
    drawn = PlansOfAKind(KINDS[strategy], num_stages)
    stats = require_known_tokens(drawn, num_stages).stats
    assert (stats.num_accepted_tokens > 0) == (strategy != "ar")
    assert (len(set(drawn.plans)) > 2) == (strategy not in ONE_PLAN)


# All but self-sd and knn-ssd, which need saved plans: see the files of their tests.
OPTIONS: dict[str, dict[str, Any]] = {
    "ar": {},
    "static": {"skip": (2,)},
    "lookup": {},
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


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("strategy", OPTIONS)
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


@pytest.mark.parametrize("strategy", ASKING)
def test_nor_where_norms_and_windows_differ_and_the_time_of_all_questions_counts(strategy: str) -> None:
    spent_s: list[float] = []

    def timed(stages: LocalStages) -> Stages:
        search = stages.search

        def search_timed(*arguments: Any) -> Future[Answer]:
            answer = search(*arguments)
            spent_s.append(answer.result().seconds)
            return answer

        stages.search = search_timed  # type: ignore[method-assign]
        return stages

    stats = require_known_tokens(made(strategy), family="gemma2", wrap=timed).stats
    assert len(spent_s) > 1
    assert stats.optimise_s >= sum(spent_s) * (1 - 1e-9), "questions that changed nothing took time too"


@pytest.mark.parametrize("strategy", [*ASKING, "lookup", "lookahead", "layerskip"])
def test_nor_does_one_behind_the_gate(strategy: str) -> None:
    gated = made(strategy, gate=True)
    assert isinstance(gated, Gated)
    assert require_known_tokens(gated).stats.gate_reason == gated.status


@pytest.mark.parametrize("strategy", ASKING)
def test_sampled_text_is_that_of_plain_decoding(strategy: str) -> None:
    parts, prompts = parts_of(checkpoint("granite")), cases(checkpoint("granite"), LENGTHS, NUM_TOKENS).prompts[:3]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=40)
    engine = engine_with(parts, made(strategy), max_num_seqs=3, max_draft_tokens=MAX_DRAFT_TOKENS)
    assert tokens_of(complete(engine, prompts, params)) == tokens_of(complete(engine_with(parts), prompts, params))
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("strategy", few_of(["clasp", "del", "asd"], ["asd"]))
def test_a_loaded_engine_measures_asks_and_drafts(strategy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {
        "clasp": {"search_interval": 32},
        "del": {"search_interval": 4},
        "asd": {},
    }[strategy]
    config = EngineConfig(
        model=demo.model_path(),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        kv_cache_tokens=2048,
        profile_cache=str(tmp_path_factory.getbasetemp() / "profiles"),
        speculation={"strategy": strategy, "gate": False} | options,  # type: ignore[arg-type]
    )
    prompts = demo_prompts(2, 12)
    engine = load_engine(config)
    outputs = complete(engine, prompts, SamplingParams(temperature=0, max_tokens=60))
    assert tokens_of(outputs) == greedy(demo.model_path(), prompts, 60, eos=(EOS,))
    assert engine.stats.optimise_s > 0
    if strategy != "del":  # which may find that no exit pays
        assert engine.stats.num_accepted_tokens > 0


def rounds_of(strategy: str) -> list[tuple[Plan, RoundResult]]:
    """The plan of each round and what came of it."""
    one, rounds = made(strategy), []

    def observe(state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float) -> None:
        rounds.append((chosen.plan, result))

    one.observe = observe  # type: ignore[method-assign]
    require_known_tokens(one)
    return rounds


def test_ar_takes_a_round_for_every_token() -> None:
    rounds = rounds_of("ar")
    assert len(rounds) == NUM_TOKENS - 1, "the first token is the prefill's"
    assert not any(draft.token_ids for _, result in rounds for draft in result.drafts)


def test_static_leaves_out_what_it_is_told_to_in_every_round() -> None:
    rounds = rounds_of("static")
    assert {plan.choices for plan, _ in rounds} == {choices_of([index != 2 for index in range(NUM_SUBLAYERS)])}
    assert max(result.num_draft_steps for _, result in rounds) == MAX_DRAFT_TOKENS


def test_what_is_looked_up_takes_no_step_of_a_model() -> None:
    rounds = rounds_of("lookup")
    assert {result.num_draft_steps for _, result in rounds} == {0}
    assert any(count > 1 for _, result in rounds for count in result.num_accepted)
