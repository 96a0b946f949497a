"""Eager passes in static buffers: launches and their addresses depend on the bucket only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rayspec.choices import Choice
from rayspec.model.architecture import Decomposition
from rayspec.model.static_rows import Filling, StaticRows, StepBuffers
from rayspec.model.sublayers import Sublayer, Tap, run


class Step(Protocol):
    """Runs one pass at a time in static buffers: `hold` the pass, then `embed` and `run` its rows."""

    def hold(self, filling: Filling) -> StaticRows:
        """Write the pass to the buffers, with its rotary embedding, and return its rows."""

    def embed(self, rows: StaticRows) -> None:
        """Write the embedding of `rows.tokens` to `rows.residual`."""

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Do as `sublayers.run`, on `rows.residual`. Changes and returns this buffer: [1, N, hidden_size]."""


class StaticStep:
    """A `Step` that launches its parts one by one, without graphs."""

    def __init__(self, parts: Decomposition, buffers: StepBuffers) -> None:
        self.parts = parts
        self.buffers = buffers

    def hold(self, filling: Filling) -> StaticRows:
        rows, is_new = self.buffers.hold(filling)
        if is_new:
            self.rotate(rows)
        return rows

    def rotate(self, rows: StaticRows) -> None:
        """Compute the rotary embedding of the rows' positions and write it to the buffers."""
        before = dict(rows.rope)
        try:
            self.parts.rotate(rows.residual, rows)
        except BaseException:  # a capture that fails has computed some types in memory that others use later
            rows.rope.clear()
            rows.rope.update(before)
            raise
        self.buffers.keep_rope(rows)

    def embed(self, rows: StaticRows) -> None:
        rows.residual.copy_(self.parts.embed(rows.tokens))

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        return run(span, rows.residual, rows, choices=choices, tap=tap)
