"""Does TPT (tokens per time) predict which plan is fast? Predict many plans, then run them (KnapSpec, Figure 2)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import pearsonr, spearmanr

import rayspec
from benchmarks.figures.runs import (
    Passage,
    Prompt,
    Spread,
    TimedStrategy,
    latency_of,
    take_turns,
    write,
)
from rayspec.choices import Choices, choices_of, num_leading_full
from rayspec.decode.search import Answer, Found, Question, Trial
from rayspec.decode.strategy import Ask, BatchState, RoundPlan
from rayspec.decode.work import RoundResult
from rayspec.planning.acceptance import DraftRates
from rayspec.planning.latency import LatencyModel
from rayspec.strategies.fixed import FixedPlan
from rayspec.strategies.knapspec import Candidate, KnapSpec
from rayspec.types import ConfigError, Plan, PlanRecord, no_draft

Keep = tuple[bool, ...]

_NUM_CONTROLS = 3
_SOUND = 0.5  # least estimated acceptance of a sound plan
_EXITS = (0.5, 0.75, 0.9)  # share of the layers before an early exit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """A plan with its prediction, made before it ran, and its measurement. Rates are tokens per second.

    tpt_as_accepted: the prediction from the observed acceptance. measured_tpt: median of measured_by_prompt.
    """

    choices: Choices
    origin: str
    num_draft_tokens: int
    estimated_acceptance: float
    predicted_tpt: float
    observed_acceptance: float
    tpt_as_accepted: float
    measured_tpt: float
    measured_by_prompt: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TptExperiment:
    """Predictions and measurements of many plans. context: tokens of a sequence in the middle of its output. plain_tpt:
    predicted for plain decoding. plain: measured for plain decoding, interleaved with the plans. num_tapped_tokens:
    tokens of other text, from which acceptance was estimated."""

    context: int
    num_tapped_tokens: int
    plain_tpt: float
    plain: Spread
    points: tuple[PlanPoint, ...]

    def correlations(self) -> dict[str, float | None]:
        """Return correlations with the measured tokens per second, by name; None if a quantity does not vary.

        Names with `ranks` are Spearman's correlation, all others Pearson's. Names with `sound` cover only plans with an
        estimated acceptance of at least a half: plans that are hardly accepted would dominate the correlation. Two
        names explain the remaining error. `tpt_as_accepted` uses the observed acceptance, so it has no error of the
        estimate. `between_prompts` is the mean correlation between the measurements of two prompts.
        """
        tpt, acceptance = attrgetter("predicted_tpt"), attrgetter("estimated_acceptance")
        sound = [point for point in self.points if point.estimated_acceptance >= _SOUND]
        found = {
            "tpt": _with_measured(pearsonr, self.points, tpt),
            "tpt_ranks": _with_measured(spearmanr, self.points, tpt),
            "acceptance": _with_measured(pearsonr, self.points, acceptance),
            "acceptance_ranks": _with_measured(spearmanr, self.points, acceptance),
            "tpt_of_sound": _with_measured(pearsonr, sound, tpt),
            "acceptance_of_sound": _with_measured(pearsonr, sound, acceptance),
            "tpt_as_accepted": _with_measured(pearsonr, self.points, attrgetter("tpt_as_accepted")),
            "between_prompts": self._agreement_of_prompts(),
        }
        return {name: None if math.isnan(value) else value for name, value in found.items()}

    @property
    def median_ratio(self) -> float:
        """Median over the plans of measured over predicted tokens per second."""
        return median(point.measured_tpt / point.predicted_tpt for point in self.points)

    def _agreement_of_prompts(self) -> float:
        runs = np.array([point.measured_by_prompt for point in self.points]).T
        pairs = [_correlation(pearsonr, runs[i], runs[j]) for i in range(len(runs)) for j in range(i)]
        return fmean(pairs) if pairs else float("nan")


def _with_measured(
    method: Callable[..., Any], points: Sequence[PlanPoint], value: Callable[[PlanPoint], float]
) -> float:
    return _correlation(method, [value(point) for point in points], [point.measured_tpt for point in points])


def _correlation(method: Callable[..., Any], first: ArrayLike, second: ArrayLike) -> float:
    """NaN if a variable is constant, or there are fewer than two values."""
    if min(len(np.unique(values)) for values in (first, second)) < 2:
        return float("nan")
    return float(method(first, second).statistic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Plans with estimates from taps, the hidden states at all sublayer boundaries. origins: by a plan's choices."""

    candidates: tuple[Candidate, ...]
    origins: dict[Choices, str]


