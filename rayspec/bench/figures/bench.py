"""Speed-ups of strategies by context and by mix of domains, as `rayspec bench` has measured them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayspec.bench.result import BASELINE, HF
from rayspec.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Of a strategy over plain decoding. at: tokens of context, or probability that a stream changes its domain. least,
    most: over the repeats."""

    strategy: str
    at: float
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpeedUps:
    """by_context: of each domain. by_mix: of streams of several domains. Both by strategy, then by rising `at`."""

    by_context: Mapping[str, tuple[SpeedUp, ...]]
    by_mix: tuple[SpeedUp, ...]


def read_bench(path: Path) -> BenchSpeedUps:
    """Of a `results.json` of `rayspec bench --output`. Raises ConfigError: no such file, or something else."""
    at = f"option 'bench' is {str(path)!r}"
    try:
        workloads = json.loads(path.read_text(encoding="utf-8"))["workloads"]
        domains = sorted({one["domain"] for one in workloads if one["mix_ratio"] is None})
        by_context = {
            domain: _speed_ups(
                (one for one in workloads if one["mix_ratio"] is None and one["domain"] == domain), "context"
            )
            for domain in domains
        }
        by_mix = _speed_ups((one for one in workloads if one["mix_ratio"] is not None), "mix_ratio")
    except OSError as error:
        raise ConfigError(
            f"{at}: it cannot be read ({error.strerror}): name a results.json of `rayspec bench`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{at}: it is not what `rayspec bench --output` writes ({error!r}): run that command again"
        ) from error
    return BenchSpeedUps(by_context=by_context, by_mix=by_mix)


def best_strategy(speed_ups: Sequence[SpeedUp]) -> SpeedUp:
    """The highest median. Raises ValueError when there are none."""
    return max(speed_ups, key=lambda one: one.median)


def _speed_ups(workloads: Iterable[Mapping[str, Any]], key: str) -> tuple[SpeedUp, ...]:
    found = [
        _speed_up(row, float(workload[key]))
        for workload in workloads
        for row in workload["results"]
        if row["strategy"] not in (BASELINE, HF)
    ]
    return tuple(sorted(found, key=lambda one: (one.strategy, one.at)))


def _speed_up(row: Mapping[str, Any], at: float) -> SpeedUp:
    spread = row["speedup_spread"]
    return SpeedUp(
        strategy=row["strategy"],
        at=at,
        median=float(row["speedup_vs_ar"]),
        least=float(spread["min"]),
        most=float(spread["max"]),
    )
