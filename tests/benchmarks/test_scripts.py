"""Benchmarks as a user runs them, on the bundled model."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks import host_time
from benchmarks.__main__ import app
from benchmarks.papers.rows import PaperRow, predict_papers
from benchmarks.papers.run import run_paper
from benchmarks.serve_mix import Mix
from benchmarks.streams import mixed
from rayspec import demo
from rayspec.bench.workloads import Workload
from rayspec.config import EngineConfig
from rayspec.openai.batch import ENDPOINTS
from rayspec.strategies.saved_plans import ModelIdentity, SavedPlans
from tests.strategy_cases import saved_plan


def row(strategy: str, speedup: float, least: float, most: float) -> dict[str, Any]:
    spread = {"min": least, "median": speedup, "max": most}
    return {"strategy": strategy, "speedup_vs_ar": speedup, "speedup_spread": spread}


def workload(domain: str, context: int, *rows: dict[str, Any], mix_ratio: float | None = None) -> dict[str, Any]:
    return {"domain": domain, "context": context, "mix_ratio": mix_ratio, "results": [row("ar", 1, 1, 1), *rows]}


WORKLOADS = [
    workload("summary", 2048, row("knapspec", 1.5, 1.2, 1.6), row("swift", 1.1, 1.0, 1.3), row("hf", 0.5, 0.5, 0.5)),
    workload("summary", 512, row("knapspec", 1.3, 1.1, 1.4), row("swift", 1.05, 1.0, 1.1)),
    workload("ledger", 512, row("swift", 1.4, 1.3, 1.5)),
    workload("stream", 512, row("knapspec", 1.25, 1.2, 1.3), mix_ratio=0.5),
    workload("stream", 512, row("knapspec", 1.35, 1.3, 1.4), mix_ratio=0.0),
]

MODEL = ("--model", "demo", "--dtype", "float32", "--num-threads", "1")
SMALL = (
    *("--context", "150", "--contexts", "120,200", "--max-tokens", "24", "--num-prompts", "1", "--num-plans", "4"),
    *("--domains", "summary,ledger", "--draft-lengths", "3", "--thresholds", "0.9,0.2"),
    *("--intervals", "4", "--shares", "0.5"),
)


@pytest.mark.exhaustive
def test_one_command_makes_all_figures(tmp_path: Path) -> None:
    bench, out = tmp_path / "results.json", tmp_path / "new" / "out"
    bench.write_text(json.dumps({"workloads": WORKLOADS}), encoding="utf-8")
    result = CliRunner().invoke(app, ["figures", *MODEL, *SMALL, "--output", str(out), "--bench", str(bench)])
    assert result.exit_code == 0, result.output
    assert str(out / "figures.md") in result.output
    pictures = {path.name for path in out.iterdir()} - {"figures.md", "figures.json"}
    assert pictures == {
        "speedup-by-context.png",
        "speedup-by-mix.png",
        "tpt-throughput.png",
        "skip-ratio-by-context.png",
        "skip-distribution.png",
        "threshold-sweep.png",
        "interval-sweep.png",
    }
    text = (out / "figures.md").read_text(encoding="utf-8")
    for name in pictures:
        assert f"]({name})" in text
        with Image.open(out / name) as image:
            assert image.width == 1600
            assert image.height > 600
    numbers = json.loads((out / "figures.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    speedup = numbers["figures"]["speedup"]
    found = [(one["strategy"], one["at"], one["median"]) for one in speedup["by_context"]["summary"]]
    assert found == [("knapspec", 512, 1.3), ("knapspec", 2048, 1.5), ("swift", 512, 1.05), ("swift", 2048, 1.1)]
    assert [(one["at"], one["median"]) for one in speedup["by_mix"]] == [(0.0, 1.35), (0.5, 1.25)]
    assert list(numbers["figures"]) == ["speedup", "tpt", "skips", "thresholds", "intervals"]
    assert numbers["options"]["draft_lengths"] == [3]
    assert numbers["environment"]["threads"] == 1
    assert len(numbers["figures"]["tpt"]["points"]) == 4
    assert set(numbers["figures"]["tpt"]["correlations"]) >= {"tpt", "acceptance"}
    assert [one["value"] for one in numbers["figures"]["thresholds"]["thresholds"]["settings"]] == [0.2, 0.9]
    contexts = [one["context"] for one in numbers["figures"]["skips"]["by_context"]]
    assert contexts[0] <= 120 < contexts[1] <= 200


DOMAINS = [Workload(domain=name, prompts=[[ord(name), index] for index in range(500)], context=50) for name in "abc"]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_ratio_is_the_share_of_changes(ratio: float) -> None:
    stream = mixed(DOMAINS, ratio, 401, seed=5)
    assert len(set(map(tuple, stream.prompts))) == 401, "no prompt comes twice"
    names = [prompt[0] for prompt in stream.prompts]
    assert names[0] == ord("a")
    changes = sum(one != other for one, other in pairwise(names))
    assert abs(changes - 400 * ratio) <= 4 * (400 * ratio * (1 - ratio)) ** 0.5
    assert stream == mixed(DOMAINS, ratio, 401, seed=5)


@pytest.mark.exhaustive
def test_a_stream_with_saved_plans(tmp_path: Path) -> None:
    model = ModelIdentity.of(EngineConfig(model=demo.model_path()), 32)
    ledger = saved_plan("ledger", skip=(6, 8), num_sublayers=32, anchors=((1.0,) + (0.0,) * 127,), radius=0.5)
    plans, found = tmp_path / "plans.json", tmp_path / "s.json"
    SavedPlans(model=model, plans=(saved_plan(skip=(5, 7), num_sublayers=32), ledger)).save(plans)
    arguments = [
        *("streams", "--model", "demo", "--dtype", "float32", "--num-threads", "1", "--context", "150", "--no-gate"),
        *("--max-tokens", "12", "--num-prompts", "2", "--repeats", "1", "--strategies", "self-sd,knn-ssd"),
        *("--input", "demo", "--input", "demo:ledger", "--ratios", "0,1", "--json", str(found)),
        *("--plans", f"self-sd={plans}", "--plans", f"knn-ssd={plans}"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    still, changing = json.loads(found.read_text(encoding="utf-8"))["workloads"]
    assert (still["mix_ratio"], changing["mix_ratio"]) == (0.0, 1.0)
    for workload in (still, changing):
        rows = {row["strategy"]: row for row in workload["results"]}
        assert list(rows) == ["ar", "self-sd", "knn-ssd"]
        assert all(row["identical"] == row["total"] == 2 for row in rows.values())
        assert [at for at, choice in enumerate(rows["self-sd"]["plans"][0]["choices"]) if choice == "skip"] == [5, 7]


def test_rounds_are_timed_on_the_path_of_a_gpu(tmp_path: Path) -> None:
    """Drafts of sublayers that do nothing are right, so a static round commits all four and the bonus token."""
    asked = ["--shapes", "bundled", "--strategies", "ar,static,auto", "--batches", "2", "--temperatures", "0,1"]
    path = tmp_path / "times.json"
    result = CliRunner().invoke(host_time.app, [*asked, "--context", "40", "--rounds", "3", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rounds = json.loads(path.read_text())["rounds"]
    assert [(one["strategy"], one["tokens"]) for one in rounds[:4]] == [("ar", 1)] * 2 + [("static", 5)] * 2
    assert all(0 < one["best_ms"] <= one["median_ms"] for one in rounds)


def test_a_mix_has_everything_and_only_requests() -> None:
    asks = Mix(model="demo", num_requests=200, max_tokens=32, cut_share=0.2).asks()
    assert len(asks) == 200
    for ask in asks:
        ENDPOINTS[ask.path].parse(dict(ask.body))
    means = {
        *((sum(ask.is_chat for ask in asks), 100, "chat"), (sum(ask.is_stream for ask in asks), 120, "stream")),
        *(
            (sum(key in ask.body for ask in asks), mean, key)
            for key, mean in (("seed", 100), ("stop", 60), ("logprobs", 40))
        ),
        (sum(ask.body.get("n") == 2 for ask in asks), 40, "n"),
        (sum(ask.cut_after_s is not None for ask in asks), 28, "cut while it waits"),
        (sum(ask.cut_after_events is not None for ask in asks), 12, "cut in mid-stream"),
    }
    assert [what for found, mean, what in means if abs(found - mean) >= 4 * mean**0.5] == []


def test_nobody_at_the_url_is_an_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--url", "http://127.0.0.1:9", "--num-requests", "1"])
    assert result.exit_code == 1
    assert "error: the endpoint at 'http://127.0.0.1:9' does not answer" in result.stderr


@pytest.fixture(scope="module")
def rows() -> tuple[PaperRow, ...]:
    return predict_papers()


@pytest.mark.exhaustive
def test_predictions_by_hand(rows: tuple[PaperRow, ...]) -> None:
    """A 70B draft keeps 40 of 80 layers and the head: c = (40 * 1.711 + 2.101 + KV) / (80 * 1.711 + 2.101 + KV) GB."""
    wanted = ("knapspec", "Llama-3.1-70B", "GovReport")
    (row,) = [row for row in rows if (row.published.method, row.published.model, row.published.task) == wanted]
    layer_gb = 2 * (2 * 8192 * 128 * 72 + 3 * 8192 * 28672) / 1e9 + 4096 * 12_800 / 1e9
    head_gb = 2 * 8192 * 128256 / 1e9
    cost = (40 * layer_gb + head_gb) / (80 * layer_gb + head_gb)
    assert row.ideal is not None
    assert row.ideal.cost == pytest.approx(cost)
    gain = max((1 - 0.944 ** (g + 1)) / (1 - 0.944) / (g * cost + 1) for g in range(1, 19))
    assert row.ideal.gain == pytest.approx(gain)
    assert row.ideal.residual == pytest.approx(1.47 / gain - 1)
    assert row.ideal.oracle == pytest.approx(1 / (0.944 * cost + 0.056))
    drafted = row.ideal.drafted_per_round
    assert drafted is not None
    assert (1 + 0.944 * drafted) / (1 + cost * drafted) == pytest.approx(1.47)


@pytest.mark.exhaustive
def test_the_document_is_the_command_s(rows: tuple[PaperRow, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.papers.run.predict_papers", lambda: rows)
    document = Path(__file__).parents[2] / "docs" / "benchmarks" / "papers.md"
    assert document.read_text(encoding="utf-8") == run_paper() + "\n"
