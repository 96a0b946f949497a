"""Converts values of Arrow and NumPy to Python's own types."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain_values(value: Any) -> Any:
    """Convert NumPy arrays and numbers in a nested value to Python's lists and numbers."""
    if isinstance(value, np.ndarray):
        return [plain_values(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value
