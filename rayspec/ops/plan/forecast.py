"""Simulated performance of layouts, with and without drafts, and the best of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from transformers import PretrainedConfig

from rayspec.choices import choices_of
from rayspec.ops.plan.gpus import parse_gpus
from rayspec.ops.plan.latency import Cut, Predicted, profiled, roofline
from rayspec.ops.plan.layouts import Layout, layouts
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Placement, for_model, place
from rayspec.planning.acceptance import best_choice
from rayspec.planning.latency import LatencyModel
from rayspec.planning.simulate import Drafting, Simulated, SimulatedLoad, simulate

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All layouts in order. candidates: those that fit, the best first. others: the rest, smallest shortage first.
    options: with the context that was planned for. measured_on: the profile's device, None for rooflines."""

    options: PlanOptions
    candidates: tuple[Forecast, ...]
    others: tuple[Layout, ...]
    measured_on: str | None = None

    @property
    def fits(self) -> bool:
        return bool(self.candidates)

    @property
    def missing_bytes(self) -> int:
        """Smallest shortage of the layouts that do not fit; 0 where all layouts fit."""
        return self.others[0].missing_bytes if self.others else 0

    @property
    def best(self) -> Layout:
        """Best layout that fits; if no layout fits, the layout with the smallest shortage of memory."""
        return self.candidates[0].layout if self.candidates else self.others[0]


def rank_layouts(
    config: PretrainedConfig,
    options: PlanOptions,
    *,
    profile: LatencyModel | None = None,
    max_replicas: int | None = None,
) -> Ranking:
    """Rank layouts by `options.goal`, and then by their number of GPUs. profile: of the model on one GPU; None:
    rooflines. Raises as `layouts` and `for_model`."""
    options = for_model(options, config)
    forecaster = Forecaster(config, options, profile)
    found = list(layouts(config, options, max_replicas=max_replicas))

    def cost(candidate: Forecast) -> tuple[float, int]:
        num_gpus = candidate.layout.num_gpus
        if options.goal == "latency":
            return candidate.alone_token_s, num_gpus
        best = candidate.best
        return best.dollars(num_gpus, 1.0) if options.goal == "cost" else -best.tokens_per_s.middle, num_gpus

    return Ranking(
        options=options,
        candidates=tuple(sorted((forecaster.candidate(layout) for layout in found if layout.fits), key=cost)),
        others=tuple(sorted((one for one in found if not one.fits), key=lambda layout: layout.missing_bytes)),
    )


def place_best(
    config: PretrainedConfig,
    options: PlacementOptions,
    *,
    gpus_per_node: int | None = None,
    max_replicas: int | None = None,
) -> tuple[Placement, ...]:
    """Return the layout that the options name, or else the layout that `rayspec plan` recommends by its defaults.

    In the second case `options.gpus` and `options.concurrency` are those of all copies together, and each placement has
    its share. There is one placement or, if copies are on different kinds of GPUs, one for each kind of copy. Raises as
    `place`.
    """
    options = for_model(options, config)
    if options.names_layout:
        return (place(config, options),)
    context = max(2, options.num_tokens)
    usual: int = PlanOptions.model_fields["output_tokens"].default
    own = {"context": context, "output_tokens": min(usual, context - 1), "gpus_per_node": gpus_per_node}
    layout = rank_layouts(config, PlanOptions(**options.load | own), max_replicas=max_replicas).best
    choice = "as `rayspec plan` recommends" if layout.fits else "which lack least of all layouts"
    return tuple(replace(group, choice=f"{layout.title}, {choice}") for group in layout.groups)


@dataclass(frozen=True, slots=True)
class _Case:
    """Equal replicas with the costs of their passes. drafting: None without drafts."""

    group: Placement
    predicted: Predicted
    drafting: Drafting | None


