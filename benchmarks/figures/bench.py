"""Speed-ups of strategies by context and by mix of domains, read from the results of `rayspec bench` or of
`python -m benchmarks streams`."""

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
    """Speed-up of a strategy over plain decoding. at: tokens of context, or the probability that a stream changes its
    domain. least, most: over the repeats."""

    strategy: str
    at: float
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpeedUps:
    """Speed-ups by domain (by_context) and of mixed streams (by_mix). Both are sorted by strategy, then by `at`."""

    by_context: Mapping[str, tuple[SpeedUp, ...]]
    by_mix: tuple[SpeedUp, ...]


def read_bench(path: Path) -> BenchSpeedUps:
    """Read a `results.json` of `rayspec bench --output`. Raises ConfigError for a missing or an invalid file."""
    at = f"option 'bench' is {str(path)!r}"
    try:
        workloads = json.loads(path.read_text(encoding="utf-8"))["workloads"]
        domains = sorted({one["domain"] for one in workloads if one.get("mix_ratio") is None})
        by_context = {
            domain: _speed_ups(
                (one for one in workloads if one.get("mix_ratio") is None and one["domain"] == domain), "context"
            )
            for domain in domains
        }
        by_mix = _speed_ups((one for one in workloads if one.get("mix_ratio") is not None), "mix_ratio")
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
    """Return the speed-up with the highest median. Raises ValueError for an empty sequence."""
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
