"""What rounds take, by the latency model and by how far it was off in the rounds that were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.choices import Choice
from rayspec.planning.latency import LatencyModel

_HALF_LIFE = 16.0  # rounds
_CONTEXT_GRID = 64  # tokens that change a forward's time by little


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundShape:
    """choices: of the draft's sublayers. num_draft_steps: its forwards; num_drafting: sequences in them. rows: of the
    verify. context: mean tokens of a sequence; batch: sequences."""

    choices: Sequence[Choice] = ()
    num_draft_steps: float = 0.0
    num_drafting: float = 0.0
    rows: float
    context: int
    batch: int

    @property
    def kind(self) -> str:
        if self.num_draft_steps:
            return "drafted"
        return "looked up" if self.rows > self.batch else "plain"


class RecentMean:
    """Of what was seen lately; `value` is the initial one until something was."""

    def __init__(self, initial: float) -> None:
        self.value = initial
        self._weight = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, value: float) -> None:
        fade = 0.5 ** (1 / _HALF_LIFE)
        self._weight = self._weight * fade + 1.0
        self.value += (value - self.value) / self._weight


class RecentRate:
    """Tokens per second of what was seen lately; 0 until something was."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0

    @property
    def value(self) -> float:
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def with_prior(self, rate: float, seconds: float) -> float:
        """The value, had there been so many seconds more at another rate."""
        return (self._num_tokens + rate * seconds) / (self._seconds + seconds)

    def seconds(self, num_tokens: float) -> float:
        """That so many tokens take; 0 where that is not known."""
        return num_tokens / self.value if self.value else 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        fade = 0.5 ** (1 / _HALF_LIFE)
        self._num_tokens = self._num_tokens * fade + num_tokens
        self._seconds = self._seconds * fade + seconds


class RoundCosts:
    """Seconds of rounds of any shape. Draft steps and verifies are off by factors of their own, verifies by another one
    where there is nothing to verify, where it was drafted (some rows are done then) and where it was looked up; what a
    round takes beside them is learned too.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self._draft = RecentMean(1.0)
        self._verify = {kind: RecentMean(1.0) for kind in ("plain", "drafted", "looked up")}
        self._rest_s = RecentMean(latency.round_s)
        self._known: dict[tuple[float, int, int], float] = {}

    def observe(self, shape: RoundShape, *, draft_s: float, verify_s: float, seconds: float) -> None:
        """A finished round; seconds: of all of it."""
        if shape.num_draft_steps:
            self._draft.observe(draft_s / self._draft_s(shape))
        self._verify[shape.kind].observe(verify_s / self._verify_s(shape))
        self._rest_s.observe(max(0.0, seconds - draft_s - verify_s))

    def seconds(self, shape: RoundShape) -> float:
        draft_s = self._draft.value * self._draft_s(shape) if shape.num_draft_steps else 0.0
        return draft_s + self._verify[shape.kind].value * self._verify_s(shape) + self._rest_s.value

    def row_s(self, *, context: int, batch: int) -> float:
        """Of one more looked-up row of a sequence in the verify."""
        few, many = (RoundShape(rows=rows * batch, context=context, batch=batch) for rows in (2, 9))
        return (self.seconds(many) - self.seconds(few)) / (7 * batch)

    def _draft_s(self, shape: RoundShape) -> float:
        context, batch = shape.context, shape.num_drafting
        return shape.num_draft_steps * self._latency.draft_step_s(shape.choices, context=context, batch=batch)

    def _verify_s(self, shape: RoundShape) -> float:
        context = shape.context // _CONTEXT_GRID * _CONTEXT_GRID
        key = (round(shape.rows), context, shape.batch)
        if key not in self._known:
            self._known[key] = self._latency.verify_s(rows=key[0], context=context, batch=shape.batch)
        return self._known[key]
