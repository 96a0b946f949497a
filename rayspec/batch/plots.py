"""Plots of the chosen plans, of their acceptance and of their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rayspec.choices import Choice
from rayspec.types import EngineStats, PlanRecord

ATTENTION, MLP, SKIPPED, PLAIN, INK = "#2f6db5", "#e08a2b", "#eef0f2", "#8a8f98", "#30343b"
CHOICE_COLORS: Mapping[Choice, str] = {
    "full": "#1f3f66",
    "int8": "#2f6db5",
    "int4": "#7fb0e3",
    "window": "#7a3b0c",
    "pages": "#e08a2b",
    "int8+window": "#a5622a",
    "int8+pages": "#f0a75a",
    "int4+window": "#c9a27e",
    "int4+pages": "#f7d1a8",
    "skip": SKIPPED,
}
_MAX_COLUMNS = 48
_MIN_MEASURED_TOKENS = 8  # a rate over fewer tokens is meaningless


def plot_plans(stats: EngineStats, path: Path, *, title: str) -> None:
    """Write a PNG with three plots: how drafts ran each sublayer by context length, the acceptance of drafts, and
    predicted against measured tokens per second."""
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=12, color=INK)
    choice_map, acceptance, speed = figure.subplots(1, 3, width_ratios=(1.75, 1, 1))
    drafting = sorted((record for record in stats.plans if record.plan.drafts), key=lambda record: record.context)
    _draw_choice_map(choice_map, drafting, stats.gate_reason)
    _draw_acceptance(acceptance, drafting)
    _draw_speed(speed, stats.plans)
    for axes in (choice_map, acceptance, speed):
        axes.tick_params(colors=INK, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=130)


def _draw_choice_map(axes: Axes, records: Sequence[PlanRecord], gate_reason: str) -> None:
    axes.set_title("How drafts run each sublayer", fontsize=10, color=INK)
    if not records:
        _say(axes, f"no plan drafted\n{gate_reason}")
        return
    columns = _thinned(records)
    present = [choice for choice in CHOICE_COLORS if any(choice in record.plan.choices for record in columns)]
    cells = np.array([[present.index(choice) for choice in record.plan.choices] for record in columns]).T
    colors = ListedColormap([CHOICE_COLORS[choice] for choice in present])
    bounds = BoundaryNorm(np.arange(len(present) + 1) - 0.5, len(present))
    edge = "white" if len(columns) <= _MAX_COLUMNS else "none"
    axes.pcolormesh(cells, cmap=colors, norm=bounds, edgecolors=edge, linewidth=0.6)
    every = max(1, len(columns) // 12)
    axes.set_xticks(
        np.arange(0, len(columns), every) + 0.5,
        [str(record.context) for record in columns[::every]],
        rotation=45 if len(columns) > 6 else 0,
    )
    axes.set_xlabel("context when chosen, tokens (one column a plan)", fontsize=9, color=INK)
    axes.set_ylabel("attention and MLP in turn, first at the bottom", fontsize=9, color=INK)
    keys = [Patch(color=CHOICE_COLORS[choice], label=choice) for choice in present]
    axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=5, fontsize=8, frameon=False)


def _thinned(records: Sequence[PlanRecord]) -> list[PlanRecord]:
    if len(records) <= _MAX_COLUMNS:
        return list(records)
    return [records[index] for index in np.linspace(0, len(records) - 1, _MAX_COLUMNS).astype(int)]


def _draw_acceptance(axes: Axes, records: Sequence[PlanRecord]) -> None:
    axes.set_title("Acceptance of draft tokens", fontsize=10, color=INK)
    if not records:
        _say(axes, "no plan drafted")
        return
    tested = [record for record in records if record.num_tested_tokens >= _MIN_MEASURED_TOKENS]
    for record in tested:
        ends = (record.estimated_acceptance, record.observed_acceptance or 0.0)
        axes.plot([record.context] * 2, ends, color=PLAIN, linewidth=0.6, zorder=1)
    axes.scatter(
        [record.context for record in records],
        [record.estimated_acceptance for record in records],
        facecolors="white",
        edgecolors=ATTENTION,
        s=26,
        label="estimated by the search",
        zorder=2,
    )
    axes.scatter(
        [record.context for record in tested],
        [record.observed_acceptance or 0.0 for record in tested],
        color=MLP,
        s=26,
        label="observed in use",
        zorder=3,
    )
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("context, tokens", fontsize=9, color=INK)
    axes.grid(axis="y", color=SKIPPED)
    axes.legend(loc="lower right", fontsize=8, frameon=False)


def _draw_speed(axes: Axes, records: Sequence[PlanRecord]) -> None:
    axes.set_title("Tokens/s of one sequence", fontsize=10, color=INK)
    measured = [record for record in records if record.num_tokens >= _MIN_MEASURED_TOKENS]
    if not measured:
        _say(axes, "no plan was in use long enough")
        return
    for drafts, color, label in ((True, MLP, "drafting"), (False, PLAIN, "no draft")):
        chosen = [record for record in measured if record.plan.drafts is drafts]
        if chosen:
            axes.scatter(
                [record.predicted_tpt for record in chosen],
                [record.measured_tpt or 0.0 for record in chosen],
                s=[12 + min(90.0, record.num_tokens**0.5 * 3) for record in chosen],
                color=color,
                alpha=0.75,
                label=label,
            )
    top = 1.08 * max(max(record.predicted_tpt, record.measured_tpt or 0.0) for record in measured)
    axes.plot([0, top], [0, top], color=INK, linewidth=0.8, linestyle="--", label="as predicted")
    axes.set(xlim=(0, top), ylim=(0, top))
    axes.set_xlabel("predicted", fontsize=9, color=INK)
    axes.set_ylabel("measured", fontsize=9, color=INK)
    axes.grid(color=SKIPPED)
    axes.legend(loc="best", fontsize=8, frameon=False)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, color=PLAIN, transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
