"""Keys: any of them, whole, as a bearer's."""

from __future__ import annotations

import pytest

from rayspec.serve.access import ApiKeys

KEYS = ApiKeys.of(["first-key", "second-key"])


@pytest.mark.parametrize("header", ["Bearer first-key", "Bearer second-key", "bearer second-key", "Bearer  first-key "])
def test_each_key_opens(header: str) -> None:
    assert KEYS.admit(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer first",
        "Bearer first-key2",
        "Bearer first-key second-key",
        "Bearer FIRST-KEY",
        "Basic first-key",
        "first-key",
        "Bearer \udce4",
    ],
)
def test_nothing_else_does(header: str | None) -> None:
    assert not KEYS.admit(header)


def test_without_keys_the_door_is_open() -> None:
    assert ApiKeys.of([]).admit(None)


def test_keys_themselves_are_not_kept() -> None:
    assert "first" not in repr(KEYS)
