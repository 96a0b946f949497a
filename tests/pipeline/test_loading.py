"""How layers are dealt to stages that turn out to be uneven."""

from __future__ import annotations

import pytest

from rayspec.pipeline.loading import balanced_cut
from rayspec.pipeline.replica import spans_of
from rayspec.planning.latency import LatencyModel, Measurement

NUM_LAYERS = 12


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


def test_spans_count_sublayers() -> None:
    assert spans(1, 2, 3) == ((0, 2), (2, 6), (6, 12))


def test_a_cut_that_is_even_stays() -> None:
    assert balanced_cut(measured((4, 4, 4), (1, 1, 1)), spans(4, 4, 4)) is None


def test_a_stage_that_is_a_little_slower_is_not_worth_loading_again() -> None:
    assert balanced_cut(measured((4, 4, 4), (1, 1.2, 1)), spans(4, 4, 4)) is None


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_layers_move_away_from_a_slow_stage(slow: int) -> None:
    pace = tuple(3.0 if stage == slow else 1.0 for stage in range(3))
    better = balanced_cut(measured((4, 4, 4), pace), spans(4, 4, 4))
    assert better is not None
    lengths = [len(layers) for layers in better]
    assert lengths[slow] == 1
    assert sorted(lengths) == [1, 5, 6]
    assert [layer for layers in better for layer in layers] == list(range(NUM_LAYERS))
    # What is measured after that is as it should be.
    assert balanced_cut(measured(tuple(lengths), pace), spans(*lengths)) is None


def test_the_head_counts_as_part_of_the_last_stage() -> None:
    better = balanced_cut(measured((4, 4, 4), (1, 1, 1), head_s=4e-3), spans(4, 4, 4))
    assert better is not None
    assert len(better[2]) < 4