class Forecaster:
    """Simulates layouts of one model under one load."""

    def __init__(self, config: PretrainedConfig, options: PlanOptions, profile: LatencyModel | None) -> None:
        """Prepare simulations. options: with a context. profile: of the model on one GPU; None: rooflines."""
        self._config, self._options, self._profile = config, options, profile

    def candidate(self, layout: Layout) -> Forecast:
        """Simulate a layout with middle assumptions. Only `with_ranges` computes the range of throughput."""
        drafted = self._outcome(layout, drafts=True) if layout.sizes.splits else None
        return Forecast(layout=layout, plain=self._outcome(layout, drafts=False), drafted=drafted)

    def with_ranges(self, candidate: Forecast) -> Forecast:
        """Add the range of throughput, for the ends of acceptance and of bandwidth or of the profile's error."""
        return replace(
            candidate,
            plain=self._ranged(candidate.layout, candidate.plain),
            drafted=self._ranged(candidate.layout, candidate.drafted) if candidate.drafted else None,
        )

    def _ranged(self, layout: Layout, outcome: Outcome) -> Outcome:
        drafts = outcome.num_draft_tokens > 0
        rates = [self._rate(self._loaded(self._cases(layout, end, drafts=drafts))) for end in (0, 2)]
        if self._profile is not None:
            rates = [rates[0] / (1 + PROFILE_ERROR), rates[1] / (1 - PROFILE_ERROR)]
        middle = outcome.tokens_per_s.middle
        return replace(outcome, tokens_per_s=Range(low=min(middle, *rates), middle=middle, high=max(middle, *rates)))

    def _outcome(self, layout: Layout, *, drafts: bool) -> Outcome:
        cases = self._cases(layout, 1, drafts=drafts)
        loaded = self._loaded(cases)
        rate = self._rate(loaded)
        waits = [wait for _, found in loaded for wait in found.first_token_s]
        first = cases[0]
        return Outcome(
            num_draft_tokens=first.drafting.num_draft_tokens if first.drafting else 0,
            tokens_per_s=Range(low=rate, middle=rate, high=rate),
            first_token_s=median(waits) if waits else None,
            # Requests with answers of one token run one after the other.
            alone_first_token_s=self._simulated(first, 1, num_tokens=2).first_token_s[0],
            alone_token_s=1 / self._simulated(first, None, num_tokens=_ALONE_TOKENS).tokens_per_s,
            idle_share=fmean(share for _, found in loaded for share in found.idle_shares),
        )

    def _cases(self, layout: Layout, end: int, *, drafts: bool) -> list[_Case]:
        """Return a case per group of replicas. end: position in the assumed ranges: 0 low, 1 middle, 2 high."""
        options, size, cases = self._options, layout.tensor, []
        for group in layout.groups:
            gpus = parse_gpus(group.options.gpus)
            ranks = [gpus[first : first + size] for first in range(0, len(gpus), size)]
            cut = Cut(
                config=self._config.get_text_config(decoder=True),
                sizes=layout.sizes,
                layers=[stage.layers for stage in group.stages],
                gpus=[min(members, key=lambda gpu: gpu.bandwidth_gb_s) for members in ranks],
                tensor=layout.tensor,
                quantization=options.quantization,
                itemsize=getattr(torch, group.dtype).itemsize,
                context=options.num_tokens,
                hop_s=options.hop_us / 1e6,
                all_reduce_s=options.all_reduce_us / 1e6,
            )
            predicted = profiled(cut, self._profile) if self._profile else roofline(cut, EFFICIENCIES[end])
            drafting = self._drafting(group, predicted.decode, options.acceptances[end]) if drafts else None
            cases.append(_Case(group, predicted, drafting))
        return cases

    def _drafting(self, group: Placement, latency: LatencyModel, acceptance: float) -> Drafting:
        """Return drafts that skip evenly spread layers, with the best draft length for a cohort by itself."""
        options, concurrency = self._options, group.options.concurrency
        choices = choices_of(evenly_kept(len(latency.sublayers) // 2, options.skip))
        best = best_choice(
            [choices],
            [acceptance],
            latency,
            context=options.num_tokens,
            batch=math.ceil(concurrency / _num_cohorts(group, concurrency)),
            max_draft_tokens=options.max_draft_tokens,
            min_gain=-1.0,
        )
        return Drafting(choices=choices, num_draft_tokens=max(1, best.num_draft_tokens), acceptance=acceptance)

    def _rate(self, loaded: list[tuple[_Case, Simulated]]) -> float:
        return sum(case.group.num_copies * found.tokens_per_s for case, found in loaded)

    def _loaded(self, cases: list[_Case]) -> list[tuple[_Case, Simulated]]:
        """Return each case under its share of the load."""
        found, output_tokens = [], self._options.output_tokens
        for case in cases:
            concurrency, num_stages = case.group.options.concurrency, len(case.group.stages)
            num_tokens = min(output_tokens, max(_MIN_TOKENS, _TOKENS_TIMES_STAGES // num_stages))
            simulated = self._simulated(case, output_tokens, num_tokens * concurrency, concurrency)
            found.append((case, simulated))
        return found

    def _simulated(self, case: _Case, output_tokens: int | None, num_tokens: int, concurrency: int = 1) -> Simulated:
        """Simulate a case. output_tokens: of an answer. num_tokens: tokens after which the simulation ends."""
        options = self._options
        return simulate(
            case.predicted.decode,
            SimulatedLoad(
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


def _num_cohorts(group: Placement, concurrency: int) -> int:
    """Return the default of `ParallelOptions`, but at most the number of sequences."""
    return min(concurrency, 2 * len(group.stages) if len(group.stages) > 1 else 1)
