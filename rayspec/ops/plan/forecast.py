"""Simulated performance of layouts, with and without drafts, and the best of them. Passes cost what rooflines say, or a
profile of the whole model on one device."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import PretrainedConfig

from rayspec.choices import choices_of
from rayspec.config import SpeculationOptions
from rayspec.model.sizes import BYTES_PER_LINEAR_WEIGHT, LayerSizes
from rayspec.ops.plan.gpus import REACHED, Gpu, parse_gpus
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Layout, Placement, for_model, layouts, place
from rayspec.planning.acceptance import DraftRates
from rayspec.planning.latency import DRAFT_HEAD, HEAD, Curve, LatencyModel, StaleProfileError
from rayspec.planning.simulate import Drafting, Simulated, SimulatedLoad, simulate
from rayspec.types import ConfigError

_GB = 10**9
# Share of the bandwidth that good engines reach: 0.63 to 0.80. On an H100 this one has reached 0.62 (batch 64) to 0.70.
EFFICIENCY = 0.68

# Simulated tokens of a sequence: enough for stable rates. More stages make more events, so they get fewer tokens.
_MIN_TOKENS, _TOKENS_TIMES_STAGES = 32, 2048
_ALONE_TOKENS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Predicted performance of a layout. num_draft_tokens: 0 without drafts. tokens_per_s: total of all replicas.
    first_token_s: median under that load; None where no request came during the simulation. alone_first_token_s,
    alone_token_s: of a request that has a replica to itself. idle_share: mean over the stages."""

    num_draft_tokens: int
    tokens_per_s: float
    first_token_s: float | None
    alone_first_token_s: float
    alone_token_s: float
    idle_share: float

    def dollars(self, num_gpus: int, price: float) -> float:
        """Return the dollars for a million output tokens, at `price` dollars per GPU hour."""
        return num_gpus * price / 3600 * 1e6 / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast for a layout. drafted: None where layers do not split into sublayers that drafts could skip."""

    layout: Layout
    plain: Performance
    drafted: Performance | None

    @property
    def best(self) -> Performance:
        return max(filter(None, (self.plain, self.drafted)), key=lambda one: one.tokens_per_s)

    @property
    def alone_token_s(self) -> float:
        """Seconds per token of a request alone, with or without drafts, whichever is faster."""
        return min(one.alone_token_s for one in (self.plain, self.drafted) if one is not None)


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


def rank_layouts(config: PretrainedConfig, options: PlanOptions, *, max_replicas: int | None = None) -> Ranking:
    """Rank layouts by `options.goal`, and then by their number of GPUs. Raises as `layouts` and `for_model`, and
    ConfigError for a profile that cannot be read or is of another model."""
    options = for_model(options, config)
    profile, key = load_profile(options.profile) if options.profile else (None, {})
    found = list(layouts(config, options, max_replicas=max_replicas))

    def cost(candidate: Forecast) -> tuple[float, int]:
        num_gpus = candidate.layout.num_gpus
        if options.goal == "latency":
            return candidate.alone_token_s, num_gpus
        best = candidate.best
        return best.dollars(num_gpus, 1.0) if options.goal == "cost" else -best.tokens_per_s, num_gpus

    candidates = []
    for layout in (one for one in found if one.fits):
        plain = _performance(config, options, layout, profile, drafts=False)
        drafted = _performance(config, options, layout, profile, drafts=True) if layout.sizes.splits else None
        candidates.append(Forecast(layout=layout, plain=plain, drafted=drafted))
    return Ranking(
        options=options,
        candidates=tuple(sorted(candidates, key=cost)),
        others=tuple(sorted((one for one in found if not one.fits), key=lambda layout: layout.missing_bytes)),
        measured_on=str(key.get("device", "an unknown device")) if profile else None,
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


def _performance(
    config: PretrainedConfig, options: PlanOptions, layout: Layout, profile: LatencyModel | None, *, drafts: bool
) -> Performance:
    """Simulate each group of equal replicas under its share of the load, and one replica with a single request."""
    costs = [predicted(config, options, layout, group, profile) for group in layout.groups]
    # The default of `ParallelOptions`, but at most the number of sequences.
    cohorts = min(layout.concurrency, 2 * layout.stages if layout.stages > 1 else 1)
    batch = math.ceil(layout.concurrency / cohorts)
    draftings = [_drafting(options, decode, batch) if drafts else None for decode, _ in costs]

    def simulated(number: int, output_tokens: int | None, num_tokens: int, *, alone: bool = True) -> Simulated:
        """Simulate a replica of a group. num_tokens: tokens of all sequences after which the simulation ends."""
        load = SimulatedLoad(
            prompt_tokens=options.num_tokens - options.output_tokens,
            output_tokens=output_tokens,
            concurrency=1 if alone else layout.concurrency,
            chunk_tokens=options.max_num_batched_tokens,
        )
        decode, prefill = costs[number]
        how = {"cohorts": 1 if alone else cohorts, "num_tokens": num_tokens}
        return simulate(decode, load, drafting=draftings[number], prefill=prefill, **how)

    num_tokens = min(options.output_tokens, max(_MIN_TOKENS, _TOKENS_TIMES_STAGES // layout.stages))
    in_all, groups = num_tokens * layout.concurrency, range(len(layout.groups))
    loaded = [simulated(number, options.output_tokens, in_all, alone=False) for number in groups]
    waits = [wait for one in loaded for wait in one.first_token_s]
    first = draftings[0]
    return Performance(
        num_draft_tokens=first.num_draft_tokens if first else 0,
        tokens_per_s=sum(group.num_copies * one.tokens_per_s for group, one in zip(layout.groups, loaded, strict=True)),
        first_token_s=median(waits) if waits else None,
        # Requests with answers of one token run one after the other.
        alone_first_token_s=simulated(0, 1, 2).first_token_s[0],
        alone_token_s=1 / simulated(0, None, _ALONE_TOKENS).tokens_per_s,
        idle_share=fmean(share for one in loaded for share in one.idle_shares),
    )


def _drafting(options: PlanOptions, latency: LatencyModel, batch: int) -> Drafting:
    """Return drafts with the best draft length for a cohort by itself. They leave out evenly spread layers, with both
    sublayers each. The first layer is kept; of two or more layers, at least one is left out."""
    num_layers = len(latency.sublayers) // 2
    num_kept = min(max(1, round(num_layers * (1 - options.skip))), max(1, num_layers - 1))
    kept = {math.floor(index * num_layers / num_kept) for index in range(num_kept)}
    choices = choices_of([layer in kept for layer in range(num_layers) for _ in range(2)])
    longest = SpeculationOptions.model_fields["max_draft_tokens"].default
    rates = DraftRates(latency=latency, context=options.num_tokens, batch=batch, max_draft_tokens=longest)
    best = rates.best_choice([choices], [options.acceptance], min_gain=-1.0)
    return Drafting(choices=choices, num_draft_tokens=max(1, best.num_draft_tokens), acceptance=options.acceptance)


def predicted(
    config: PretrainedConfig,
    options: PlanOptions,
    layout: Layout,
    group: Placement,
    profile: LatencyModel | None = None,
) -> tuple[LatencyModel, LatencyModel]:
    """Return the costs of decoding, and those of prompts, for a replica of the group. profile: of the whole model on
    one device, which is split into stages; None: rooflines.

    Windowed attention is assumed to read the same share of every context as of `options.context`. Of a stage's GPUs,
    the weakest decides. Ranks share sublayers evenly, and all-reduce the states of a pass once per sublayer. Raises
    ConfigError when the profile is of another model.
    """
    text = config.get_text_config(decoder=True)
    gpus, num_ranks = parse_gpus(group.options.gpus), layout.tensor
    weakest = [
        min(gpus[first : first + num_ranks], key=lambda gpu: gpu.bandwidth_gb_s)
        for first in range(0, len(group.stages) * num_ranks, num_ranks)
    ]
    itemsize = getattr(torch, group.dtype).itemsize
    # A rank sends and receives all states nearly twice.
    row_bytes = 2 * (num_ranks - 1) / num_ranks * int(text.hidden_size) * itemsize

    def exchanging(curve: Curve, gpu: Gpu) -> Curve:
        """Add the all-reduce between the ranks of a stage to a curve."""
        if num_ranks == 1:
            return curve
        sent_s = [options.all_reduce_us / 1e6 + rows * row_bytes / (gpu.link_gb_s * _GB) for rows in curve.rows]
        return replace(curve, base_s=tuple(a + b for a, b in zip(curve.base_s, sent_s, strict=True)))

    sublayers = [
        (stage, layer, index, num_bytes)
        for stage, placed in enumerate(group.stages)
        for layer in (layout.sizes.layers[number] for number in placed.layers)
        for index, num_bytes in enumerate(layer.sublayer_bytes)
    ]
    stages, hop_s = tuple(stage for stage, *_ in sublayers), options.hop_us / 1e6
    if profile is not None:
        curves = dict(profile.curves)
        for name, curve in profile.curves.items():  # all but the heads are shared by the ranks
            if name not in (profile.head, profile.head.replace(HEAD, DRAFT_HEAD, 1)):
                base_s = tuple(base_s / num_ranks for base_s in curve.base_s)
                of_rank = replace(curve, base_s=base_s, kv_s=curve.kv_s / num_ranks, score_s=curve.score_s / num_ranks)
                curves[name] = exchanging(of_rank, weakest[0])
        if len(profile.sublayers) != len(sublayers):
            raise ConfigError(
                f"option 'profile' is of a model with {len(profile.sublayers)} sublayers, and this one has "
                f"{len(sublayers)}: profile the same model"
            )
        model = replace(profile, curves=curves, stages=stages, hop_s=hop_s, link_s=())
        return model, model
    num_heads = int(getattr(text, "num_attention_heads", 1))
    # Per prompt row and attended token, in one layer: for the scores and the weighted sum.
    score_flops = 4 * num_heads * int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    bytes_per_weight = BYTES_PER_LINEAR_WEIGHT[options.quantization] if options.quantization else itemsize
    decode: dict[str, Curve] = {}
    prefill: dict[str, Curve] = {}
    names = []
    for stage, layer, index, num_bytes in sublayers:
        gpu, context = weakest[stage], options.num_tokens
        # The share of the context that the layer's attention reads.
        has_keys = index == 0 and layer.kv_bytes_per_token > 0
        seen = layer.kv_bytes_read(context) / (layer.kv_bytes_per_token * context) if has_keys else 0
        name = f"{num_bytes} bytes, {seen:g} of context, {gpu.label}"
        mixture = layer if index == len(layer.sublayer_bytes) - 1 else None
        base = exchanging(_weights(num_bytes, bytes_per_weight, gpu, mixture), gpu)
        decode[name] = replace(base, kv_s=seen * layer.kv_bytes_per_token / (gpu.bandwidth_gb_s * _GB * EFFICIENCY))
        prefill[name] = replace(base, score_s=seen * score_flops / num_ranks / (gpu.flops * REACHED))
        names.append(name)
    head = {HEAD: _weights(layout.sizes.head_bytes, itemsize, weakest[-1])}  # every rank reads all of it
    unused = (0.0,) * len(names)
    about: dict[str, Any] = {"head": HEAD, "hop_s": hop_s, "stages": stages, "transfer_s": unused}
    model = LatencyModel(sublayers=tuple(names), curves=decode | head, **about)
    return model, replace(model, curves=prefill | head)


def load_profile(path: Path) -> tuple[LatencyModel, dict[str, Any]]:
    """Return a profile that `rayspec profile` has saved, and its key: the measured setup. Raises ConfigError."""
    try:
        key = json.loads(path.read_text(encoding="utf-8"))["key"]
        return LatencyModel.load(path, key), key
    except OSError as error:
        raise ConfigError(f"option 'profile' is {str(path)!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError, StaleProfileError) as error:
        raise ConfigError(
            f"option 'profile' is {str(path)!r}, which is no profile that can be read ({error}): run rayspec profile"
        ) from error


def _weights(num_bytes: int, bytes_per_weight: float, gpu: Gpu, mixture: LayerSizes | None = None) -> Curve:
    """Return a roofline: reading at `EFFICIENCY` of the bandwidth, until multiplying at `REACHED` of the peak takes
    longer, which is proportional to the rows. mixture: the layer of an MLP, which may have experts."""
    bytes_per_s = gpu.bandwidth_gb_s * _GB * EFFICIENCY
    knee, rows = bytes_per_weight * gpu.flops * REACHED / (2 * bytes_per_s), [1]
    if mixture is not None and mixture.expert_bytes:
        knee *= num_bytes / (num_bytes - mixture.expert_bytes_unread(1))
        rows = [2**power for power in range(round(knee).bit_length() - 1)] or rows
    unread = [0.0 if mixture is None else mixture.expert_bytes_unread(number) for number in rows]
    seconds = [(num_bytes - each) / bytes_per_s for each in (*unread, 0.0, -num_bytes)]
    return Curve(rows=(*rows, round(knee), 2 * round(knee)), base_s=tuple(seconds))
