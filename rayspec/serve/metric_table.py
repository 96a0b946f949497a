"""All metrics of the endpoint as data: kind, name, unit, label and meaning, from `metrics.csv`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

COMMON_LABELS = ("model", "replica")
UNREACHABLE_NODES = "rayspec_scrape_unreachable_nodes"  # added by `scrape.py`, not recorded by an engine

# vLLM's boundaries, so that its dashboards and alerts work here too; for tokens, also smaller boundaries.
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_NUM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_BOUNDARIES = {
    "rayspec_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
        *(160.0, 640.0, 2560.0),
    ),
    "rayspec_inter_token_latency_seconds": _TOKEN_S,
    "rayspec_request_time_per_output_token_seconds": _TOKEN_S,
    "rayspec_e2e_request_latency_seconds": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
        *(1920.0, 7680.0),
    ),
    "rayspec_request_prompt_tokens": _NUM_TOKENS,
    "rayspec_request_generation_tokens": _NUM_TOKENS,
}


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. kind: counter, gauge or histogram. label: name of its label in addition to COMMON_LABELS, if any."""

    kind: str
    name: str
    unit: str
    label: str
    meaning: str

    @property
    def boundaries(self) -> tuple[float, ...]:
        """The upper bounds of a histogram's buckets, in the metric's unit."""
        return _BOUNDARIES.get(self.name, ())

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS, self.label) if self.label else COMMON_LABELS

    @property
    def exported_name(self) -> str:
        """Name under which Ray's agents export the metric."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as _table:
    METRICS: tuple[MetricSpec, ...] = tuple(MetricSpec(**row) for row in csv.DictReader(_table))
