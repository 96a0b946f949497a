"""`python -m benchmarks figures`: run the experiments of the KnapSpec paper on a given model, and plot them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import rayspec
from benchmarks.figures import plots, report
from benchmarks.figures.bench import read_bench
from benchmarks.figures.report import Section, figures_markdown
from benchmarks.figures.skips import run_skips
from benchmarks.figures.sweeps import run_intervals, run_thresholds
from benchmarks.figures.tpt import Estimates, estimate_plans, run_tpt
from rayspec import demo
from rayspec.bench.result import describe_environment
from rayspec.bench.run import measured_engine, model_folder
from rayspec.bench.workloads import demo_prompts
from rayspec.command.terminal import hide_progress_bars, load_llm
from rayspec.config import EngineConfig
from rayspec.types import ConfigError

Say = Callable[[str], None]

FIGURES = ("speedup", "tpt", "skips", "thresholds", "intervals")
_SKIPS_INTERVAL = 16  # tokens between searches


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureOptions:
    """The figures to draw, and the amount of text for each. Raises ConfigError for invalid options.

    only: names from FIGURES; empty for all, without "speedup" if there is no bench. context: prompt tokens of all
    experiments but the skips, which use `contexts`. num_prompts: prompts of each experiment, alternating between the
    domains; the experiment on search intervals uses twice as many.
    """

    engine: EngineConfig
    output: Path
    bench: Path | None
    only: tuple[str, ...]
    widen: int
    domains: tuple[str, ...]
    context: int
    contexts: tuple[int, ...]
    max_tokens: int
    num_prompts: int
    num_plans: int
    draft_lengths: tuple[int, ...]
    thresholds: tuple[float, ...]
    intervals: tuple[int, ...]
    shares: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        unknown = [name for name in self.only if name not in FIGURES]
        if unknown:
            raise ConfigError(f"option 'only' is {', '.join(self.only)}: choose of {', '.join(FIGURES)}")
        if self.bench is None and "speedup" in self.only:
            raise ConfigError(
                "option 'only' has 'speedup', which needs option 'bench': name a results.json of `rayspec bench`"
            )
        if not self.domains or not set(self.domains) <= set(demo.DOMAINS):
            raise ConfigError(f"option 'domains' is {', '.join(self.domains)!r}: choose of {', '.join(demo.DOMAINS)}")
        if self.engine.parallel is not None:
            raise ConfigError("option 'parallel' is set: figures are of an engine in one process, leave it out")
        _check_range("contexts", self.contexts, 2, None)
        _check_range("draft_lengths", self.draft_lengths, 1, self.engine.speculation.max_draft_tokens)
        _check_range("thresholds", self.thresholds, 0, 1)
        _check_range("intervals", self.intervals, 1, None)
        _check_range("shares", self.shares, 0, 1)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the figures to draw."""
        return self.only or tuple(name for name in FIGURES if name != "speedup" or self.bench is not None)


def _check_range(option: str, values: Sequence[float], least: float, most: float | None) -> None:
    if not values or min(values) < least or (most is not None and max(values) > most):
        limit = "on" if most is None else f"to {most:g}"
        raise ConfigError(f"option {option!r} is {', '.join(map(str, values))!r}: give numbers from {least:g} {limit}")


def run_figures(options: FigureOptions, say: Say) -> Path:
    """Write a PNG for each figure, and `figures.md` and `figures.json` after each experiment. Return the path of
    `figures.md`. Raises ConfigError, CheckpointError, and the error of a failed prompt."""
    album = _Album(options)
    if "speedup" in options.wanted and options.bench is not None:
        _draw_bench(album, options.bench)
    experiments = [name for name in options.wanted if name in _EXPERIMENTS]
    if experiments:
        hide_progress_bars()
        say("loading")
        longest = max(options.context, *options.contexts) + options.max_tokens
        with ExitStack() as stack:
            folder = stack.enter_context(model_folder(options.engine, options.widen))
            config = measured_engine(options.engine, folder, batch=1, longest=longest, strategy="knapspec")
            llm = stack.enter_context(load_llm(config))
            work = _Workshop(llm, options, album)
            for name in experiments:
                say(name)
                _EXPERIMENTS[name](work)
    return album.write()


class _Album:
    """The finished figures, and the output folder."""

    def __init__(self, options: FigureOptions) -> None:
        self._options = options
        self._sections: list[Section] = []
        self._numbers: dict[str, Any] = {}
        options.output.mkdir(parents=True, exist_ok=True)

    def path_of(self, file: str) -> Path:
        return self._options.output / file

    def add(self, name: str, numbers: dict[str, Any], *sections: Section) -> None:
        self._numbers[name] = numbers
        self._sections.extend(sections)
        self.write()

    def write(self) -> Path:
        options, environment = self._options, describe_environment()
        asked = asdict(options) | {"engine": options.engine.model_dump(mode="json")}
        content = {"environment": environment, "options": asked, "figures": self._numbers}
        numbers = json.dumps(content, indent=1, default=str)
        self.path_of("figures.json").write_text(numbers + "\n", encoding="utf-8")
        path = self.path_of("figures.md")
        text = figures_markdown(
            self._sections,
            environment=environment,
            model=options.engine.model,
            dtype=options.engine.dtype,
            widen=options.widen,
        )
        path.write_text(text, encoding="utf-8")
        return path


