"""Figures of experiments, legible at a width of 800 pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.figures.bench import BenchSpeedUps, SpeedUp
from benchmarks.figures.skips import SkipExperiment, skip_frequency
from benchmarks.figures.sweeps import IntervalSweep, Sweep, ThresholdSweep
from benchmarks.figures.tpt import PlanPoint, TptExperiment

ATTENTION, MLP, SKIPPED, PLAIN, INK = "#2f6db5", "#e08a2b", "#eef0f2", "#8a8f98", "#30343b"
_DPI = 200
_WIDTH_IN = 8.0
_SMALL, _NORMAL, _LARGE = 9, 10, 11.5
_STRATEGY_COLORS = ("#2f6db5", "#e08a2b", "#3a9d76", "#b4497e", "#7a63b8", "#c2b02a", "#4fb0c6", "#8c5a3c", "#d1605e")
_MARKERS = "osD^vP*Xhd"
_ORIGINS = {"knapsack": ("o", "of the search"), "early exit": ("s", "early exits"), "random": ("^", "random")}


def plot_speed_up_by_context(bench: BenchSpeedUps, path: Path) -> None:
    """Draw a panel for each domain."""
    with _figure(path, "Speed-up over plain decoding", panels=len(bench.by_context)) as axes:
        everything = [one for speed_ups in bench.by_context.values() for one in speed_ups]
        colors = _colors(everything)
        top = 1.05 * max((one.most for one in everything), default=1.0)
        for panel, (domain, speed_ups) in zip(axes, bench.by_context.items(), strict=True):
            panel.set_title(domain, fontsize=_LARGE, color=INK)
            _draw_speed_ups(panel, speed_ups, colors)
            contexts = sorted({one.at for one in speed_ups})
            panel.set_xscale("log", base=2)
            panel.set_xticks(contexts, [f"{context:.0f}" for context in contexts], minor=False)
            panel.set_xlabel("context, tokens", fontsize=_NORMAL, color=INK)
            panel.set_ylim(0, top)
        _legend_below(axes)


def plot_speed_up_by_mix(bench: BenchSpeedUps, path: Path) -> None:
    with _figure(path, "Speed-up over plain decoding, streams of mixed domains") as (panel,):
        _draw_speed_ups(panel, bench.by_mix, _colors(bench.by_mix))
        panel.set_xlabel(
            "probability that a prompt is of another domain than the one before", fontsize=_NORMAL, color=INK
        )
        panel.set_ylabel("speed-up", fontsize=_NORMAL, color=INK)
        _legend_below([panel])


def _draw_speed_ups(axes: Axes, speed_ups: Sequence[SpeedUp], colors: Mapping[str, str]) -> None:
    axes.axhline(1.0, color=PLAIN, linewidth=1, linestyle="--")
    for index, (strategy, color) in enumerate(colors.items()):
        line = [one for one in speed_ups if one.strategy == strategy]
        if line:
            marker = _MARKERS[index % len(_MARKERS)]
            ranges = [(one.median, one.least, one.most) for one in line]
            _draw_ranges(axes, [one.at for one in line], ranges, color=color, marker=marker, label=strategy)
    axes.grid(axis="y", color=SKIPPED)
    axes.set_ylim(bottom=0)


def _draw_ranges(
    axes: Axes, across: Sequence[float], ranges: Sequence[tuple[float, float, float]], **style: Any
) -> None:
    """Draw a line of values with error bars from least to most. ranges: value, least and most of each point."""
    middle, least, most = np.array(ranges).T
    gaps = np.maximum(0.0, [middle - least, most - middle])
    axes.errorbar(across, middle, yerr=gaps, markersize=5, linewidth=1.6, elinewidth=0.8, capsize=2, **style)


def _colors(speed_ups: Sequence[SpeedUp]) -> dict[str, str]:
    """Return colors by strategy, KnapSpec first."""
    names = sorted({one.strategy for one in speed_ups}, key=lambda name: (name != "knapspec", name))
    return {name: _STRATEGY_COLORS[index % len(_STRATEGY_COLORS)] for index, name in enumerate(names)}


def plot_tpt(experiment: TptExperiment, path: Path) -> None:
    """Draw measured tokens per second against predicted TPT, and against estimated acceptance."""
    found = experiment.correlations()
    with _figure(path, "Which quantity shows which plan is fast?", panels=2) as (tpt, acceptance):
        _draw_points(tpt, experiment.points, [point.predicted_tpt for point in experiment.points])
        tpt.scatter([experiment.plain_tpt], [experiment.plain.median], marker="*", s=130, color=INK, zorder=4)
        tpt.annotate(
            "no draft",
            (experiment.plain_tpt, experiment.plain.median),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=_SMALL,
            color=INK,
        )
        right = 1.06 * max([experiment.plain_tpt, *(point.predicted_tpt for point in experiment.points)])
        top = 1.12 * max([experiment.plain.median, *(point.measured_tpt for point in experiment.points)])
        tpt.plot([0, right], [0, right], color=PLAIN, linewidth=1, linestyle="--", zorder=1, label="as predicted")
        tpt.set_xlim(0, right)
        tpt.set_xlabel("predicted TPT, tokens/s", fontsize=_NORMAL, color=INK)
        tpt.set_ylabel("measured, tokens/s", fontsize=_NORMAL, color=INK)
        _draw_points(acceptance, experiment.points, [point.estimated_acceptance for point in experiment.points])
        acceptance.set_xlabel("estimated acceptance", fontsize=_NORMAL, color=INK)
        acceptance.set_xlim(0, 1.03)
        for panel, name, said in ((tpt, "tpt", "predicted TPT"), (acceptance, "acceptance", "acceptance alone")):
            r = "-" if found[name] is None else f"{found[name]:.2f}"
            panel.set_title(f"{said}: r = {r}", fontsize=_LARGE, color=INK)
            panel.set_ylim(0, top)
            panel.grid(color=SKIPPED)
        _legend_below([tpt])


def _draw_points(axes: Axes, points: Sequence[PlanPoint], across: Sequence[float]) -> None:
    lengths = sorted({point.num_draft_tokens for point in points})
    for length, color in zip(lengths, _STRATEGY_COLORS, strict=False):
        for origin, (marker, name) in _ORIGINS.items():
            chosen = [
                (value, point.measured_tpt)
                for value, point in zip(across, points, strict=True)
                if (point.num_draft_tokens, point.origin) == (length, origin)
            ]
            if chosen:
                axes.scatter(
                    [value for value, _ in chosen],
                    [measured for _, measured in chosen],
                    marker=marker,
                    s=34,
                    color=color,
                    alpha=0.8,
                    linewidths=0,
                    label=f"{name}, {length} tokens",
                    zorder=3,
                )


def plot_skip_ratio(experiment: SkipExperiment, path: Path) -> None:
    """Draw the share of skipped sublayers, and the time of attention and MLP in a decode step, by context."""
    with _figure(path, "What KnapSpec's plans skip", panels=2) as (skipped, time):
        _draw_skipped(skipped, experiment)
        contexts = [one.context for one in experiment.by_context]
        for label, color, marker, seconds in (
            ("attention", ATTENTION, "o", [one.attention_s for one in experiment.by_context]),
            ("MLP", MLP, "s", [one.mlp_s for one in experiment.by_context]),
        ):
            values = [1000 * value for value in seconds]
            time.plot(contexts, values, color=color, marker=marker, linewidth=1.8, label=label)
        crossing = experiment.attention_outweighs_from
        if crossing is not None and contexts[0] <= crossing <= contexts[-1]:
            time.axvline(crossing, color=PLAIN, linewidth=1, linestyle="--")
        time.set_title("Milliseconds of a decode step", fontsize=_LARGE, color=INK)
        for panel in (skipped, time):
            panel.set_xticks(contexts, [f"{context}" for context in contexts], minor=False)
            panel.set_xlabel("context, tokens", fontsize=_NORMAL, color=INK)
            panel.set_ylim(bottom=0)
            panel.grid(axis="y", color=SKIPPED)
        _legend_below([time])


def _draw_skipped(axes: Axes, experiment: SkipExperiment) -> None:
    axes.set_title("Share of sublayers skipped", fontsize=_LARGE, color=INK)
    for color, marker, values in (
        (ATTENTION, "o", [(one.context, one.attention_skipped) for one in experiment.by_context]),
        (MLP, "s", [(one.context, one.mlp_skipped) for one in experiment.by_context]),
    ):
        known = [(context, share) for context, share in values if share is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=color, marker=marker, linewidth=1.8)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")


def plot_skip_distribution(experiment: SkipExperiment, path: Path) -> None:
    """Draw how often each sublayer is skipped, one bar for each. Without plans the figure says so."""
    with _figure(path, "How often each sublayer is skipped, of the tokens drafted for") as (panel,):
        if not experiment.plans:
            panel.text(0.5, 0.5, "no plan drafted", ha="center", color=PLAIN, transform=panel.transAxes)
            return
        frequency = skip_frequency(experiment.plans)
        layers = np.arange(len(frequency) // 2)
        panel.bar(layers - 0.2, frequency[::2], width=0.38, color=ATTENTION)
        panel.bar(layers + 0.2, frequency[1::2], width=0.38, color=MLP)
        panel.set_xticks(layers[:: max(1, len(layers) // 32)])
        panel.set_xlabel("layer", fontsize=_NORMAL, color=INK)
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        panel.grid(axis="y", color=SKIPPED)
        keys = [Patch(color=ATTENTION, label="attention"), Patch(color=MLP, label="MLP")]
        panel.figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=_NORMAL, frameon=False)


def plot_thresholds(experiment: ThresholdSweep, path: Path) -> None:
    with _figure(path, "Where drafts end", panels=2) as (speed, acceptance):
        sweep = experiment.thresholds
        _draw_sweep(speed, sweep, [one.value or 0.0 for one in sweep.settings])
        known = [(one.value, one.acceptance) for one in sweep.settings if one.acceptance is not None]
        if known:
            acceptance.plot(*zip(*known, strict=True), color=MLP, marker="s", linewidth=1.8)
        if sweep.own.acceptance is not None:
            acceptance.axhline(sweep.own.acceptance, color=INK, linewidth=1.2, linestyle=":")
        acceptance.set_ylim(0, 1.03)
        acceptance.set_title("Share of drafted tokens accepted", fontsize=_LARGE, color=INK)
        for panel in (speed, acceptance):
            panel.set_xlabel("top-1 probability below which a draft ends", fontsize=_NORMAL, color=INK)
            panel.grid(axis="y", color=SKIPPED)
        _legend_below([speed])


def plot_intervals(experiment: IntervalSweep, path: Path) -> None:
    """Draw the values at equal distances: they rise by factors, and a logarithmic axis has no place for 0."""
    with _figure(path, "How often plans are searched", panels=2) as panels:
        for panel, sweep, label in zip(
            panels,
            (experiment.intervals, experiment.shares),
            ("tokens from one search to the next", "share of the time that searches may take"),
            strict=True,
        ):
            across = list(range(len(sweep.settings)))
            _draw_sweep(panel, sweep, across)
            panel.set_xticks(across, [f"{one.value:g}" for one in sweep.settings])
            panel.set_xlabel(label, fontsize=_NORMAL, color=INK)
            panel.bar(
                across,
                [one.search_share for one in sweep.settings],
                width=0.5,
                color=MLP,
                alpha=0.6,
                label="share of the time in searches",
            )
            panel.grid(axis="y", color=SKIPPED)
        _legend_below(panels)


def _draw_sweep(axes: Axes, sweep: Sweep, across: Sequence[float]) -> None:
    settings = sweep.settings
    axes.set_title("Speed-up", fontsize=_LARGE, color=INK)
    axes.axhline(1.0, color=PLAIN, linewidth=1, linestyle="--")
    axes.axhline(sweep.own.speedup.overall, color=INK, linewidth=1.2, linestyle=":", label="KnapSpec's own way")
    ranges = [(one.speedup.overall, one.speedup.least, one.speedup.most) for one in settings]
    label = "speed-up overall, and range over prompts"
    _draw_ranges(axes, across, ranges, color=ATTENTION, marker="o", label=label)
    axes.set_ylim(bottom=0)


@contextmanager
def _figure(path: Path, title: str, *, panels: int = 1) -> Iterator[list[Axes]]:
    """Yield panels to draw on, in one row, or in two if there are more than three. Write the file afterwards."""
    num_rows = 1 if panels <= 3 else 2
    num_columns = -(-panels // num_rows)
    figure = Figure(figsize=(_WIDTH_IN, 0.9 + 3.0 * num_rows), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=_LARGE + 1.5, color=INK)
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for extra in axes[panels:]:
        extra.set_visible(False)
    for panel in axes[:panels]:
        panel.tick_params(colors=INK, labelsize=_SMALL)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    yield axes[:panels]
    figure.savefig(path, dpi=_DPI)


def _legend_below(axes: Sequence[Axes]) -> None:
    """Draw one legend for all panels, with each name once."""
    keys = {}
    for panel in axes:
        keys.update(dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True)))
    axes[0].figure.legend(
        keys.values(), keys.keys(), loc="outside lower center", ncols=3, fontsize=_SMALL, frameon=False
    )
