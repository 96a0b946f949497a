from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.figures.skips import (
    attention_outweighs_from,
)
from benchmarks.figures.tpt import pearson, spearman
from rayspec.planning.latency import Curve, LatencyModel

VALUES = st.lists(st.integers(-3, 3), min_size=3, max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_correlations_are_those_of_scipy(data: st.DataObject) -> None:
    first = data.draw(VALUES)
    second = data.draw(st.lists(st.floats(-5, 5, width=16), min_size=len(first), max_size=len(first)))
    for ours, theirs in ((pearson, stats.pearsonr), (spearman, stats.spearmanr)):
        found = ours(first, second)
        if len(set(first)) == 1 or len(set(second)) == 1:
            assert math.isnan(found)
        else:
            assert found == pytest.approx(theirs(first, second).statistic, abs=1e-6)


def latency(attention_s: float, mlp_s: float, kv_s: float) -> LatencyModel:
    return LatencyModel(
        sublayers=("attention", "mlp") * 2,
        curves={
            "attention": Curve(rows=(1,), base_s=(attention_s,), kv_s=kv_s),
            "mlp": Curve(rows=(1,), base_s=(mlp_s,)),
            "head": Curve(rows=(1,), base_s=(1.0,)),
        },
        head="head",
        stages=(0,) * 4,
        transfer_s=(0.0,) * 4,
    )


def test_where_attention_outweighs_mlp() -> None:
    assert attention_outweighs_from(latency(1.0, 3.0, 0.01)) == pytest.approx(200)
    assert attention_outweighs_from(latency(3.0, 1.0, 0.01)) == 0
    assert attention_outweighs_from(latency(1.0, 3.0, 0.0)) is None
