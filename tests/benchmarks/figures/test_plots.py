"""Pictures and words of experiments that are made up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.figures import plots
from benchmarks.figures.bench import BenchSpeedUps, SpeedUp
from benchmarks.figures.report import Section, figures_markdown
from benchmarks.figures.runs import Gain, Spread
from benchmarks.figures.skips import ContextSkips, PlanUse, SkipExperiment
from benchmarks.figures.sweeps import IntervalSweep, Setting, Sweep, ThresholdSweep
from benchmarks.figures.tpt import PlanPoint, TptExperiment
from rayspec.choices import FULL, SKIP, choices_of

RNG = random.Random(0)
DPI = 50  # a quarter of the pictures' own, which python -m benchmarks figures is tested with
SPREAD = Spread(median=20.0, least=18.0, most=23.5)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_DPI", DPI)


def speed_ups(*strategies: str, contexts: tuple[int, ...] = (512, 2048)) -> tuple[SpeedUp, ...]:
    return tuple(
        SpeedUp(strategy=name, at=at, median=1 + index / 4 + at / 4096, least=0.9, most=2.5)
        for index, name in enumerate(strategies)
        for at in contexts
    )


def points(count: int) -> tuple[PlanPoint, ...]:
    return tuple(
        PlanPoint(
            choices=choices_of([RNG.random() < 0.5 for _ in range(8)]),
            origin=("knapsack", "early exit", "random")[index % 3],
            num_draft_tokens=(3, 8)[index % 2],
            estimated_acceptance=RNG.random(),
            observed_acceptance=RNG.random(),
            predicted_tpt=10.0 + index,
            tpt_as_accepted=11.0 + index,
            measured_tpt=8.0 + index * 0.9,
            measured_by_prompt=(8.0 + index, 8.0 + index * 0.8),
        )
        for index in range(count)
    )


def tpt(count: int) -> TptExperiment:
    return TptExperiment(context=400, num_tapped_tokens=96, plain_tpt=15.0, plain=SPREAD, points=points(count))


def skips(num_contexts: int, *, drafts: bool = True, crossing: float | None = 800.0) -> SkipExperiment:
    plans = (
        PlanUse(choices=(SKIP, FULL, FULL, SKIP) * 2, num_tokens=30),
        PlanUse(choices=(FULL, FULL, FULL, SKIP) * 2, num_tokens=10),
    )
    return SkipExperiment(
        by_context=tuple(
            ContextSkips(
                context=512 * 2**index,
                plans=plans if drafts else (),
                num_plain_tokens=9,
                attention_s=0.004 + 0.001 * index,
                mlp_s=0.005,
            )
            for index in range(num_contexts)
        ),
        attention_outweighs_from=crossing,
    )


def setting(value: float | None, speedup: float, *, drafted: bool = True, num_searches: int = 0) -> Setting:
    return Setting(
        value=value,
        speedup=Gain(overall=speedup, least=speedup - 0.1, most=speedup + 0.2),
        acceptance=0.5 + (value or 0) / 200 if drafted else None,
        mean_draft_length=6.0 if drafted else 0.0,
        search_share=num_searches / 20,
        num_searches=num_searches,
    )


def thresholds(*, drafted: bool = True) -> ThresholdSweep:
    cases = tuple(setting(value, 1.0 + value, drafted=drafted) for value in (0.0, 0.5, 0.9))
    sweep = Sweep(settings=cases, own=setting(None, 1.7, drafted=drafted))
    return ThresholdSweep(choices=(FULL, SKIP, SKIP, FULL), thresholds=sweep, plain=SPREAD)


def intervals() -> IntervalSweep:
    own = setting(None, 1.4, num_searches=1)
    return IntervalSweep(
        intervals=Sweep(settings=(setting(8, 1.1, num_searches=6), setting(64, 1.5, num_searches=2)), own=own),
        shares=Sweep(settings=(setting(0.0, 1.0), setting(0.02, 1.45, num_searches=1)), own=own),
        plain=SPREAD,
    )


def require_picture(path: Path) -> None:
    with Image.open(path) as image:
        assert image.width == 8 * DPI
        assert image.height > 3 * DPI
        assert len(image.convert("RGB").getcolors(2**24) or ()) > 30


@pytest.mark.parametrize("num_domains", [1, 5])
def test_a_panel_a_domain(tmp_path: Path, num_domains: int) -> None:
    by_context = {f"domain {index}": speed_ups("swift", "knapspec") for index in range(num_domains)}
    by_context["domain 0"] = speed_ups(*(f"s{index}" for index in range(12)), contexts=(512,))
    bench = BenchSpeedUps(by_context=by_context, by_mix=speed_ups("swift", "knapspec", contexts=(0, 1)))
    plots.plot_speed_up_by_context(bench, tmp_path / "context.png")
    require_picture(tmp_path / "context.png")
    plots.plot_speed_up_by_mix(bench, tmp_path / "mix.png")
    require_picture(tmp_path / "mix.png")


@pytest.mark.parametrize("count", [1, 30])
def test_points(tmp_path: Path, count: int) -> None:
    plots.plot_tpt(tpt(count), tmp_path / "p.png")
    require_picture(tmp_path / "p.png")


@pytest.mark.parametrize("num_contexts", [1, 4])
@pytest.mark.parametrize("drafts", [True, False])
def test_skips(tmp_path: Path, num_contexts: int, drafts: bool) -> None:
    plots.plot_skip_ratio(skips(num_contexts, drafts=drafts), tmp_path / "ratio.png")
    require_picture(tmp_path / "ratio.png")
    plots.plot_skip_distribution(skips(num_contexts, drafts=drafts), tmp_path / "bars.png")
    require_picture(tmp_path / "bars.png")


@pytest.mark.parametrize("drafted", [True, False])
def test_sweeps(tmp_path: Path, drafted: bool) -> None:
    plots.plot_thresholds(thresholds(drafted=drafted), tmp_path / "t.png")
    require_picture(tmp_path / "t.png")
    plots.plot_intervals(intervals(), tmp_path / "i.png")
    require_picture(tmp_path / "i.png")


def test_a_picture_shows_its_numbers(tmp_path: Path) -> None:
    for name, experiment in (("a", skips(3)), ("b", skips(3)), ("c", skips(2))):
        plots.plot_skip_ratio(experiment, tmp_path / f"{name}.png")
    first, same, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == same != other


def test_the_page_says_how_it_was_made() -> None:
    environment = {
        "command": "python -m benchmarks figures -o x",
        "hardware": "CPU",
        "threads": 2,
        "commit": "abc+",
        "date": "now",
    }
    sections = [
        Section(title="One", file="one.png", text="It shows."),
        Section(title="Two", file="two.png", text="So."),
    ]
    page = figures_markdown(sections, environment=environment, model="demo", dtype="bfloat16", widen=8)
    assert page.startswith(
        "# Figures\n\n`python -m benchmarks figures -o x`: model `demo` made 8 times as wide in bfloat16, CPU, 2"
    )
    assert "commit abc+, now" in page
    assert "## One\n\n![One](one.png)\n\nIt shows.\n\n## Two\n\n![Two](two.png)" in page
