"""Choice of a layout, for `rayspec plan`, `rayspec placement` and `rayspec k8s`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from rayspec.ops.plan.forecast import Forecast, Forecaster
from rayspec.ops.plan.layouts import Layout, layouts
from rayspec.ops.plan.options import Goal, PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Placement, for_model, place
from rayspec.planning.latency import LatencyModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All layouts in order. candidates: those that fit, the best first. others: the rest, smallest shortage first."""

    candidates: tuple[Forecast, ...]
    others: tuple[Layout, ...]

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
    """Rank layouts by `options.goal`. profile: of the model on one GPU; None: rooflines. Raises as `layouts` and
    `for_model`."""
    options = for_model(options, config)
    forecaster = Forecaster(config, options, profile)
    found = list(layouts(config, options, max_replicas=max_replicas))
    candidates = [forecaster.candidate(layout) for layout in found if layout.fits]
    others = [layout for layout in found if not layout.fits]
    return Ranking(
        candidates=tuple(sorted(candidates, key=lambda candidate: _rank(candidate, options.goal))),
        others=tuple(sorted(others, key=lambda layout: layout.missing_bytes)),
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
    layout = rank_layouts(config, _plan_options(options, gpus_per_node), max_replicas=max_replicas).best
    choice = f"{layout.title}, as `rayspec plan` recommends"
    if not layout.fits:
        choice = f"{layout.title}, which lack least of all layouts"
    return tuple(replace(group.placement, choice=choice, num_copies=group.count) for group in layout.groups)


def _plan_options(options: PlacementOptions, gpus_per_node: int | None) -> PlanOptions:
    context = max(2, options.num_tokens)
    usual: int = PlanOptions.model_fields["output_tokens"].default
    return PlanOptions(
        gpus=options.gpus,
        context=context,
        output_tokens=min(usual, context - 1),
        concurrency=options.concurrency,
        quantization=options.quantization,
        draft_weights=options.draft_weights,
        dtype=options.dtype,
        gpus_per_node=gpus_per_node,
    )


def _rank(candidate: Forecast, goal: Goal) -> tuple[float, int]:
    """Return a sort key: the goal's measure, then the number of GPUs. Less is better."""
    best, num_gpus = candidate.best, candidate.layout.num_gpus
    by_goal: dict[Goal, Callable[[], float]] = {
        "throughput": lambda: -best.tokens_per_s.middle,
        "latency": lambda: candidate.alone_token_s,
        "cost": lambda: best.dollars(num_gpus, 1.0),
    }
    return by_goal[goal](), num_gpus
