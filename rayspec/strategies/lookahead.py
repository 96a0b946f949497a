"""Lookahead as a plan: every round verifies the n-grams that the sequences' Jacobi windows have produced."""

from __future__ import annotations

from dataclasses import replace

from rayspec.types import Plan, no_draft


def lookahead_plan(num_sublayers: int) -> Plan:
    """Return the plan of Lookahead, in which the model itself drafts no tokens."""
    return replace(no_draft(num_sublayers, "lookahead"), lookahead=True)
