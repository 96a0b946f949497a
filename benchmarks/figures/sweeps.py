"""Sweeps over the threshold at which drafts end, and over the search interval (KnapSpec, Figures 4 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import rayspec
from benchmarks.figures.runs import (
    Gain,
    Passage,
    Prompt,
    Spread,
    TimedStrategy,
    gain_of,
    latency_of,
    take_turns,
    write,
)
from benchmarks.figures.skips import every
from benchmarks.figures.tpt import Estimates, context_of, predict
from rayspec.choices import Choices
from rayspec.decode.strategy import Strategy
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.knapspec import Auto
from rayspec.strategies.self_sd import SelfSD
from rayspec.types import Plan, PlanRecord, no_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Results for one value of the swept option; None stands for KnapSpec's own rule. acceptance: share of the drafted
    tokens, None without any. search_share: share of the time in plan searches."""

    value: float | None
    speedup: Gain
    acceptance: float | None
    mean_draft_length: float
    search_share: float
    num_searches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Results of a sweep. settings: by rising value. own: KnapSpec's own rule."""

    settings: tuple[Setting, ...]
    own: Setting

    @property
    def best(self) -> Setting:
        return max(self.settings, key=lambda setting: setting.speedup.overall)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSweep:
    """A sweep with one plan. choices: of that plan. plain: tokens per second without drafts, measured interleaved."""

    choices: Choices
    thresholds: Sweep
    plain: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSweep:
    """Sweeps over search rules. intervals: search at a fixed interval in tokens. shares: search after a drift, within a
    share of the time. plain: tokens per second without drafts, measured interleaved."""

    intervals: Sweep
    shares: Sweep
    plain: Spread


def run_thresholds(
    llm: rayspec.LLM, estimates: Estimates, prompts: Sequence[Prompt], *, thresholds: Sequence[float], max_tokens: int
) -> ThresholdSweep:
    """Measure the plan with the highest predicted TPT. Its drafts end at a token with a probability below a threshold,
    or by KnapSpec's own rule. Raises ConfigError, and the error of a failed prompt."""
    latency, options = latency_of(llm), llm.config.speculation
    length = options.max_draft_tokens
    prediction = predict(llm, estimates.candidates, context=context_of(prompts, max_tokens), max_draft_tokens=length)
    best = estimates.candidates[int(prediction.tpt.max(axis=1).argmax())]
    plan = Plan(choices=best.choices, num_draft_tokens=length, source="figures")
    own = Auto(options.replace(gate=False, optimise_share=0.0), latency, known=[best], looks_up=False)
    cases = [_Case(value, _ending_below(plan, value)) for value in sorted(thresholds)]
    (*settings, of_own), plain = _measure(llm, [*cases, _Case(None, own)], prompts, max_tokens)
    return ThresholdSweep(choices=best.choices, thresholds=Sweep(settings=tuple(settings), own=of_own), plain=plain)


def run_intervals(
    llm: rayspec.LLM, prompts: Sequence[Prompt], *, intervals: Sequence[int], shares: Sequence[float], max_tokens: int
) -> IntervalSweep:
    """Measure KnapSpec with the engine's options, but with each of the search rules. Raises ConfigError, and the error
    of a failed prompt."""
    latency, options = latency_of(llm), llm.config.speculation
    unbounded = options.replace(optimise_share=1.0)
    knapspec = partial(Auto, latency=latency, looks_up=False)
    cases = [
        *(_Case(value, knapspec(unbounded, trigger=every(value))) for value in sorted(intervals)),
        *(_Case(value, knapspec(options.replace(optimise_share=value))) for value in sorted(shares)),
    ]
    own = _Case(None, knapspec(options))
    (*settings, of_own), plain = _measure(llm, [*cases, own], prompts, max_tokens)
    return IntervalSweep(
        intervals=Sweep(settings=tuple(settings[: len(intervals)]), own=of_own),
        shares=Sweep(settings=tuple(settings[len(intervals) :]), own=of_own),
        plain=plain,
    )


@dataclass(frozen=True, slots=True)
class _Case:
    value: float | None
    strategy: Strategy


def _ending_below(plan: Plan, threshold: float) -> SelfSD:
    return SelfSD(PlanRecord(plan=plan, reason="a sweep"), threshold, adapts=False)


def _measure(
    llm: rayspec.LLM, cases: Sequence[_Case], prompts: Sequence[Prompt], max_tokens: int
) -> tuple[list[Setting], Spread]:
    """Return a setting for each case, in the same order, and tokens per second of plain decoding."""
    plain = TimedStrategy(FixedPlan(no_draft(len(latency_of(llm).sublayers), "plain")))
    write(llm, plain, prompts[0], max_tokens=max_tokens)  # warm-up
    contenders = {str(index): TimedStrategy(case.strategy) for index, case in enumerate(cases)}
    passages = take_turns(llm, contenders | {"plain": plain}, prompts, max_tokens=max_tokens)
    settings = [
        _setting(case.value, contender, passages[name], passages["plain"])
        for case, (name, contender) in zip(cases, contenders.items(), strict=True)
    ]
    return settings, Spread.of([one.tokens_per_s for one in passages["plain"]])


def _setting(
    value: float | None, contender: TimedStrategy, written: Sequence[Passage], plain: Sequence[Passage]
) -> Setting:
    num_drafted = sum(one.num_drafted for one in written)
    return Setting(
        value=value,
        speedup=gain_of(written, plain),
        acceptance=sum(one.num_accepted for one in written) / num_drafted if num_drafted else None,
        mean_draft_length=num_drafted / max(1, sum(one.num_rounds for one in written)),
        search_share=sum(one.search_s for one in written) / max(1e-9, sum(one.seconds for one in written)),
        num_searches=sum(record.optimise_s > 0 for record in contender.records),
    )
