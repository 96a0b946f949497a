"""A pass in static buffers, eagerly: each part is launches that depend on the bucket only, at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rayspec.choices import Choice
from rayspec.model.architecture import Decomposition
from rayspec.model.static_rows import Filling, StaticRows, StepBuffers
from rayspec.model.sublayers import Sublayer, Tap, run


class Step(Protocol):
    """Runs a pass in static buffers. One pass at a time: `hold` it, then embed and run its rows."""

    def hold(self, filling: Filling) -> StaticRows:
        """The rows of the pass, in the buffers, with their rotary embedding."""

    def embed(self, rows: StaticRows) -> None:
        """Put the embedding of `rows.tokens` into `rows.residual`."""

    def run(
        self,
        span: Sequence[Sublayer],
        rows: StaticRows,
        *,
        choices: Sequence[Choice] | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """As `sublayers.run`, over `rows.residual`, which it changes and returns: [1, N, hidden_size]."""


class StaticStep:
    """The step whose parts are launched one by one."""

    def __init__(self, parts: Decomposition, buffers: StepBuffers) -> None:
        self.parts = parts
        self.buffers = buffers

    def hold(self, filling: Filling) -> StaticRows:
        rows, is_new = self.buffers.hold(filling)
        if is_new:
            self.rotate(rows)
        return rows

    def rotate(self, rows: StaticRows) -> None:
        """Compute the rotary embedding of the rows' positions, into the buffers."""
        self.parts.rotate(rows.residual, rows)
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
