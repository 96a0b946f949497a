"""The seconds of a pass on each stage that it visits, by a LatencyModel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choices
from rayspec.planning.latency import LatencyModel

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Seconds are linear in the context; the slope is taken over this many tokens.
_FAR = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """The stages that a pass visits, in order, and the seconds on each: base_s + slope_s * context."""

    stages: tuple[int, ...]
    base_s: tuple[float, ...]
    slope_s: tuple[float, ...]


class PassCosts:
    """Costs of passes, cached by shape; each shape is computed once, for all contexts.

    Every stage that a pass visits takes the model's `overhead_s`, because each stage builds its own batch. So a pass
    over several stages takes longer than `LatencyModel` predicts, by `overhead_s` for each stage but one.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Use the costs of a latency model. Raises ValueError unless its stages are numbered 0, 1, ... without gaps."""
        if sorted(set(latency.stages)) != list(range(max(latency.stages) + 1)):
            raise ValueError(f"stages are {sorted(set(latency.stages))}; they must be numbered 0, 1, ...")
        self._latency = latency
        self._stages = np.asarray(latency.stages)
        self._known: dict[tuple[object, ...], PassCost] = {}
        self.num_stages = max(latency.stages) + 1

    def draft(self, choices: Choices, *, rows: int) -> PassCost:
        """Return the cost of a draft step: one row of each of `rows` sequences, through all sublayers and the head."""

        def seconds(context: float) -> Floats:
            return self._latency.sublayers_s(rows=rows, context=context, batch=rows, choices=choices)

        visited = np.asarray([choice != SKIP for choice in choices])
        return self._cost((choices, rows), seconds, visited=visited, head_rows=rows)

    def verify(self, *, rows: int, batch: int, prefix: int = 0, head_rows: int | None = None) -> PassCost:
        """Return the cost of a verify: all sublayers and the head over `rows` rows. The sublayers before `prefix` run
        only one row per sequence. head_rows: rows of the head, if they are others."""

        def seconds(context: float) -> Floats:
            found = self._latency.sublayers_s(rows=rows, context=context, batch=batch)
            if prefix:
                found[:prefix] = self._latency.sublayers_s(rows=batch, context=context, batch=batch)[:prefix]
            return found

        num_sampled = rows if head_rows is None else head_rows
        visited = np.ones(len(self._stages), bool)
        return self._cost((rows, batch, prefix, num_sampled), seconds, visited=visited, head_rows=num_sampled)

    def prefill(self, *, rows: int, batch: int, num_sampled: int) -> PassCost:
        """Return the cost of all sublayers over `rows` prompt tokens, and of the head for the `num_sampled` prompts
        that end in this pass."""
        return self.verify(rows=rows, batch=batch, head_rows=num_sampled)

    def _cost(
        self, shape: tuple[object, ...], seconds: Callable[[float], Floats], *, visited: Flags, head_rows: int
    ) -> PassCost:
        found = self._known.get(shape)
        if found is None:
            near, far = (self._by_stage(seconds(context)) for context in (0, _FAR))
            stages = sorted({0, self.num_stages - 1, *self._stages[visited].tolist()})
            base_s = near + self._latency.overhead_s
            base_s[-1] += self._latency.head_s(head_rows)
            slope_s = (far - near) / _FAR
            found = self._known[shape] = PassCost(
                stages=tuple(stages), base_s=tuple(base_s[stages].tolist()), slope_s=tuple(slope_s[stages].tolist())
            )
        return found

    def _by_stage(self, seconds: Floats) -> Floats:
        return np.bincount(self._stages, weights=seconds, minlength=self.num_stages).astype(np.float64)
