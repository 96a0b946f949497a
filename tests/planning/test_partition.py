import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayspec.planning.partition import Device, LayerCost, ModelCosts, StageCost, bytes_missing, partition, stage_costs
from rayspec.types import ConfigError

GIB = 2**30


def devices(*bytes_free: int) -> list[Device]:
    return [Device(name=str(number), bytes_free=each) for number, each in enumerate(bytes_free)]


def model(
    layer_seconds: Sequence[float],
    slowness: Sequence[float] = (1.0,),
    *,
    layer_bytes: Sequence[int] | int = 0,
    ends: tuple[int, int] = (0, 0),
    end_seconds: tuple[float, float] = (0.0, 0.0),
) -> ModelCosts:
    """Each device takes `slowness` times as long."""
    sizes = [layer_bytes] * len(layer_seconds) if isinstance(layer_bytes, int) else layer_bytes

    def cost(size: int, seconds: float) -> LayerCost:
        return LayerCost(
            weight_bytes=size - size // 3, kv_bytes=size // 3, seconds=tuple(seconds * s for s in slowness)
        )

    return ModelCosts(
        embedding=cost(ends[0], end_seconds[0]),
        layers=tuple(map(cost, sizes, layer_seconds)),
        head=cost(ends[1], end_seconds[1]),
    )


def all_cuts(num_layers: int, num_stages: int, starts: Sequence[int] | None) -> Iterator[tuple[range, ...]]:
    for inner in itertools.combinations(range(1, num_layers) if starts is None else starts[1:], num_stages - 1):
        yield tuple(itertools.starmap(range, itertools.pairwise((0, *inner, num_layers))))


def score(stages: Sequence[StageCost]) -> tuple[float, float]:
    return max(stage.seconds for stage in stages), sum(stage.seconds**2 for stage in stages)


def missing(stages: Sequence[StageCost]) -> int:
    return sum(max(0, -stage.bytes_left) for stage in stages)


def sizes(spans: Sequence[range]) -> list[int]:
    return [len(span) for span in spans]


@st.composite
def instances(draw: Any) -> tuple[ModelCosts, list[Device]]:
    """Whole seconds, so that ties are common and exact."""
    num_layers = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, min(4, num_layers)))
    few, many = st.integers(0, 9), st.integers(5, 40)
    costs = model(
        draw(st.lists(few, min_size=num_layers, max_size=num_layers)),
        draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages)),
        layer_bytes=draw(st.lists(few, min_size=num_layers, max_size=num_layers)),
        ends=(draw(few), draw(few)),
        end_seconds=(draw(few), draw(few)),
    )
    others = draw(st.sets(st.integers(1, max(1, num_layers - 1)), min_size=num_stages - 1))
    starts = (0, *sorted(others & set(range(num_layers)))) if draw(st.booleans()) else None
    costs = replace(costs, starts=starts, embedding_everywhere=draw(st.booleans()))
    return costs, devices(*draw(st.lists(many, min_size=num_stages, max_size=num_stages)))


@given(instances())
@example((replace(model([1] * 4, [1, 1], end_seconds=(2, 0)), embedding_everywhere=True), devices(1, 1)))
def test_brute_force_finds_nothing_better(instance: tuple[ModelCosts, list[Device]]) -> None:
    costs, places = instance
    cuts = [stage_costs(costs, places, spans) for spans in all_cuts(len(costs.layers), len(places), costs.starts)]
    assert bytes_missing(costs, places) == min(map(missing, cuts))
    fitting = [stages for stages in cuts if not missing(stages)]
    if fitting:
        found = stage_costs(costs, places, partition(costs, places))
        assert not missing(found)
        assert score(found) == min(map(score, fitting))
    else:
        with pytest.raises(ConfigError, match="missing"):
            partition(costs, places)


@pytest.mark.parametrize(
    ("tenths", "expected"), [([5, 2, 6, 4, 4, 9], [3, 2, 1]), ([1, 4, 5, 1, 8, 7, 2, 1], [2, 2, 1, 3])]
)
def test_rounding_does_not_hide_a_tie(tenths: list[int], expected: list[int]) -> None:
    for seconds in (tenths, [each * 0.1 for each in tenths]):
        costs = model(seconds, (1,) * len(expected))
        assert sizes(partition(costs, devices(*[1] * len(expected)))) == expected


def test_pinned_layers_win_and_only_report_what_is_missing() -> None:
    costs = model([1.0] * 8, (1, 1), layer_bytes=GIB)
    places = devices(4 * GIB, 4 * GIB)
    spans = partition(costs, places, pinned=[6, 2])
    assert spans == (range(6), range(6, 8))
    assert [stage.bytes_left for stage in stage_costs(costs, places, spans)] == [-2 * GIB, 2 * GIB]


FIRST_THREE = (0, 1, 2)


@pytest.mark.parametrize(
    ("pinned", "starts", "message"),
    [
        (None, None, r"'stages' is 2: .*needs 9\.0 GiB.*hold 6\.0.*3\.0 GiB are missing.*quantiz"),
        ([8], None, "'layers' is 8: it has 1 numbers for 2 stages"),
        ([4, 5], None, "'layers' is 4,5, 9 layers in all: the model has 8"),
        ([8, 0], None, "each stage at least 1"),
        ([4, 4], FIRST_THREE, r"'layers' is 4,4: layer 4 cannot begin a stage.*only layers 0, 1, 2 can"),
        (None, (0,), r"'stages' is 2, but only layer 0 can begin a stage.*set it to at most 1"),
    ],
)
def test_what_is_impossible_says_why(pinned: list[int] | None, starts: tuple[int, ...] | None, message: str) -> None:
    costs = replace(model([1.0] * 8, (1, 1), layer_bytes=GIB, ends=(GIB, 0)), starts=starts)
    with pytest.raises(ConfigError, match=message):
        partition(costs, devices(3 * GIB, 3 * GIB), pinned=pinned)


def test_only_some_layers_begin_a_stage() -> None:
    costs = replace(model([1.0] * 8, (1, 1)), starts=FIRST_THREE)
    assert partition(costs, devices(1, 1)) == (range(2), range(2, 8))
    assert partition(costs, devices(1, 1), pinned=[1, 7]) == (range(1), range(1, 8))


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_must_have_a_layer_each(num_stages: int) -> None:
    costs = model([1.0] * 3, (1,) * num_stages) if num_stages else model([1.0] * 3)
    with pytest.raises(ConfigError, match=f"'stages' is {num_stages}: a model of 3 layers has 1 to 3"):
        partition(costs, devices(*[1] * num_stages))
