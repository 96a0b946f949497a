"""Statistics of several engines, as if they were one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rayspec.types import EngineStats


def merged_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Add up counts and seconds, sort all plans by the time they were made, and take the first `gate_reason`."""
    total = EngineStats()
    for part in parts:
        for one in dataclasses.fields(EngineStats):
            value, sum_so_far = getattr(part, one.name), getattr(total, one.name)
            if isinstance(value, int | float):
                setattr(total, one.name, sum_so_far + value)
        for length, count in part.accepted_lengths.items():
            total.accepted_lengths[length] = total.accepted_lengths.get(length, 0) + count
    total.gate_reason = next((part.gate_reason for part in parts if part.gate_reason), "")
    total.plans = sorted((plan for part in parts for plan in part.plans), key=lambda plan: plan.elapsed_s)
    return total