class _Workshop:
    """The engine and the prompts of all experiments."""

    def __init__(self, llm: rayspec.LLM, options: FigureOptions, album: _Album) -> None:
        self.llm = llm
        self.options = options
        self.album = album

    def prompts(self, context: int, *, num_sets: int = 1, other: bool = False) -> list[list[int]]:
        """Return `num_sets * num_prompts` prompts of alternating domains. other: text that no experiment measures."""
        options = self.options
        seed = options.seed + 1 if other else options.seed
        num_prompts = num_sets * options.num_prompts
        num_each = -(-num_prompts // len(options.domains))
        of_domains = [
            demo_prompts(self.llm, domain, context=context, num_prompts=num_each, seed=seed)
            for domain in options.domains
        ]
        return [prompt for together in zip(*of_domains, strict=True) for prompt in together][:num_prompts]

    @cached_property
    def estimates(self) -> Estimates:
        """Plans and their acceptance, estimated on text that no experiment measures."""
        options, prompts = self.options, self.prompts(self.options.context, other=True)
        return estimate_plans(
            self.llm, prompts, num_plans=options.num_plans, max_tokens=options.max_tokens, seed=options.seed
        )


def _draw_bench(album: _Album, path: Path) -> None:
    bench = read_bench(path)
    sections = []
    if bench.by_context:
        file = "speedup-by-context.png"
        plots.plot_speed_up_by_context(bench, album.path_of(file))
        sections.append(Section(title="Speed-up by context", file=file, text=report.bench_text(bench)))
    if bench.by_mix:
        file = "speedup-by-mix.png"
        plots.plot_speed_up_by_mix(bench, album.path_of(file))
        sections.append(Section(title="Speed-up by mix of domains", file=file, text=report.mix_text(bench)))
    album.add("speedup", asdict(bench), *sections)


def _tpt(work: _Workshop) -> None:
    options, file = work.options, "tpt-throughput.png"
    experiment = run_tpt(
        work.llm,
        work.estimates,
        work.prompts(options.context),
        draft_lengths=options.draft_lengths,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    plots.plot_tpt(experiment, work.album.path_of(file))
    numbers = asdict(experiment) | {"correlations": experiment.correlations()}
    text = report.tpt_text(experiment)
    work.album.add("tpt", numbers, Section(title="Predicted TPT and throughput", file=file, text=text))


def _skips(work: _Workshop) -> None:
    options, ratio, distribution = work.options, "skip-ratio-by-context.png", "skip-distribution.png"
    experiment = run_skips(
        work.llm,
        work.prompts,
        contexts=sorted(options.contexts),
        interval=_SKIPS_INTERVAL,
        max_tokens=options.max_tokens,
    )
    plots.plot_skip_ratio(experiment, work.album.path_of(ratio))
    plots.plot_skip_distribution(experiment, work.album.path_of(distribution))
    work.album.add(
        "skips",
        asdict(experiment),
        Section(title="Sublayers skipped, by context", file=ratio, text=report.skip_ratio_text(experiment)),
        Section(
            title="Which sublayers are skipped",
            file=distribution,
            text=report.skip_distribution_text(experiment),
        ),
    )


def _thresholds(work: _Workshop) -> None:
    options, file = work.options, "threshold-sweep.png"
    experiment = run_thresholds(
        work.llm,
        work.estimates,
        work.prompts(options.context),
        thresholds=options.thresholds,
        max_tokens=options.max_tokens,
    )
    plots.plot_thresholds(experiment, work.album.path_of(file))
    text = report.threshold_text(experiment)
    work.album.add("thresholds", asdict(experiment), Section(title="Where drafts end", file=file, text=text))


def _intervals(work: _Workshop) -> None:
    options, file = work.options, "interval-sweep.png"
    experiment = run_intervals(
        work.llm,
        work.prompts(options.context, num_sets=2),
        intervals=options.intervals,
        shares=options.shares,
        max_tokens=options.max_tokens,
    )
    plots.plot_intervals(experiment, work.album.path_of(file))
    text = report.interval_text(experiment)
    work.album.add("intervals", asdict(experiment), Section(title="How often plans are searched", file=file, text=text))


_EXPERIMENTS: Mapping[str, Callable[[_Workshop], None]] = {
    "tpt": _tpt,
    "skips": _skips,
    "thresholds": _thresholds,
    "intervals": _intervals,
}
