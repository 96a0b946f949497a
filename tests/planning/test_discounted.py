from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayspec.planning.discounted import Discounted

Seen = tuple[float, float, float]  # total, weight, age
weights = st.floats(0.01, 100)


@given(
    seen=st.lists(st.tuples(st.floats(-10, 10), weights, weights), max_size=20),
    half_life=st.floats(0.5, 50),
    prior=st.floats(-5, 5),
    strength=st.floats(0, 20),
)
def test_it_is_the_ratio_of_sums_in_which_each_has_halved_by_all_that_came_later(
    seen: list[Seen], half_life: float, prior: float, strength: float
) -> None:
    record = Discounted(half_life, prior=prior, strength=strength)
    for total, weight, age in seen:
        record.observe(total, weight, age=age)
    factors = [0.5 ** (sum(age for *_, age in seen[index + 1 :]) / half_life) for index in range(len(seen))]
    total = sum(factor * total for factor, (total, *_) in zip(factors, seen, strict=True))
    weight = sum(factor * weight for factor, (_, weight, _) in zip(factors, seen, strict=True))
    assert record.total == pytest.approx(total, abs=1e-9)
    assert record.weight == pytest.approx(weight)
    assert record.is_known == bool(seen)
    if weight + strength:
        assert record.value == pytest.approx((total + prior * strength) / (weight + strength), abs=1e-9)


@given(weight=weights, half_life=st.floats(0.5, 50))
def test_it_ages_by_weight_unless_told_otherwise(weight: float, half_life: float) -> None:
    by_weight, by_age = Discounted(half_life), Discounted(half_life)
    for _ in range(3):
        by_weight.observe(1.0, weight)
        by_age.observe(1.0, weight, age=weight)
    assert by_weight.value == by_age.value


def test_the_prior_is_the_value_until_something_was_seen() -> None:
    mean = Discounted(16, prior=7.0)
    assert (mean.value, mean.is_known) == (7.0, False)
    mean.observe(3.0)
    assert (mean.value, mean.is_known) == (3.0, True)
    drawn = Discounted(16, prior=7.0, strength=1.0)
    drawn.observe(3.0)
    assert drawn.value == 5.0
    assert drawn.with_prior(0.0, 2.0) == 1.0
    assert Discounted(16).with_prior(0.5, 0.0) == 0.5


def test_of_two_kinds_in_turn_the_value_is_the_middle_and_it_follows_a_change() -> None:
    mean = Discounted(16)
    for _ in range(500):
        mean.observe(0.0)
        mean.observe(1.0)
    assert mean.value == pytest.approx(0.5, abs=0.03)
    for _ in range(64):
        mean.observe(1.0)
    assert mean.value > 0.95


def test_an_infinite_age_forgets_all_before() -> None:
    record = Discounted(1.0)
    record.observe(5.0, 1.0, age=math.inf)
    record.observe(2.0, 1.0, age=math.inf)
    assert record.value == 2.0


@pytest.mark.parametrize(("half_life", "strength"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_what_cannot_be(half_life: float, strength: float) -> None:
    with pytest.raises(ValueError, match="half_life"):
        Discounted(half_life, strength=strength)
