"""Texts that describe the figures, built from their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.figures.bench import BenchSpeedUps, SpeedUp, best_strategy
from benchmarks.figures.skips import ContextSkips, SkipExperiment, skip_frequency
from benchmarks.figures.sweeps import IntervalSweep, Setting, ThresholdSweep
from benchmarks.figures.tpt import TptExperiment
from rayspec.choices import SKIP

_NUM_NAMED = 4  # sublayers
_KINDS = ("attention", "MLP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure and its description."""

    title: str
    file: str
    text: str


def figures_markdown(
    sections: Sequence[Section], *, environment: Mapping[str, Any], model: str, dtype: str, widen: int
) -> str:
    """Return a page with all figures, their command and hardware."""
    width = f" made {widen} times as wide" if widen > 1 else ""
    made = (
        f"`{environment['command']}`: model `{model}`{width} in {dtype}, {environment['hardware']}, "
        f"{environment['threads']} threads, commit {environment['commit']}, {environment['date']}. All texts are "
        "generated freely, contenders in turns after each prompt; ranges are over prompts, or the repeats of a bench."
    )
    parts = [f"## {one.title}\n\n![{one.title}]({one.file})\n\n{one.text}" for one in sections]
    return "\n\n".join(["# Figures", made, *parts]) + "\n"


def speed_up_text(by_domain: Mapping[str, Sequence[SpeedUp]]) -> str:
    lines = []
    for domain, speed_ups in by_domain.items():
        least, most = (end(one.at for one in speed_ups) for end in (min, max))
        best = [best_strategy([one for one in speed_ups if one.at == at]) for at in dict.fromkeys((least, most))]
        said = " and ".join(
            f"{one.strategy} with {one.median:.2f} ({one.least:.2f} to {one.most:.2f}) at {one.at:g}" for one in best
        )
        lines.append(f"{domain}: fastest is {said}.")
    return " ".join(lines)


def bench_text(bench: BenchSpeedUps) -> str:
    return f"Speed-up over plain decoding by tokens of context. {speed_up_text(bench.by_context)}"


def mix_text(bench: BenchSpeedUps) -> str:
    said = speed_up_text({"Streams": bench.by_mix})
    return f"Speed-up over plain decoding by the probability that a prompt is of another domain. {said}"


def tpt_text(experiment: TptExperiment) -> str:
    found = {name: "-" if value is None else f"{value:.3f}" for name, value in experiment.correlations().items()}
    num_sets = len({point.choices for point in experiment.points})
    return (
        f"{len(experiment.points)} plans ({num_sets} sets of sublayers) at {experiment.context} tokens of context, "
        "each predicted before it ran, from the latency model and from "
        f"{experiment.num_tapped_tokens} tokens of other text. Predicted TPT correlates with measured tokens/s by "
        f"r = {found['tpt']} (ranks {found['tpt_ranks']}), estimated acceptance alone by {found['acceptance']} (ranks "
        f"{found['acceptance_ranks']}); the paper has .837 and .538, of an 8B model at 12K tokens. Among plans with an "
        f"estimated acceptance of a half or more it is {found['tpt_of_sound']}, and {found['acceptance_of_sound']}. "
        f"Had the acceptance been known, TPT would have {found['tpt_as_accepted']}; what is measured after one prompt "
        f"correlates with what is after another by {found['between_prompts']}. The median plan made "
        f"{_percent(experiment.median_ratio)} of what was predicted; plain decoding made {experiment.plain} tokens/s, "
        f"and {experiment.plain_tpt:.2f} were predicted."
    )


def skip_ratio_text(experiment: SkipExperiment) -> str:
    first, last = experiment.by_context[0], experiment.by_context[-1]
    ends = [first] if first is last else [first, last]
    crossing = experiment.attention_outweighs_from
    outweighs = (
        "Attention never outweighs MLP in a decode step"
        if crossing is None
        else f"Attention outweighs MLP in a decode step from {crossing:.0f} tokens of context on"
    )
    return f"{' '.join(map(_skips, ends))} {outweighs}, by the latency model."


def _skips(one: ContextSkips) -> str:
    if one.attention_skipped is None or one.mlp_skipped is None:
        return f"At {one.context} tokens of context no plan was predicted to pay."
    return (
        f"At {one.context} tokens of context, plans skipped {_percent(one.attention_skipped)} of the attention and "
        f"{_percent(one.mlp_skipped)} of the MLP sublayers ({len(one.plans)} plans)."
    )


def skip_distribution_text(experiment: SkipExperiment) -> str:
    if not experiment.plans:
        return "No plan drafted."
    frequency = skip_frequency(experiment.plans)
    order = np.argsort(-frequency, kind="stable").tolist()
    means = [_percent(float(frequency[kind::2].mean())) for kind in range(2)]
    return (
        f"{len(experiment.plans)} plans, over the {sum(plan.num_tokens for plan in experiment.plans)} tokens that they "
        f"were in use for. Skipped most: {_named(order[:_NUM_NAMED], frequency)}; least: "
        f"{_named(order[-_NUM_NAMED:][::-1], frequency)}. Attention is skipped {means[0]} of the time, MLP {means[1]}."
    )


def _named(sublayers: Sequence[int], frequency: Any) -> str:
    return ", ".join(
        f"{_KINDS[index % 2]} of layer {index // 2} ({_percent(float(frequency[index]))})" for index in sublayers
    )


def threshold_text(experiment: ThresholdSweep) -> str:
    sweep = experiment.thresholds
    settings = sweep.settings
    return (
        f"One plan, which skips {experiment.choices.count(SKIP)} of {len(experiment.choices)} sublayers. Fastest is "
        f"threshold {sweep.best.value:g} with a speed-up of {sweep.best.speedup}. From threshold {settings[0].value:g} "
        f"to {settings[-1].value:g}, acceptance goes from {_known(settings[0])} to {_known(settings[-1])} and drafts "
        f"from {settings[0].mean_draft_length:.1f} to {settings[-1].mean_draft_length:.1f} tokens. KnapSpec's own "
        f"rule, by what the next token is expected to earn, has no threshold: {sweep.own.speedup}, {_known(sweep.own)} "
        f"accepted (dotted). Plain decoding made {experiment.plain} tokens/s."
    )


def interval_text(experiment: IntervalSweep) -> str:
    intervals, shares, own = experiment.intervals, experiment.shares, experiment.shares.own
    first, last = intervals.settings[0], intervals.settings[-1]
    return (
        f"A search at fixed intervals is fastest every {intervals.best.value:g} tokens, with a speed-up of "
        f"{intervals.best.speedup}; every {first.value:g} tokens {_percent(first.search_share)} of the time goes into "
        f"{first.num_searches} searches, every {last.value:g} {_percent(last.search_share)} into {last.num_searches}. "
        "After the interval a search still captures hidden states, of one token a round. KnapSpec itself has no "
        "interval: it searches when acceptance or context has drifted, if that fits a share of the time "
        "(`optimise_share`). "
        f"Fastest is a share of {shares.best.value:g} with {shares.best.speedup}; the engine's own makes {own.speedup} "
        f"with {_percent(own.search_share)} of the time in {own.num_searches} searches (dotted; the first may borrow). "
        f"Plain decoding made {experiment.plain} tokens/s."
    )


def _known(setting: Setting) -> str:
    return "-" if setting.acceptance is None else _percent(setting.acceptance)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
