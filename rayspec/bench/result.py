"""Results of a comparison: a row for each strategy, with the spread of its repeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rayspec.types import EngineStats, PlanRecord

BASELINE, HF = "ar", "hf"

_LEAST_S = 1e-9  # lower bound of divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All prompts completed once. prefill_s, prefill_cpu_s: wall and CPU seconds of the prefill."""

    seconds: float
    prefill_s: float
    prefill_cpu_s: float
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of work in seconds. cpu_s: of all threads of this process. waited_s: time in which threads were ready to run
    but had no core; None if unknown. gpu_s: between two events on the GPU's own clock; None without a GPU."""

    wall_s: float
    cpu_s: float
    waited_s: float | None
    gpu_s: float | None

    @property
    def quiet_share(self) -> float | None:
        """CPU time over CPU time plus waiting time: 1 on a machine without other load; None if unknown."""
        if self.waited_s is None or self.cpu_s <= 0:
            return None
        return self.cpu_s / (self.cpu_s + self.waited_s)


def total_cost(costs: Sequence[Cost]) -> Cost | None:
    """Add up the costs. None for an empty sequence."""
    if not costs:
        return None
    return Cost(
        wall_s=sum(cost.wall_s for cost in costs),
        cpu_s=sum(cost.cpu_s for cost in costs),
        waited_s=_sum([cost.waited_s for cost in costs]),
        gpu_s=_sum([cost.gpu_s for cost in costs]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run over all prompts. cost: None if the contender ran in other processes."""

    run: Run
    cost: Cost | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.run.token_ids))

    @property
    def num_decoded_tokens(self) -> int:
        """Number of tokens without the first token of each output, which prefill gives."""
        return max(0, self.num_tokens - len(self.run.token_ids))

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """Tokens per second of the whole run, prefill included."""
        return self.num_tokens / max(_LEAST_S, self.run.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding, without the prefill time."""
        return self.num_decoded_tokens / max(_LEAST_S, self.run.seconds - self.run.prefill_s)

    @property
    def tokens_per_cpu_s(self) -> float | None:
        """Decoded tokens per CPU second of all threads of the process; None without a cost."""
        if self.cost is None:
            return None
        return self.num_decoded_tokens / max(_LEAST_S, self.cost.cpu_s - self.run.prefill_cpu_s)

    @property
    def gpu_s(self) -> float | None:
        return self.cost.gpu_s if self.cost is not None else None

    @property
    def quiet_share(self) -> float | None:
        return self.cost.quiet_share if self.cost is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One strategy. Rates are medians over the repeats; speed-ups are medians of the ratios within a repeat.

    Both measure decoding, the phase that speculation accelerates; "end to end" includes prefill. `spread` has "min",
    "median" and "max" of `tokens_per_s`, and `speedup_spread` those of `speedup_vs_ar`.

    `identical` of `total` outputs have the tokens of our own plain decoding. Shares are of the engine's time. plans:
    the plans in use, with their predicted and measured speed and acceptance.
    """

    strategy: str
    tokens_per_s: float
    speedup_vs_ar: float
    speedup_vs_hf: float | None
    tokens_per_cpu_s: float | None
    cpu_speedup_vs_ar: float | None
    gpu_s: float | None
    quiet_share: float | None
    acceptance_rate: float | None
    mean_accepted_length: float | None
    predicted_tpt: float | None
    measured_tpt: float | None
    draft_share: float | None
    verify_share: float | None
    optimise_share: float | None
    identical: int
    total: int
    spread: dict[str, float]
    speedup_spread: dict[str, float]
    end_to_end_tokens_per_s: float
    end_to_end_speedup_vs_ar: float
    end_to_end_speedup_vs_hf: float | None
    num_output_tokens: int
    gate_reason: str | None
    plans: list[dict[str, Any]]


def bench_row(name: str, samples: Mapping[str, Sequence[Sample]], stats: EngineStats) -> BenchRow:
    """Return the row of strategy `name`. samples: by strategy, repeat by repeat. stats: of its engine in that time."""
    own, plain, hf = samples[name], samples[BASELINE], samples.get(HF)
    speed, whole_speed = _rate("tokens_per_s"), _rate("end_to_end_tokens_per_s")
    reference = plain[0].run.token_ids
    identical = sum(a == b for sample in own for a, b in zip(sample.run.token_ids, reference, strict=True))
    ratios = _ratios(own, plain, speed)
    return BenchRow(
        strategy=name,
        tokens_per_s=median(map(speed, own)),
        speedup_vs_ar=median(ratios),
        speedup_vs_hf=_median(_ratios(own, hf, speed)),
        tokens_per_cpu_s=_median([sample.tokens_per_cpu_s for sample in own]),
        cpu_speedup_vs_ar=_median(_ratios(own, plain, _rate("tokens_per_cpu_s"))) if _has_cost(own, plain) else None,
        gpu_s=_median([sample.gpu_s for sample in own]),
        quiet_share=_median([sample.quiet_share for sample in own]),
        acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length,
        predicted_tpt=_predicted_tpt(stats.plans),
        measured_tpt=_measured_tpt(stats.plans),
        draft_share=_share(stats.draft_s, stats),
        verify_share=_share(stats.verify_s, stats),
        optimise_share=_share(stats.optimise_s, stats),
        identical=identical,
        total=len(own) * len(reference),
        spread=_spread(list(map(speed, own))),
        speedup_spread=_spread(ratios),
        end_to_end_tokens_per_s=median(map(whole_speed, own)),
        end_to_end_speedup_vs_ar=median(_ratios(own, plain, whole_speed)),
        end_to_end_speedup_vs_hf=_median(_ratios(own, hf, whole_speed)),
        num_output_tokens=own[0].num_tokens,
        gate_reason=stats.gate_reason or None,
        plans=[_plan(record) for record in stats.plans],
    )


def save_bench(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _rate(name: str) -> Callable[[Sample], float]:
    return lambda sample: float(getattr(sample, name))


def _has_cost(own: Sequence[Sample], plain: Sequence[Sample]) -> bool:
    return all(sample.cost is not None for sample in (*own, *plain))


def _ratios(own: Sequence[Sample], other: Sequence[Sample] | None, rate: Callable[[Sample], float]) -> list[float]:
    """Return the ratio within each repeat, whose runs had the same machine load; empty if `other` is None."""
    return [rate(a) / max(_LEAST_S, rate(b)) for a, b in zip(own, other, strict=True)] if other is not None else []


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median; None if there are no values or any value is None."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if any value is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def _share(seconds: float, stats: EngineStats) -> float | None:
    return seconds / stats.total_s if stats.total_s else None


def _predicted_tpt(records: Sequence[PlanRecord]) -> float | None:
    """Return tokens per second of one sequence, assuming that each plan in use reaches its predicted speed."""
    used = [record for record in records if record.num_tokens and record.predicted_tpt > 0]
    seconds = sum(record.num_tokens / record.predicted_tpt for record in used)
    return sum(record.num_tokens for record in used) / seconds if seconds else None


def _measured_tpt(records: Sequence[PlanRecord]) -> float | None:
    seconds = sum(record.sequence_s for record in records)
    return sum(record.num_tokens for record in records) / seconds if seconds else None


def _plan(record: PlanRecord) -> dict[str, Any]:
    return {
        "context": record.context,
        "choices": list(record.plan.choices),
        "num_draft_tokens": record.plan.num_draft_tokens,
        "num_lookup_tokens": record.plan.num_lookup_tokens,
        "predicted_tpt": record.predicted_tpt,
        "measured_tpt": record.measured_tpt,
        "estimated_acceptance": record.estimated_acceptance,
        "observed_acceptance": record.observed_acceptance,
        "num_tokens": record.num_tokens,
    }
