"""Lookahead as a plan: in every round, what the sequences' Jacobi windows have made."""

from __future__ import annotations

from dataclasses import replace

from rayspec.types import Plan, no_draft


def lookahead_plan(num_sublayers: int) -> Plan:
    """The model itself drafts nothing."""
    return replace(no_draft(num_sublayers, "lookahead"), lookahead=True)
