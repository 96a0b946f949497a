"""Status of a model's replica; /status returns a list of them."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import rayspec
from rayspec.choices import Choice
from rayspec.pool.stopped import Place
from rayspec.types import EngineStats, PlanRecord

if TYPE_CHECKING:
    from rayspec.decode.engine_loop import Client

EngineHealth = Literal["ready", "recovering", "engine dead", "stuck"]
"""recovering: lost shards are being replaced, and requests wait. stuck: see `decode/stages.py`."""


class RecentRates:
    """Computes rates over the last `window_s` seconds, from samples of an engine's counters."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._counts: deque[tuple[float, EngineStats]] = deque()

    def add(self, stats: EngineStats, time_s: float) -> None:
        """Add a sample. time_s: of a monotonic clock."""
        self._counts.append((time_s, copy.copy(stats)))
        while time_s - self._counts[0][0] > self._window_s:
            self._counts.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Rate of generated tokens over all sequences. Idle time at the beginning of the window does not count."""
        busy = [one for _, one in self._counts if one.num_generated_tokens > self._counts[0][1].num_generated_tokens]
        if not busy:
            return 0.0
        (begin_s, begin), (end_s, end) = self._counts[len(self._counts) - len(busy) - 1], self._counts[-1]
        return (end.num_generated_tokens - begin.num_generated_tokens) / (end_s - begin_s)

    @property
    def grown(self) -> EngineStats:
        if not self._counts:
            return EngineStats()
        first, last = self._counts[0][1], self._counts[-1][1]
        names = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
        return EngineStats(**{name: getattr(last, name) - getattr(first, name) for name in names})


class PlanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A PlanRecord as JSON. choices: how the draft runs each sublayer. Rates are tokens per second of a sequence."""

    choices: list[Choice]
    num_draft_tokens: int
    source: str
    reason: str
    estimated_acceptance: float
    predicted_tpt: float
    plain_tpt: float

    @classmethod
    def of(cls, record: PlanRecord) -> PlanStatus:
        found: dict[str, Any] = {name: getattr(record, name) for name in cls.__struct_fields__ if hasattr(record, name)}
        plan = record.plan
        found |= {"num_draft_tokens": plan.num_draft_tokens, "source": plan.source}
        return cls(choices=list(plan.choices), **found)


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at this moment. num_running, num_waiting: sequences. num_generated_tokens: total since the start.
    tokens_per_s, acceptance_rate, mean_accepted_length: over the last seconds. speed_up: over plain decoding, see
    EngineStats. plan: the current plan, None before the first."""

    model: str
    num_sublayers: int
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    num_generated_tokens: int
    tokens_per_s: float
    acceptance_rate: float | None
    mean_accepted_length: float | None
    speed_up: float | None
    gate_reason: str
    plan: PlanStatus | None
    health: EngineHealth
    version: str

    @classmethod
    def of(
        cls, model: str, client: Client, rates: RecentRates, num_sublayers: int, health: EngineHealth
    ) -> ModelStatus:
        stats, grown = client.stats, rates.grown
        return cls(
            model=model,
            num_sublayers=num_sublayers,
            **asdict(client.load),
            num_generated_tokens=stats.num_generated_tokens,
            tokens_per_s=rates.tokens_per_s,
            acceptance_rate=grown.acceptance_rate,
            mean_accepted_length=grown.mean_accepted_length,
            speed_up=stats.speed_up,
            gate_reason=stats.gate_reason,
            plan=PlanStatus.of(stats.plans[-1]) if stats.plans else None,
            health=health,
            version=rayspec.__version__,
        )


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's answer to the watch. place: where its process runs. problem: why its engine is stuck, None if not."""

    status: ModelStatus
    place: Place
    problem: str | None


class EndpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /status."""

    models: list[ModelStatus]
