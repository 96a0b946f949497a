from typing import get_args

import pytest

from rayspec.choices import (
    FULL,
    SKIP,
    Choice,
    Keys,
    Weights,
    combinations,
    combined,
    described,
    keys_of,
    nearest,
    weights_of,
)


def test_a_choice_is_its_weights_and_its_keys() -> None:
    pairs = [(weights, keys) for weights in get_args(Weights) for keys in get_args(Keys)]
    choices = [combined(weights, keys) for weights, keys in pairs]
    assert [(weights_of(choice), keys_of(choice)) for choice in choices] == pairs
    assert {*choices, SKIP} == set(get_args(Choice))


@pytest.mark.parametrize(
    ("choice", "possible", "expected"),
    [
        ("int4+pages", ("full", "int4", "int4+pages"), "int4+pages"),
        ("int4+pages", ("full", "int4", "pages"), "int4"),
        ("int4+pages", ("full", "int8", "pages"), "pages"),
        ("int4+pages", ("full", "int8", "window"), "full"),
        ("int8", ("full", "int4", "skip"), "full"),
        ("window", ("full", "int4"), "full"),
        ("skip", ("full", "skip"), "skip"),
        ("full", (), "full"),
    ],
)
def test_the_nearest_choice_does_no_more_damage(choice: Choice, possible: tuple[Choice, ...], expected: Choice) -> None:
    assert nearest(choice, possible) == expected


def test_all_choices_allowed_are_all_choices() -> None:
    every = combinations(["int8", "int4", "window", "pages", "skip"])
    assert set(every) == set(get_args(Choice))
    assert len(set(every)) == len(every)
    assert (every[0], every[-1]) == (FULL, SKIP)


def test_choices_are_counted_in_words() -> None:
    assert described(("full", "skip", "full", "int4+pages", "full", "skip")) == "3 full, 2 skip, 1 int4+pages"
    assert described(("full",) * 8) == "8 full"