def estimate_plans(
    llm: rayspec.LLM, prompts: Sequence[Prompt], *, num_plans: int, max_tokens: int, seed: int = 0
) -> Estimates:
    """Return at most `num_plans` plans (from a search, early exits, random), with estimates of their acceptance.

    The estimates come from plain decoding after the prompts. They exclude the tokens that the plan search used. Raises
    ConfigError if the text ends before the first estimate.
    """
    latency = latency_of(llm)
    strategy = KnapSpec(llm.config.speculation, latency)
    survey = _Survey(strategy, len(latency.sublayers), num_plans=num_plans, seed=seed)
    for prompt in prompts:
        write(llm, TimedStrategy(survey), prompt, max_tokens=max_tokens)
    if not survey.trials:
        raise ConfigError(f"option 'max_tokens' is {max_tokens}: the text ends before plans can be tried, raise it")
    return Estimates(candidates=survey.candidates(), origins=survey.origins)


class _Survey(FixedPlan):
    """Plain decoding. The first captured tokens serve to search for KnapSpec's plans, and all later captured tokens to
    estimate the acceptance of all plans."""

    def __init__(self, strategy: KnapSpec, num_sublayers: int, *, num_plans: int, seed: int) -> None:
        super().__init__(no_draft(num_sublayers, "survey"), capture=True)
        self.origins: dict[Choices, str] = {}
        self.trials: list[Found] = []
        self._strategy = strategy
        self._num_plans = num_plans
        self._rng = random.Random(seed)
        self._under_way: Future[Answer] | None = None
        self._num_new_tokens = 0

    def observe(
        self, state: BatchState, chosen: RoundPlan, result: RoundResult, num_tokens: int, seconds: float
    ) -> None:
        self._num_new_tokens += num_tokens

    def search(self, state: BatchState, ask: Ask) -> PlanRecord | None:
        if self._under_way is not None and self._under_way.done():
            self._take(self._under_way)
        question = self._question(state)
        if self._under_way is None and self._num_new_tokens >= question.num_tokens:
            self._under_way = ask(question)
            self._num_new_tokens = 0
        return None

    def candidates(self) -> tuple[Candidate, ...]:
        """Return every plan, with an estimate over all trials."""
        tried = zip(*(found.drafts for found in self.trials), strict=True)
        num_captured = sum(found.num_tokens for found in self.trials)
        return tuple(
            Candidate(one[0].choices, fmean(d.similarity for d in one), sum(d.num_agreed for d in one), num_captured)
            for one in tried
        )

    def _question(self, state: BatchState) -> Question:
        knapsack = self._strategy.question(state)
        if not self.origins:
            return knapsack
        return Trial(num_tokens=knapsack.num_tokens, patterns=list(self.origins))

    def _take(self, search: Future[Answer]) -> None:
        self._under_way = None
        if search.cancelled():
            return
        found = search.result()
        assert isinstance(found, Found)
        if self.origins:
            self.trials.append(found)
        else:
            patterns = [draft.choices for draft in found.drafts if num_leading_full(draft.choices) < len(draft.choices)]
            self.origins = plan_spread(patterns, len(self.chosen.plan.choices), self._num_plans, self._rng)


