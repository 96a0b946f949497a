from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.figures.runs import Spread
from benchmarks.figures.skips import (
    attention_outweighs_from,
)
from benchmarks.figures.tpt import PlanPoint, TptExperiment, pearson, spearman
from rayspec.choices import FULL, SKIP
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


def point(predicted: float, measured: tuple[float, ...], **changes: float) -> PlanPoint:
    values = {"estimated_acceptance": 0.5, "observed_acceptance": 0.6, "tpt_as_accepted": predicted} | changes
    return PlanPoint(
        choices=(FULL, SKIP),
        origin="random",
        num_draft_tokens=3,
        predicted_tpt=predicted,
        measured_tpt=float(np.median(measured)),
        measured_by_prompt=measured,
        **values,
    )


def test_what_an_experiment_correlates() -> None:
    points = (
        point(10, (1, 3), estimated_acceptance=0.9, tpt_as_accepted=9),
        point(20, (6, 2), estimated_acceptance=0.1, tpt_as_accepted=21),
        point(30, (5, 7), estimated_acceptance=0.8, tpt_as_accepted=24),
    )
    spread = Spread(median=1, least=1, most=1)
    found = TptExperiment(context=9, num_tapped_tokens=8, plain_tpt=1, plain=spread, points=points)
    measured = [2, 4, 6]
    assert found.correlations() == pytest.approx(
        {
            "tpt": 1.0,
            "tpt_ranks": 1.0,
            "acceptance": np.corrcoef([0.9, 0.1, 0.8], measured)[0, 1],
            "acceptance_ranks": -0.5,
            "tpt_of_sound": 1.0,
            "acceptance_of_sound": -1.0,
            "tpt_as_accepted": np.corrcoef([9, 21, 24], measured)[0, 1],
            "between_prompts": np.corrcoef([1, 6, 5], [3, 2, 7])[0, 1],
        }
    )
    alone = dataclasses.replace(found, points=points[:1])
    assert set(alone.correlations().values()) == {None}
    assert found.median_ratio == pytest.approx(0.2)


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
