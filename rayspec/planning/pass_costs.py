"""What a pass takes on each stage that it visits, by a LatencyModel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayspec.choices import SKIP, Choices
from rayspec.planning.latency import LatencyModel

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Seconds are linear in the context; the slope is taken over so many tokens.
_FAR = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """The stages visited, in order, and for each its seconds: base_s + slope_s * context."""

    stages: tuple[int, ...]
    base_s: tuple[float, ...]
    slope_s: tuple[float, ...]


class PassCosts:
    """Passes by their shape: each shape is worked out once, for all contexts.

    Every stage that a pass visits takes the model's `overhead_s`, because each makes its own batch of it. So a pass
    over several stages takes longer than `LatencyModel` says, by that much for each stage but one.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Raises ValueError unless stages are numbered 0, 1, ... in order."""
        if sorted(set(latency.stages)) != list(range(max(latency.stages) + 1)):
            raise ValueError(f"stages are {sorted(set(latency.stages))}; they must be numbered 0, 1, ...")
        self._latency = latency
        self._stages = np.asarray(latency.stages)
        self._known: dict[tuple[object, ...], PassCost] = {}
        self.num_stages = max(latency.stages) + 1

    def draft(self, choices: Choices, *, rows: int) -> PassCost:
        """A row of each of `rows` sequences through the sublayers, by their choices, and the head."""

        def seconds(context: float) -> Floats:
            return self._latency.sublayers_s(rows=rows, context=context, batch=rows, choices=choices)

        visited = np.asarray([choice != SKIP for choice in choices])
        return self._cost((choices, rows), seconds, visited=visited, head_rows=rows)

    def verify(self, *, rows: int, batch: int, prefix: int = 0) -> PassCost:
        """All sublayers and the head over `rows` rows; the sublayers before `prefix` over one row a sequence."""

        def seconds(context: float) -> Floats:
            found = self._latency.sublayers_s(rows=rows, context=context, batch=batch)
            if prefix:
                found[:prefix] = self._latency.sublayers_s(rows=batch, context=context, batch=batch)[:prefix]
            return found

        return self._cost((rows, batch, prefix), seconds, visited=self._all, head_rows=rows)

    def prefill(self, *, rows: int, batch: int, num_sampled: int) -> PassCost:
        """All sublayers over `rows` tokens of prompts; the head for those that end in it."""

        def seconds(context: float) -> Floats:
            return self._latency.sublayers_s(rows=rows, context=context, batch=batch)

        return self._cost(("prefill", rows, batch, num_sampled), seconds, visited=self._all, head_rows=num_sampled)

    @property
    def _all(self) -> Flags:
        return np.ones(len(self._stages), bool)

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
