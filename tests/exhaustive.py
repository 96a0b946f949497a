"""What runs in every `make test`, and what only in `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """All values as parameters of a test; those that are not among the few are for `make test-all`."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