def plan_spread(found: Sequence[Choices], num_sublayers: int, num_plans: int, rng: random.Random) -> dict[Choices, str]:
    """Return at most `num_plans` plans with their origins. Up to half are plans of a search, evenly spaced in `found`.
    Then come early exits. The others skip random sublayers, from one to half of all."""
    chosen = np.unique(np.linspace(0, len(found) - 1, min(len(found), max(1, num_plans // 2))).astype(int))
    origins = {found[index]: "knapsack" for index in chosen.tolist()} if found else {}
    for share in _EXITS:
        exit_at = 2 * max(1, int(share * num_sublayers / 2))
        origins.setdefault(choices_of([index < exit_at for index in range(num_sublayers)]), "early exit")
    for _ in range(num_plans):  # some may be duplicates; the last line cuts any excess
        skipped = rng.sample(range(num_sublayers), rng.randint(1, max(1, num_sublayers // 2)))
        origins.setdefault(choices_of([index not in skipped for index in range(num_sublayers)]), "random")
    return dict(list(origins.items())[:num_plans])


@dataclass(frozen=True, slots=True)
class PlanPredictions:
    """Predictions for each candidate. tpt: [num_candidates, max_draft_tokens], tokens per second."""

    acceptance: Sequence[float]
    tpt: NDArray[np.float64]


def predict(
    llm: rayspec.LLM, candidates: Sequence[Candidate], *, context: int, max_draft_tokens: int
) -> PlanPredictions:
    """Return KnapSpec's predictions before any observation, for drafts that always reach their length."""
    latency = latency_of(llm)
    acceptance = KnapSpec(llm.config.speculation, latency).acceptance_of(candidates)
    patterns = [candidate.choices for candidate in candidates]
    rates = DraftRates(latency=latency, context=context, batch=1, max_draft_tokens=max_draft_tokens)
    return PlanPredictions(acceptance, rates.tokens_per_time(patterns, acceptance))


def run_tpt(
    llm: rayspec.LLM,
    estimates: Estimates,
    prompts: Sequence[Prompt],
    *,
    draft_lengths: Sequence[int],
    max_tokens: int,
    seed: int = 0,
) -> TptExperiment:
    """Predict every plan at every draft length, then measure it on every prompt, interleaved with plain decoding.

    No rule ends drafts early, because the prediction would have to include its effect.
    """
    latency, candidates = latency_of(llm), estimates.candidates
    context = context_of(prompts, max_tokens)
    prediction = predict(llm, candidates, context=context, max_draft_tokens=max(draft_lengths))
    kinds = list(itertools.product(range(len(candidates)), draft_lengths))
    plain = no_draft(len(latency.sublayers), "plain")
    controls = {f"plain {index}": plain for index in range(_NUM_CONTROLS)}
    plans = {
        f"{index}, {length} tokens": Plan(choices=candidates[index].choices, num_draft_tokens=length, source="figures")
        for index, length in kinds
    }
    contenders = {name: TimedStrategy(FixedPlan(plan)) for name, plan in (plans | controls).items()}
    write(llm, contenders["plain 0"], prompts[0], max_tokens=max_tokens)  # warm-up
    passages = take_turns(llm, contenders, prompts, max_tokens=max_tokens, seed=seed)
    points = [
        _point(latency, plan, estimates, prediction, index, passages[name], context)
        for (name, plan), (index, _) in zip(plans.items(), kinds, strict=True)
    ]
    return TptExperiment(
        context=context,
        num_tapped_tokens=candidates[0].num_captured,
        plain_tpt=1 / latency.decode_step_s(context=context, batch=1),
        plain=Spread.of([one.tokens_per_s for name in controls for one in passages[name]]),
        points=tuple(points),
    )


def context_of(prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Return the mean length of a sequence in the middle of its output."""
    return round(fmean(map(len, prompts))) + max_tokens // 2


def _point(
    latency: LatencyModel,
    plan: Plan,
    estimates: Estimates,
    prediction: PlanPredictions,
    index: int,
    written: Sequence[Passage],
    context: int,
) -> PlanPoint:
    num_tested = sum(one.num_tested for one in written)
    observed = sum(one.num_accepted for one in written) / num_tested if num_tested else 0.0
    length = plan.num_draft_tokens
    rates = DraftRates(latency=latency, context=context, batch=1, max_draft_tokens=length)
    known = rates.tokens_per_time([plan.choices], [observed])
    return PlanPoint(
        choices=plan.choices,
        origin=estimates.origins[plan.choices],
        num_draft_tokens=length,
        estimated_acceptance=prediction.acceptance[index],
        predicted_tpt=float(prediction.tpt[index, length - 1]),
        observed_acceptance=observed,
        tpt_as_accepted=float(known[0, length - 1]),
        measured_tpt=median(one.tokens_per_s for one in written),
        measured_by_prompt=tuple(one.tokens_per_s for one in written),
    )
