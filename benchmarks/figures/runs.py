"""Run several strategies alternately in one engine, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import rayspec
from rayspec.config import SamplingParams
from rayspec.decode.engine import Engine
from rayspec.decode.strategy import Ask, BatchState, RoundPlan, Strategy
from rayspec.decode.work import RoundResult
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.periodic import num_tested
from rayspec.strategies.tuning import selecting
from rayspec.types import ConfigError, EngineStats, PlanRecord

Prompt = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The output of one contender for one prompt. num_tokens: without the first token, which prefill gives. seconds: of
    decoding, without prefill. search_s: the part of `seconds` in plan searches. num_tested: draft tokens up to and
    including the first rejected token of each draft."""

    num_tokens: int
    seconds: float
    search_s: float
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_tested: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=median(values), least=min(values), most=max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


class TimedStrategy:
    """A strategy that alternates with others in one engine, counts tested draft tokens, and keeps its plan records.

    Its clock stops while other strategies run, so that its search budget is a share of its own time.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.records: list[PlanRecord] = []
        self.num_tested = 0
        self._strategy = strategy
        self._left_at_s = 0.0
        self._away_s = 0.0

    @contextmanager
    def taking_its_turn(self, stats: EngineStats) -> Iterator[None]:
        self._away_s += stats.total_s - self._left_at_s
        yield
        self._left_at_s = stats.total_s

    @property
    def status(self) -> str:
        return self._strategy.status

    def choose(self, state: BatchState) -> RoundPlan:
        return self._strategy.choose(self._own(state))

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self.num_tested += num_tested(result)
        self._strategy.observe(self._own(state), chosen, result, num_tokens, seconds)

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        record = self._strategy.search(self._own(state), ask)
        if record is not None:
            self.records.append(record)
        return record

    def _own(self, state: BatchState) -> BatchState:
        return replace(state, elapsed_s=state.elapsed_s - self._away_s)


def take_turns(
    llm: rayspec.LLM,
    contenders: Mapping[str, TimedStrategy],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    seed: int = 0,
) -> dict[str, list[Passage]]:
    """Return a passage for each prompt, by contender. All contenders complete a prompt, in random order, before the
    next prompt. Strategies keep their state between prompts. Raises ConfigError, and the error of a failed prompt."""
    rng = random.Random(seed)
    passages: dict[str, list[Passage]] = {name: [] for name in contenders}
    for prompt in prompts:
        order = list(contenders)
        rng.shuffle(order)
        for name in order:
            passages[name].append(write(llm, contenders[name], prompt, max_tokens=max_tokens))
    return passages


def write(llm: rayspec.LLM, contender: TimedStrategy, prompt: Prompt, *, max_tokens: int) -> Passage:
    """Complete the prompt greedily, to the end of the text or `max_tokens`. Raises the error of a failed prompt."""
    engine = local_engine(llm)
    before, num_tested = copy.copy(engine.stats), contender.num_tested
    with selecting(engine, contender), contender.taking_its_turn(engine.stats):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    if output.error is not None:
        raise output.error
    now = engine.stats
    return Passage(
        num_tokens=len(output.outputs[0].token_ids) - 1,
        seconds=(now.total_s - before.total_s) - (now.prefill_s - before.prefill_s),
        search_s=now.optimise_s - before.optimise_s,
        num_rounds=now.num_rounds - before.num_rounds,
        num_drafted=now.num_draft_tokens - before.num_draft_tokens,
        num_accepted=now.num_accepted_tokens - before.num_accepted_tokens,
        num_tested=contender.num_tested - num_tested,
    )


def local_engine(llm: rayspec.LLM) -> Engine:
    """Return the engine. Raises ConfigError for several replicas."""
    if llm.client.engine is None:
        raise ConfigError("option 'parallel' is set: figures are of an engine in one process, leave it out")
    return llm.client.engine


def latency_of(llm: rayspec.LLM) -> LatencyModel:
    """Return the latency model. Raises ConfigError if there is none, because the model cannot draft for itself."""
    latency = local_engine(llm).latency
    if latency is None:
        raise ConfigError(f"model {llm.config.model!r} does not draft for itself: choose one whose layers split")
    return latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speed-up over plain decoding. overall: over all prompts together. least, most: range over single prompts."""

    overall: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.overall:.2f} ({self.least:.2f} to {self.most:.2f})"


def gain_of(own: Sequence[Passage], plain: Sequence[Passage]) -> Gain:
    """Return the speed-up of `own` over `plain`, which have passages for the same prompts."""
    ratios = [one.tokens_per_s / max(other.tokens_per_s, 1e-9) for one, other in zip(own, plain, strict=True)]
    return Gain(overall=_rate(own) / max(_rate(plain), 1e-9), least=min(ratios), most=max(ratios))


def _rate(passages: Sequence[Passage]) -> float:
    return sum(one.num_tokens for one in passages) / max(sum(one.seconds for one in passages), 1e-9)
