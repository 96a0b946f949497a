"""The sublayers that KnapSpec's plans skip, by context (KnapSpec, Figures 3 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import rayspec
from benchmarks.figures.runs import Prompt, TimedStrategy, latency_of, take_turns
from rayspec.choices import SKIP, Choices
from rayspec.planning.latency import LatencyModel
from rayspec.planning.learning import Trigger
from rayspec.strategies.knapspec import Auto


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUse:
    """A plan in use. choices: of each sublayer. num_tokens: tokens generated while the plan was in use."""

    choices: Choices
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSkips:
    """The plans in use at a context, the mean prompt length. num_plain_tokens: tokens generated without a plan.
    attention_s, mlp_s: seconds of all attention and all MLP sublayers in a decode step, by the latency model."""

    context: int
    plans: tuple[PlanUse, ...]
    num_plain_tokens: int
    attention_s: float
    mlp_s: float

    @property
    def attention_skipped(self) -> float | None:
        """Share of skipped attention sublayers, averaged over the tokens; None without a plan."""
        return share_skipped(self.plans, slice(0, None, 2))

    @property
    def mlp_skipped(self) -> float | None:
        return share_skipped(self.plans, slice(1, None, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipExperiment:
    """Skips by context. attention_outweighs_from: context from which attention takes longer than MLP; None: never."""

    by_context: tuple[ContextSkips, ...]
    attention_outweighs_from: float | None

    @property
    def plans(self) -> tuple[PlanUse, ...]:
        return tuple(plan for one in self.by_context for plan in one.plans)


def run_skips(
    llm: rayspec.LLM,
    prompts_of: Callable[[int], Sequence[Prompt]],
    *,
    contexts: Sequence[int],
    interval: int,
    max_tokens: int,
) -> SkipExperiment:
    """Complete prompts of each context by KnapSpec, with a search every `interval` tokens and without gate or budget.
    Raises ConfigError, and the error of a failed prompt."""
    latency = latency_of(llm)
    by_context = []
    for context in contexts:
        prompts = prompts_of(context)
        contender = TimedStrategy(free_knapspec(llm, interval))
        written = take_turns(llm, {"knapspec": contender}, prompts, max_tokens=max_tokens)["knapspec"]
        plans = [
            PlanUse(choices=record.plan.choices, num_tokens=record.num_tokens)
            for record in contender.records
            if record.plan.drafts and record.num_tokens
        ]
        length = round(float(np.mean([len(prompt) for prompt in prompts])))
        seconds = latency.sublayers_s(rows=1, context=length, batch=1)
        by_context.append(
            ContextSkips(
                context=length,
                plans=tuple(plans),
                num_plain_tokens=sum(one.num_tokens for one in written) - sum(plan.num_tokens for plan in plans),
                attention_s=float(seconds[::2].sum()),
                mlp_s=float(seconds[1::2].sum()),
            )
        )
    return SkipExperiment(by_context=tuple(by_context), attention_outweighs_from=attention_outweighs_from(latency))


def free_knapspec(llm: rayspec.LLM, interval: int) -> Auto:
    """Return a KnapSpec that searches every `interval` tokens at any cost, and drafts if a gain is predicted."""
    options = llm.config.speculation.replace(gate=False, optimise_share=1.0)
    return Auto(options, latency_of(llm), looks_up=False, trigger=every(interval))


def every(interval: int) -> Trigger:
    """Return a trigger that wants a search after each `interval` tokens of a sequence, even without a change."""
    trigger = Trigger()
    trigger.cooldown_tokens = trigger.patience_tokens = trigger.max_patience_tokens = interval
    return trigger


def attention_outweighs_from(latency: LatencyModel) -> float | None:
    """Return the context from which the attention sublayers of a decode step take longer than its MLP sublayers; None
    if never. It is exact, as latencies are linear in the context."""

    def surplus(context: int) -> float:
        seconds = latency.sublayers_s(rows=1, context=context, batch=1)
        return float(seconds[::2].sum() - seconds[1::2].sum())

    start, slope = surplus(0), surplus(1) - surplus(0)
    if start >= 0:
        return 0.0
    return -start / slope if slope > 0 else None


def share_skipped(plans: Sequence[PlanUse], which: slice) -> float | None:
    """Return the share of `which` sublayers that is skipped, averaged over the tokens; None without a plan."""
    return float(skip_frequency(plans)[which].mean()) if plans else None


def skip_frequency(plans: Sequence[PlanUse]) -> NDArray[np.float64]:
    """Return [num_sublayers]: share of the tokens generated while drafts skipped the sublayer. Raises ValueError
    without plans."""
    skipped = np.array([[choice == SKIP for choice in plan.choices] for plan in plans], float)
    frequency: NDArray[np.float64] = np.average(skipped, axis=0, weights=[plan.num_tokens for plan in plans])
    return frequency
