"""Status of a model's replica; /status returns a list of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import rayspec
from rayspec.choices import Choice
from rayspec.pool.stopped import Place
from rayspec.serve.recent import RecentRates
from rayspec.types import PlanRecord

if TYPE_CHECKING:
    from rayspec.async_engine import AsyncEngine

EngineHealth = Literal["ready", "recovering", "engine dead", "stuck"]
"""recovering: lost shards are being replaced, and requests wait. stuck: see `decode/progress.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
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
        return cls(
            choices=list(record.plan.choices),
            num_draft_tokens=record.plan.num_draft_tokens,
            source=record.plan.source,
            reason=record.reason,
            estimated_acceptance=record.estimated_acceptance,
            predicted_tpt=record.predicted_tpt,
            plain_tpt=record.plain_tpt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A replica at this moment. num_running, num_waiting: sequences. num_generated_tokens: total since the start.
    tokens_per_s, acceptance_rate, mean_accepted_length: over the last seconds. plan: the current plan, None before the
    first. recovering: the same as in `health`."""

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
    gate_reason: str
    plan: PlanStatus | None
    recovering: bool
    health: EngineHealth
    version: str

    @classmethod
    def of(
        cls, model: str, engine: AsyncEngine, rates: RecentRates, num_sublayers: int, health: EngineHealth
    ) -> ModelStatus:
        load, stats = engine.load, engine.stats
        return cls(
            model=model,
            num_sublayers=num_sublayers,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_used_tokens=load.kv_used_tokens,
            kv_total_tokens=load.kv_total_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            tokens_per_s=rates.tokens_per_s,
            acceptance_rate=rates.acceptance_rate,
            mean_accepted_length=rates.mean_accepted_length,
            gate_reason=stats.gate_reason,
            plan=PlanStatus.of(stats.plans[-1]) if stats.plans else None,
            recovering=health == "recovering",
            health=health,
            version=rayspec.__version__,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """A replica's answer to the watch. place: where its process runs. problem: why its engine is stuck, None if not."""

    status: ModelStatus
    place: Place
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """The body of /status."""

    models: list[ModelStatus]
