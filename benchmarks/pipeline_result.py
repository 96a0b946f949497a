"""Results of a pipeline benchmark: a row for each case and strategy, and the parts of a round's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from rayspec.bench.result import markdown_table

ONE_PROCESS = "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of pipeline stages and a number of cohorts under way."""

    stages: int
    cohorts: int

    @property
    def name(self) -> str:
        return f"{self.stages}x{self.cohorts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """Percentiles of the one-way time of a single message between two stages, in seconds."""

    case: str
    link: str
    p50_s: float
    p99_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPart:
    """The timed part of one run. num_rounds: rounds of a whole cohort. busy_s, num_passes: by stage, empty in one
    process. token_ids: all tokens of each output, also those outside the timed part."""

    seconds: float
    num_tokens: int
    num_rounds: float
    busy_s: tuple[float, ...] = ()
    num_passes: tuple[int, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def num_hops(self) -> float:
        """Messages between stages: each pass of a stage follows one, except for the first pass of a round."""
        return sum(self.num_passes) - self.num_rounds if len(self.num_passes) > 1 else 0.0

    @classmethod
    def total(cls, parts: Sequence[TimedPart]) -> TimedPart:
        return cls(
            seconds=sum(part.seconds for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            num_rounds=sum(part.num_rounds for part in parts),
            busy_s=tuple(map(sum, zip(*(part.busy_s for part in parts), strict=True))),
            num_passes=tuple(map(sum, zip(*(part.num_passes for part in parts), strict=True))),
            token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A strategy in a case (None: one process), with a sample for each repeat. layers: number in each stage."""

    case: Case | None
    strategy: str
    samples: tuple[TimedPart, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRow:
    """A strategy in a case. Rates are medians over repeats, with their range; other numbers are over all repeats.

    speedup: over one process with the same strategy. round_ms: time of one round of a cohort. It has three parts.
    busy_ms: computation, by stage. hops_ms: num_hops messages between stages, each at the median time of a hop of the
    reference size. rest_ms: waiting for other cohorts, the engine, and messages from and to the engine.
    passes: for each round, by stage. idle_shares: of the timed seconds, by stage. layers: number in each stage.
    `identical` of `total` outputs equal those of plain decoding in one process.
    """

    case: str
    strategy: str
    layers: tuple[int, ...]
    tokens_per_s: float
    min_tokens_per_s: float
    max_tokens_per_s: float
    speedup: float
    round_ms: float
    passes: tuple[float, ...]
    idle_shares: tuple[float, ...]
    busy_ms: tuple[float, ...]
    num_hops: float
    hops_ms: float
    rest_ms: float | None
    identical: int
    total: int


def pipeline_rows(runs: Sequence[PipelineRun], hops: Sequence[HopTimes]) -> list[PipelineRow]:
    """Merge runs of the same case and strategy into one row. The first run must be plain decoding in one process."""
    merged: dict[tuple[Case | None, str], PipelineRun] = {}
    for run in runs:
        earlier = merged.get((run.case, run.strategy))
        samples = (*earlier.samples, *run.samples) if earlier else run.samples
        merged[run.case, run.strategy] = replace(run, samples=samples)
    reference = runs[0].samples[0].token_ids
    rows = []
    for run in merged.values():
        own_hops = [one.p50_s for one in hops if run.case is not None and one.case == run.case.name]
        hop_s = sum(own_hops) / len(own_hops) if own_hops else 0.0
        rows.append(_row(run, merged[None, run.strategy], hop_s=hop_s, reference=reference))
    return rows


def _row(
    run: PipelineRun, one_process: PipelineRun, *, hop_s: float, reference: Sequence[tuple[int, ...]]
) -> PipelineRow:
    case, samples = run.case, run.samples
    speeds = [sample.tokens_per_s for sample in samples]
    total = TimedPart.total(samples)
    cohorts = case.cohorts if case else 1
    round_ms = 1000 * total.seconds * cohorts / total.num_rounds
    busy_ms = tuple(1000 * busy_s / total.num_rounds for busy_s in total.busy_s)
    num_hops = total.num_hops / total.num_rounds
    hops_ms = 1000 * num_hops * hop_s
    identical = sum(a == b for sample in samples for a, b in zip(sample.token_ids, reference, strict=True))
    return PipelineRow(
        case=case.name if case else ONE_PROCESS,
        strategy=run.strategy,
        layers=run.layers,
        tokens_per_s=median(speeds),
        min_tokens_per_s=min(speeds),
        max_tokens_per_s=max(speeds),
        speedup=median(speeds) / median(sample.tokens_per_s for sample in one_process.samples),
        round_ms=round_ms,
        passes=tuple(count / total.num_rounds for count in total.num_passes),
        idle_shares=tuple(1 - busy_s / total.seconds for busy_s in total.busy_s),
        busy_ms=busy_ms,
        num_hops=num_hops,
        hops_ms=hops_ms,
        rest_ms=round_ms - sum(busy_ms) - hops_ms if case else None,
        identical=identical,
        total=len(samples) * len(reference),
    )


def pipeline_markdown(result: dict[str, Any]) -> str:
    """Return Markdown tables of each case's speed, of the parts of a round's time, and of hop times."""
    options, environment, prompt_tokens = result["options"], result["environment"], result["prompt_tokens"]
    rows = result["results"]
    identical, total = (sum(row[key] for row in rows) for key in ("identical", "total"))
    width = f" made {options['widen']} times as wide" if options["widen"] > 1 else ""
    heading = (
        f"{options['engine']['model']}{width} in {options['engine']['dtype']} on {environment['hardware']}, commit "
        f"{environment['commit']}; {len(prompt_tokens)} prompts of {min(prompt_tokens)} to {max(prompt_tokens)} "
        f"tokens, {options['max_tokens']} tokens each, {options['batch']} sequences a microbatch, "
        f"{options['repeats']} repeats"
    )
    parts = [heading, _speed_table(rows), _round_table(rows)]
    if result["hops"]:
        parts.append(_hop_table(result["hops"], result["hop_bytes"]))
    verdict = "all" if identical == total else "ONLY"
    parts.append(f"{verdict} {identical} of {total} outputs have the tokens of plain decoding in one process")
    return "\n\n".join(parts)


def _speed_table(rows: Sequence[dict[str, Any]]) -> str:
    return markdown_table(
        (
            "stages x microbatches",
            "strategy",
            "tokens/s",
            "min to max",
            "vs one process",
            "ms a round",
            "idle",
            "identical",
        ),
        [
            (
                row["case"],
                row["strategy"],
                f"{row['tokens_per_s']:.1f}",
                f"{row['min_tokens_per_s']:.1f} to {row['max_tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}x",
                f"{row['round_ms']:.2f}",
                _each(row["idle_shares"], "{:.0%}"),
                f"{row['identical']} of {row['total']}",
            )
            for row in rows
        ],
    )


def _round_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the parts of a round's time, for cases with shards."""
    return markdown_table(
        ("a round of", "strategy", "layers", "passes", "busy ms", "hops", "hops ms", "rest ms"),
        [
            (
                row["case"],
                row["strategy"],
                _each(row["layers"], "{}"),
                _each(row["passes"], "{:.1f}"),
                _each(row["busy_ms"], "{:.2f}"),
                f"{row['num_hops']:.1f}",
                f"{row['hops_ms']:.2f}",
                f"{row['rest_ms']:.2f}",
            )
            for row in rows
            if row["rest_ms"] is not None
        ],
    )


def _hop_table(hops: Sequence[dict[str, Any]], num_bytes: int) -> str:
    headings = ("a hop in", "between stages", f"p50 us of {num_bytes // 1024} KiB", "p99 us", "samples")
    return markdown_table(
        headings,
        [
            (
                one["case"],
                one["link"],
                f"{1e6 * one['p50_s']:.0f}",
                f"{1e6 * one['p99_s']:.0f}",
                str(one["num_samples"]),
            )
            for one in hops
        ],
    )


def _each(values: Sequence[float], pattern: str) -> str:
    return " / ".join(map(pattern.format, values)) or "-"
