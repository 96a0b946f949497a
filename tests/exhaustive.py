"""What runs in every `make test`, and what only in `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Parameters of a test: all values, of which those that are not among the few are for `make test-all`."""
    beyond = pytest.mark.exhaustive
    return [
        value if value in few else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=beyond)
        for value in values
    ]
