"""Simulated performance of a layout, with and without drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from transformers import PretrainedConfig

from rayspec.choices import choices_of
from rayspec.ops.plan.latency import Cut, Predicted, profiled, roofline
from rayspec.ops.plan.layouts import Layout, ReplicaGroup
from rayspec.ops.plan.options import PlanOptions
from rayspec.planning.acceptance import best_choice
from rayspec.planning.latency import LatencyModel
from rayspec.planning.simulate import Drafting, Simulated, Workload, simulate

# Share of the bandwidth that good engines reach: low, middle, high.
EFFICIENCIES = (0.63, 0.72, 0.80)
# How far predictions from a profile may be off.
PROFILE_ERROR = 0.2
# Simulated tokens of a sequence: enough for stable rates. More stages make more events, so they get fewer tokens.
_MIN_TOKENS, _TOKENS_TIMES_STAGES = 32, 2048
_ALONE_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A prediction with its range."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predicted performance of a layout. num_draft_tokens: 0 without drafts.

    tokens_per_s: total of all replicas. first_token_s: median under that load; None where no request came during the
    simulation. alone_first_token_s, alone_token_s: of a request that has a replica to itself. idle_share: mean over the
    stages.
    """

    num_draft_tokens: int
    tokens_per_s: Range
    first_token_s: float | None
    alone_first_token_s: float
    alone_token_s: float
    idle_share: float

    def dollars(self, num_gpus: int, price: float) -> float:
        """Return the dollars for a million output tokens, at `price` dollars per GPU hour."""
        return num_gpus * price / 3600 * 1e6 / self.tokens_per_s.middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast for a layout. drafted: None where layers do not split into sublayers that drafts could skip."""

    layout: Layout
    plain: Outcome
    drafted: Outcome | None

    @property
    def best(self) -> Outcome:
        """Outcome with the higher throughput, by the middle values."""
        if self.drafted is None or self.drafted.tokens_per_s.middle <= self.plain.tokens_per_s.middle:
            return self.plain
        return self.drafted

    @property
    def alone_token_s(self) -> float:
        """Seconds per token of a request alone, with or without drafts, whichever is faster."""
        outcomes = [self.plain, *([self.drafted] if self.drafted else [])]
        return min(outcome.alone_token_s for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class _Case:
    """A group of replicas with the costs of its passes. drafting: None without drafts."""

    group: ReplicaGroup
    predicted: Predicted
    drafting: Drafting | None


class Forecaster:
    """Simulates layouts of one model under one load."""

    def __init__(self, config: PretrainedConfig, options: PlanOptions, profile: LatencyModel | None) -> None:
        """Prepare simulations. profile: of the model on one GPU; None: rooflines."""
        self._config, self._options, self._profile = config, options, profile

    def candidate(self, layout: Layout) -> Forecast:
        """Simulate a layout with middle assumptions. Only `with_ranges` computes the range of throughput."""
        plain = self._cases(layout, 1, drafts=False)
        drafted = self._outcome(layout, self._cases(layout, 1, drafts=True)) if layout.sizes.splits else None
        return Forecast(layout=layout, plain=self._outcome(layout, plain), drafted=drafted)

    def with_ranges(self, candidate: Forecast) -> Forecast:
        """Add the range of throughput, for the ends of acceptance and of bandwidth or of the profile's error."""
        return replace(
            candidate,
            plain=self._ranged(candidate.layout, candidate.plain),
            drafted=self._ranged(candidate.layout, candidate.drafted) if candidate.drafted else None,
        )

    def _ranged(self, layout: Layout, outcome: Outcome) -> Outcome:
        drafts = outcome.num_draft_tokens > 0
        rates = [
            sum(case.group.count * self._loaded(case).tokens_per_s for case in self._cases(layout, end, drafts=drafts))
            for end in (0, 2)
        ]
        if self._profile is not None:
            rates = [rates[0] / (1 + PROFILE_ERROR), rates[1] / (1 - PROFILE_ERROR)]
        middle = outcome.tokens_per_s.middle
        return replace(outcome, tokens_per_s=Range(low=min(middle, *rates), middle=middle, high=max(middle, *rates)))

    def _cases(self, layout: Layout, end: int, *, drafts: bool) -> list[_Case]:
        """Return a case per group of replicas. end: position in the assumed ranges: 0 low, 1 middle, 2 high."""
        cases = []
        for group in layout.groups:
            predicted = self._predicted(layout, group, end)
            drafting = self._drafting(group, predicted.decode, self._options.acceptances[end]) if drafts else None
            cases.append(_Case(group, predicted, drafting))
        return cases

    def _predicted(self, layout: Layout, group: ReplicaGroup, end: int) -> Predicted:
        options, size = self._options, layout.tensor
        ranks = [group.gpus[first : first + size] for first in range(0, len(group.gpus), size)]
        cut = Cut(
            config=self._config.get_text_config(decoder=True),
            sizes=layout.sizes,
            layers=[stage.layers for stage in group.placement.stages],
            gpus=[min(members, key=lambda gpu: gpu.bandwidth_gb_s) for members in ranks],
            tensor=layout.tensor,
            quantization=options.quantization,
            itemsize=getattr(torch, group.placement.dtype).itemsize,
            context=options.num_tokens,
            hop_s=options.hop_us / 1e6,
            all_reduce_s=options.all_reduce_us / 1e6,
        )
        return profiled(cut, self._profile) if self._profile else roofline(cut, efficiency=EFFICIENCIES[end])

    def _drafting(self, group: ReplicaGroup, latency: LatencyModel, acceptance: float) -> Drafting:
        """Return drafts that skip evenly spread layers, with the best draft length for a cohort by itself."""
        options = self._options
        choices = choices_of(evenly_kept(len(latency.sublayers) // 2, options.skip))
        best = best_choice(
            [choices],
            [acceptance],
            latency,
            context=options.num_tokens,
            batch=math.ceil(group.concurrency / _num_cohorts(group, group.concurrency)),
            max_draft_tokens=options.max_draft_tokens,
            min_gain=-1.0,
        )
        return Drafting(choices=choices, num_draft_tokens=max(1, best.num_draft_tokens), acceptance=acceptance)

    def _outcome(self, layout: Layout, cases: Sequence[_Case]) -> Outcome:
        loaded = [self._loaded(case) for case in cases]
        rate = sum(case.group.count * found.tokens_per_s for case, found in zip(cases, loaded, strict=True))
        waits = [wait for found in loaded for wait in found.first_token_s]
        drafting = cases[0].drafting
        return Outcome(
            num_draft_tokens=drafting.num_draft_tokens if drafting else 0,
            tokens_per_s=Range(low=rate, middle=rate, high=rate),
            first_token_s=median(waits) if waits else None,
            alone_first_token_s=self._alone_first_token_s(cases[0]),
            alone_token_s=1 / self._alone(cases[0]).tokens_per_s,
            idle_share=fmean(share for found in loaded for share in found.idle_shares),
        )

    def _loaded(self, case: _Case) -> Simulated:
        options, group = self._options, case.group
        num_stages = len(group.placement.stages)
        num_tokens = min(options.output_tokens, max(_MIN_TOKENS, _TOKENS_TIMES_STAGES // num_stages))
        return self._simulated(case, options.output_tokens, num_tokens * group.concurrency, group.concurrency)

    def _alone(self, case: _Case) -> Simulated:
        return self._simulated(case, None, _ALONE_TOKENS)

    def _alone_first_token_s(self, case: _Case) -> float:
        """Return the seconds to the first token if requests with answers of one token run one after the other."""
        return self._simulated(case, 1, 2).first_token_s[0]

    def _simulated(self, case: _Case, output_tokens: int | None, num_tokens: int, concurrency: int = 1) -> Simulated:
        """Simulate a case. output_tokens: of an answer. num_tokens: tokens after which the simulation ends."""
        options = self._options
        return simulate(
            case.predicted.decode,
            Workload(
                prompt_tokens=options.num_tokens - options.output_tokens,
                output_tokens=output_tokens,
                concurrency=concurrency,
                chunk_tokens=options.max_num_batched_tokens,
            ),
            cohorts=_num_cohorts(case.group, concurrency),
            drafting=case.drafting,
            prefill=case.predicted.prefill,
            num_tokens=num_tokens,
            seed=options.seed,
        )


def evenly_kept(num_layers: int, skip: float) -> tuple[bool, ...]:
    """Return for each sublayer whether drafts keep it. A share `skip` of the layers is left out, spread evenly, with
    both sublayers each. The first layer is kept; of two or more layers, at least one is left out."""
    num_kept = min(max(1, round(num_layers * (1 - skip))), max(1, num_layers - 1))
    kept = {math.floor(index * num_layers / num_kept) for index in range(num_kept)}
    return tuple(layer in kept for layer in range(num_layers) for _ in range(2))


def _num_cohorts(group: ReplicaGroup, concurrency: int) -> int:
    """Return the default of `ParallelOptions`, but at most the number of sequences."""
    num_stages = len(group.placement.stages)
    return min(concurrency, 2 * num_stages if num_stages > 1 else 1)
