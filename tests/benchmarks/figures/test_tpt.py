from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.figures.tpt import pearson, spearman

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
