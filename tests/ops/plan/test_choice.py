"""`rayspec plan`, `rayspec placement` and `rayspec k8s render` choose the same layout, and take each other's flags."""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from rayspec.config import EngineConfig
from rayspec.errors import ConfigError
from rayspec.ops.k8s.options import RenderOptions
from rayspec.ops.k8s.render import ClusterPlan, plan_cluster
from rayspec.ops.plan.forecast import place_best, rank_layouts
from rayspec.ops.plan.options import PlacementOptions, PlanOptions
from rayspec.ops.plan.placement import Layout, Placement, place
from rayspec.ops.plan.report import flags_of
from tests.cluster.commands import engine_of_job
from tests.exhaustive import few_of
from tests.ops.plan.models import LLAMA_8B, llama

Shape = tuple[int, int, int, int]  # stages, ranks, copies, sequences of a copy


SMALL = llama(1024, 6, 8, 4096)
LOAD = {"context": 33, "concurrency": 8}


def planned(config: LlamaConfig, gpus: str, **options: Any) -> Layout:
    load = {"output_tokens": min(256, options.get("context", 33) - 1)} | LOAD | options
    return rank_layouts(config, PlanOptions(gpus=gpus, **load)).best


def placed(config: LlamaConfig, gpus: str, **options: Any) -> tuple[Placement, ...]:
    return place_best(config, PlacementOptions(gpus=gpus, **LOAD | options))


def shape_of(layout: Layout) -> Shape:
    return layout.stages, layout.tensor, layout.replicas, layout.concurrency


def shape_placed(placement: Placement) -> Shape:
    options = placement.options
    return len(placement.stages), options.num_ranks, placement.num_copies, options.concurrency


def shape_rendered(plan: ClusterPlan) -> Shape:
    return shape_placed(replace(plan.placement, num_copies=plan.num_copies))


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[..., ClusterPlan]:
    def make(config: LlamaConfig, gpus: str, **options: Any) -> ClusterPlan:
        config.save_pretrained(tmp_path / "model")
        model = {"model": "a/b", "sizes_from": str(tmp_path / "model"), "kind": "service"}
        return plan_cluster(RenderOptions(**model | LOAD | {"gpus": gpus} | options))

    return make


@pytest.mark.parametrize(
    "gpus",
    few_of(["1xH100", "3xH100", "2x4xH100", "5xA-8G@1000", "16xA-3G@900"], ["1xH100", "2x4xH100", "5xA-8G@1000"]),
)
def test_all_three_choose_the_same(gpus: str, rendered: Callable[..., ClusterPlan]) -> None:
    best = planned(SMALL, gpus)
    if not best.fits:
        assert not placed(SMALL, gpus)[0].fits
        with pytest.raises(ConfigError, match="GiB are missing"):
            rendered(SMALL, gpus)
        return
    [placement] = placed(SMALL, gpus)
    assert shape_placed(placement) == shape_of(best)
    assert placement.stages == best.groups[0].stages
    assert placement.fits
    assert shape_rendered(rendered(SMALL, gpus)) == shape_of(best)


def test_what_is_named_wins(rendered: Callable[..., ClusterPlan]) -> None:
    assert shape_placed(placed(SMALL, "8xH100", stages=3)[0]) == (3, 1, 1, 8)
    assert shape_placed(placed(SMALL, "8xH100", tensor=2)[0]) == (1, 2, 1, 8)
    assert shape_placed(placed(SMALL, "8xH100", layers="1,5")[0]) == (2, 1, 1, 8)
    assert placed(SMALL, "8xH100", stages=2, tensor=2) == (
        place(SMALL, PlacementOptions(gpus="8xH100", stages=2, tensor=2, **LOAD)),
    )
    assert shape_rendered(rendered(SMALL, "8xH100", stages=3)) == (3, 1, 1, 8)
    assert shape_rendered(rendered(SMALL, "8xH100", tensor=2)) == (1, 2, 1, 8)
    assert shape_rendered(rendered(SMALL, "8xH100", stages=3, replicas=2)) == (3, 1, 2, 8)


def test_copies_on_unlike_gpus_are_placed_each_and_not_rendered(rendered: Callable[..., ClusterPlan]) -> None:
    best = planned(SMALL, "2xH200,2xA100-80G")
    assert len(best.groups) == 2
    placements = placed(SMALL, "2xH200,2xA100-80G")
    assert [placement.num_copies for placement in placements] == [group.num_copies for group in best.groups]
    assert placements[1].stages[0].device.name.endswith("A100-80G")
    with pytest.raises(ConfigError, match="--replicas 1"):
        rendered(SMALL, "2xH200,2xA100-80G")
    with pytest.raises(ConfigError, match=r"'tensor' is 4, of the GPUs.*one kind"):
        rendered(SMALL, "2xH200,2xA100-80G", tensor=4)
    assert flags_of(best, PlanOptions(gpus="2xH200,2xA100-80G", output_tokens=32, **LOAD))["render"] is None


def test_ranks_of_a_stage_are_alike_and_share_a_node() -> None:
    def degrees(gpus: str) -> set[int]:
        ranking = rank_layouts(SMALL, PlanOptions(gpus=gpus, output_tokens=32, **LOAD))
        return {candidate.layout.tensor for candidate in ranking.candidates}

    assert degrees("2xH200,2xA100-80G") == {1, 2}
    assert degrees("2x2xH100") == {1, 2}
    assert degrees("4xH100") == {1, 2, 4}
    assert degrees("2x6xH100") == {1, 2}, "of 6 GPUs, 4 ranks would leave 2"
    assert degrees("1x6xH100") == {1, 2, 4}


