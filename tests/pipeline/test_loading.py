"""How layers are dealt to stages that turn out to be uneven."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayspec.config import EngineConfig, ParallelOptions
from rayspec.model.sizes import model_sizes, quantised_bytes
from rayspec.model.weights import read_config
from rayspec.pipeline import loading, placement
from rayspec.pipeline.loading import _costs, _sizes, balanced_cut
from rayspec.pipeline.replica import spans_of
from rayspec.planning.latency import LatencyModel, Measurement
from rayspec.planning.partition import Device, LayerCost, ModelCosts
from rayspec.types import ConfigError
from tests.families import checkpoint, small_config
from tests.strategy_cases import latency

NUM_LAYERS = 12


def test_shards_end_where_a_strategy_refuses_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Ray that goes on they would keep their places."""
    ended: list[str] = []
    replica = SimpleNamespace(loaded={"stage-0": None})
    stages = SimpleNamespace(
        replica=replica, num_sublayers=8, ways=[["full", "skip"]] * 8, shutdown=lambda: ended.append("all")
    )
    monkeypatch.setattr(placement, "_runs_on_gpu", lambda config: False)
    monkeypatch.setattr(loading, "_started", lambda blueprint: (stages, latency()))
    speculation = {"strategy": "layerskip", "exit_layer": 9}
    config = small_config(checkpoint("llama"), parallel={"stages": 2}, speculation=speculation)
    with pytest.raises(ConfigError, match="exit_layer"):
        loading.load_pipeline(config, with_tokenizer=False)
    assert ended == ["all"]


def cut_anew(latency: Any, spans: Any, gib_free: tuple[int, ...] = (100, 100, 100)) -> Any:
    """Layers of a GiB each."""
    layer = LayerCost(weight_bytes=2**30, seconds=(1.0,) * len(spans))
    nothing = LayerCost(weight_bytes=0, seconds=(0.0,) * len(spans))
    costs = ModelCosts(embedding=nothing, layers=(layer,) * (spans[-1][1] // 2), head=nothing)
    devices = [Device(name=str(stage), bytes_free=free * 2**30) for stage, free in enumerate(gib_free)]
    return balanced_cut(latency, spans, costs, devices)


def test_a_cut_by_time_keeps_to_the_memory() -> None:
    pace = (1, 3, 1)
    free, tight = (cut_anew(measured((4, 4, 4), pace), spans(4, 4, 4), gib) for gib in ((9, 9, 9), (4, 9, 9)))
    assert len(free[0]) > 4
    assert len(tight[0]) == 4


def measured(layers: tuple[int, ...], pace: tuple[float, ...], head_s: float = 0.0) -> LatencyModel:
    """Of a model whose layers all take 1 ms, times its device's pace."""
    measurements, kinds, devices, stages = [], [], [], []
    for stage, (count, factor) in enumerate(zip(layers, pace, strict=True)):
        for kind in ("attention", "mlp"):
            seconds = 5e-4 * factor
            measurements += [
                Measurement(kind=kind, rows=rows, context=context, batch=1, seconds=seconds, device=f"stage-{stage}")
                for rows in (1, 8)
                for context in (0, 1024)
            ]
        kinds += ["attention", "mlp"] * count
        devices += [f"stage-{stage}"] * 2 * count
        stages += [stage] * 2 * count
    last = f"stage-{len(layers) - 1}"
    measurements.append(Measurement(kind="head", rows=1, context=0, batch=1, seconds=max(head_s, 1e-9), device=last))
    return LatencyModel.fit(measurements, kinds, devices=devices, stages=stages)


def spans(*layers: int) -> tuple[tuple[int, int], ...]:
    ends = [sum(layers[: at + 1]) for at in range(len(layers))]
    return spans_of([range(end - count, end) for end, count in zip(ends, layers, strict=True)])


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_layers_move_away_from_a_slow_stage(slow: int) -> None:
    pace = tuple(3.0 if stage == slow else 1.0 for stage in range(3))
    better = cut_anew(measured((4, 4, 4), pace), spans(4, 4, 4))
    assert better is not None
    lengths = [len(layers) for layers in better]
    assert lengths[slow] == 1
    assert sorted(lengths) == [1, 5, 6]
    assert [layer for layers in better for layer in layers] == list(range(NUM_LAYERS))
    # What is measured after that is as it should be, and so is a cut that is nearly even.
    assert cut_anew(measured((4, 4, 4), (1, 1.2, 1)), spans(4, 4, 4)) is None
    assert cut_anew(measured(tuple(lengths), pace), spans(*lengths)) is None


def test_the_head_counts_as_part_of_the_last_stage() -> None:
    better = cut_anew(measured((4, 4, 4), (1, 1, 1), head_s=4e-3), spans(4, 4, 4))
    assert better is not None
    assert len(better[2]) < 4


def layer_bytes(*, stages: int = 2, tensor: int = 1, **options: Any) -> list[int]:
    model, parallel = checkpoint("qwen3_moe"), ParallelOptions(stages=stages, tensor=tensor)
    config = EngineConfig(model=model, dtype="float32", parallel=parallel, **options)
    costs = _costs(config, parallel, _sizes(config, parallel, read_config(model), on_cpu=True), 128)
    return [layer.weight_bytes for layer in costs.layers]


def copy_bytes(*kinds: str, tensor: int = 1) -> list[int]:
    """By layer of the same model."""
    found = [
        quantised_bytes(
            read_config(checkpoint("qwen3_moe")),
            kind,  # type: ignore[arg-type]
            tensor=tensor,
            on_cpu=True,
        )
        for kind in kinds
    ]
    return [sum(each[2 * layer] + each[2 * layer + 1] for each in found) for layer in range(4)]


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_weigh_what_they_and_the_copies_for_their_drafts_do(tensor: int) -> None:
    sizes = model_sizes(read_config(checkpoint("qwen3_moe")), dtype=torch.float32, tensor=tensor)
    weights = [layer.weight_bytes for layer in sizes.layers]
    int4, both = copy_bytes("int4", tensor=tensor), copy_bytes("int4", "int8", tensor=tensor)
    with_int8 = {"speculation": {"choices": ("int8", "int4", "skip")}}
    assert min(int4) > 0
    assert layer_bytes(tensor=tensor) == [sum(pair) for pair in zip(weights, int4, strict=True)]
    assert layer_bytes(tensor=tensor, **with_int8) == [sum(pair) for pair in zip(weights, both, strict=True)]
    assert layer_bytes(tensor=tensor, speculation={"strategy": "ar"}) == weights
    if tensor == 1:
        assert layer_bytes(offload={"to": "disk"}) == int4


def test_copies_count_as_far_as_every_stage_may_have_its_share() -> None:
    choices, share = ("int4", "int8"), sum(copy_bytes("int4")) // 2
    plain = layer_bytes(speculation={"strategy": "ar"})
    for most, kinds in ((0, ()), (share - 1, ()), (share, ("int4",)), (10**9, choices)):
        found = layer_bytes(speculation={"choices": choices, "extra_weight_bytes": most})
        assert [here - alone for here, alone in zip(found, plain, strict=True)] == copy_bytes(*kinds)