def test_ranks_divide_all_that_they_share() -> None:
    """As a shard requires it when it loads: Phi-4 has 40 heads, and 10 for keys and values."""
    for config, most in ((llama(5120, 4, 40, 17920, 10), 2), (llama(8192, 4, 64, 28676), 4)):
        best = planned(config, "8xH100", goal="latency", concurrency=1)
        assert best.tensor == most, "a request alone is fastest on all ranks"
        with pytest.raises(ConfigError, match="'tensor' is 8: it must divide the model's"):
            placed(config, "8xH100", tensor=8)


def test_a_layout_that_does_not_load_is_not_recommended() -> None:
    """A rank holds a whole layer beside its share: here a layer does not fit any GPU, though its shares do."""
    thick = llama(8192, 4, 8, 131072)
    gpus: dict[str, Any] = {"gpus": "8xA-12G@1000", "context": 33, "concurrency": 1, "draft_weights": "none"}
    placement = place(thick, PlacementOptions(**gpus, tensor=8, stages=1))
    assert placement.missing_bytes == 0
    assert placement.loading_bytes_missing > 0
    assert not placement.fits
    ranking = rank_layouts(thick, PlanOptions(**gpus, output_tokens=32))
    assert "1 x 8 x 1" in {layout.name for layout in ranking.others}
    assert min(layout.missing_bytes for layout in ranking.others) > 0


def test_where_nothing_fits_it_is_the_layout_that_lacks_least() -> None:
    best, [placement] = planned(LLAMA_8B, "2xL4", context=65536), placed(LLAMA_8B, "2xL4", context=65536)
    assert not best.fits
    assert shape_placed(placement) == shape_of(best)
    assert placement.missing_bytes * placement.options.num_ranks == best.missing_bytes
    assert "which lack least" in placement.choice


CASES = (
    ("1xH100", ()),
    ("2x2xH200", ("--quantization", "fp8", "--dtype", "float16", "--max-num-batched-tokens", 2048)),
    ("4xB-40G@1000", ("--draft-weights", "int8,int4")),
    ("12xA-4G@1000.5", ("--concurrency", 30, "--goal", "latency", "--draft-weights", "none")),
)


@pytest.mark.parametrize(("gpus", "more"), CASES, ids=[gpus for gpus, _ in CASES])
def test_printed_flags_make_that_layout(gpus: str, more: tuple[Any, ...], run: Any, tmp_path: Path) -> None:
    SMALL.save_pretrained(tmp_path / "small")
    made = run(
        "plan", "--model", "small", "--gpus", gpus, "--context", 33, "--output-tokens", 32, *more, "--json", "p.json"
    )
    assert made.exit_code == 0, made.output
    pasted = dict(_pasted(made.stdout))
    best = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert list(best["flags"].values()) == [
        pasted["jobs, rayspec serve"],
        pasted["Python"].removeprefix("LLM(MODEL, ").removesuffix(")"),
        pasted["rayspec placement"],
        pasted["rayspec k8s render"],
    ]
    layout = best["candidates"][0]
    expected = tuple(layout[name] for name in ("stages", "tensor", "replicas"))
    name = " x ".join(map(str, expected))
    row = next(line for line in made.stdout.splitlines() if line.strip().startswith(name)).removeprefix(f"  {name}")
    predicted = [number.replace(",", "").replace(".", "").strip("0") for number in row.split()[2:4]]
    assert all(len(number) <= 2 for number in predicted), row

    assert _of_job(pasted["jobs, rayspec serve"]) == expected
    assert run("serve", "--model", "demo", *shlex.split(pasted["jobs, rayspec serve"]), "--help").exit_code == 0
    arguments = eval(f"dict({best['flags']['python']})")
    engine = EngineConfig(model="m", **arguments)
    assert _of_engine(engine) == expected
    copies = best["options"]["draft_weights"]
    assert set(engine.speculation.draft_weights) == set(copies)
    assert set(_engine_of(pasted["jobs, rayspec serve"]).speculation.draft_weights) == set(copies)

    shown = run("placement", "--model", "small", *shlex.split(pasted["rayspec placement"]), "--json", "q.json")
    assert shown.exit_code == 0, shown.output
    stages = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["stages"]
    assert [stage["weight_bytes"] for stage in stages] == layout["weight_bytes"]

    words = (
        "--model", "a/b", "--sizes-from", "small", "--output", "o", *shlex.split(pasted["rayspec k8s render"]), "in",
    )  # fmt: skip
    manifest = run("k8s", "render", *words)
    assert manifest.exit_code == 0, manifest.output
    entrypoint = list(yaml.safe_load_all(manifest.stdout))[-1]["spec"]["entrypoint"]
    assert _of_job(" ".join(shlex.split(entrypoint)[2:])) == expected
    assert set(_engine_of(" ".join(shlex.split(entrypoint)[2:])).speculation.draft_weights) == set(copies)


def _pasted(text: str) -> Iterator[tuple[str, str]]:
    lines = text.split("to use the recommended layout:\n")[1].splitlines()
    for line in lines:
        name, _, flags = line.strip().partition(":")
        yield name, flags.strip()


def _engine_of(flags: str) -> EngineConfig:
    """What the engine is told by the real parser of a job."""
    words = shlex.split(flags)
    if "--model" not in words:
        words = ["--model", "m", "--output", "o", *words, "in"]
    return engine_of_job(words)


def _of_job(flags: str) -> tuple[int, int, int]:
    return _of_engine(_engine_of(flags))


def _of_engine(engine: EngineConfig) -> tuple[int, int, int]:
    parallel = engine.parallel
    return (parallel.stages, parallel.tensor, parallel.replicas) if parallel is not None else (1, 1, 1)
