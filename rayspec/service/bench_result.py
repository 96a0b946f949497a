"""What a comparison found: a row a strategy, with the spread of its repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Group
from rich.table import Table

from rayspec.types import EngineStats, PlanRecord

BASELINE, HF = "ar", "hf"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run over all prompts. prefill_s is the part of `seconds` that went into the prompts."""

    seconds: float
    prefill_s: float
    token_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """Prompts included."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Decoding: of the tokens after each prompt's first, without the prompts' time."""
        return max(0, self.num_tokens - len(self.token_ids)) / max(1e-9, self.seconds - self.prefill_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One strategy. Rates are medians over the repeats; speed-ups are medians of the ratios within a repeat.

    Both are of decoding, which is what speculation works on; "end to end" adds the prompts' time.

    `identical` of `total` outputs have the tokens of our own plain decoding. Shares are of the engine's time.
    """

    strategy: str
    tokens_per_s: float
    speedup_vs_ar: float
    speedup_vs_hf: float | None
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
    end_to_end_tokens_per_s: float
    end_to_end_speedup_vs_ar: float
    end_to_end_speedup_vs_hf: float | None
    num_output_tokens: int
    gate_reason: str | None


def bench_row(name: str, samples: Mapping[str, Sequence[Sample]], stats: EngineStats) -> BenchRow:
    """The row of `name`, whose engine did `stats` meanwhile, from the samples of all strategies, repeat by repeat."""
    own, plain = samples[name], samples[BASELINE]
    speeds = [sample.tokens_per_s for sample in own]
    reference = plain[0].token_ids
    identical = sum(a == b for sample in own for a, b in zip(sample.token_ids, reference, strict=True))
    total_s = stats.total_s
    return BenchRow(
        strategy=name,
        tokens_per_s=median(speeds),
        speedup_vs_ar=_ratio(own, plain, "tokens_per_s") or 1.0,
        speedup_vs_hf=_ratio(own, samples.get(HF), "tokens_per_s"),
        acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length,
        predicted_tpt=_predicted_tpt(stats.plans),
        measured_tpt=_measured_tpt(stats.plans),
        draft_share=stats.draft_s / total_s if total_s else None,
        verify_share=stats.verify_s / total_s if total_s else None,
        optimise_share=stats.optimise_s / total_s if total_s else None,
        identical=identical,
        total=len(own) * len(reference),
        spread={"min": min(speeds), "median": median(speeds), "max": max(speeds)},
        end_to_end_tokens_per_s=median(sample.end_to_end_tokens_per_s for sample in own),
        end_to_end_speedup_vs_ar=_ratio(own, plain, "end_to_end_tokens_per_s") or 1.0,
        end_to_end_speedup_vs_hf=_ratio(own, samples.get(HF), "end_to_end_tokens_per_s"),
        num_output_tokens=own[0].num_tokens,
        gate_reason=stats.gate_reason or None,
    )


def _ratio(
    own: Sequence[Sample], other: Sequence[Sample] | None, rate: Literal["tokens_per_s", "end_to_end_tokens_per_s"]
) -> float | None:
    """Median of the ratios within each repeat, whose runs shared the machine's mood."""
    if other is None:
        return None
    ratios = [float(getattr(a, rate) / max(1e-9, getattr(b, rate))) for a, b in zip(own, other, strict=True)]
    return median(ratios)


def _predicted_tpt(records: Sequence[PlanRecord]) -> float | None:
    """Tokens per second of one sequence, had every plan in use kept its promise."""
    used = [record for record in records if record.num_tokens and record.predicted_tpt > 0]
    seconds = sum(record.num_tokens / record.predicted_tpt for record in used)
    return sum(record.num_tokens for record in used) / seconds if seconds else None


def _measured_tpt(records: Sequence[PlanRecord]) -> float | None:
    seconds = sum(record.sequence_s for record in records)
    return sum(record.num_tokens for record in records) / seconds if seconds else None


def bench_tables(result: dict[str, Any]) -> Group:
    """How fast each strategy was, and what it did with its time."""
    options, environment, prompt_tokens = result["options"], result["environment"], result["prompt_tokens"]
    heading = (
        f"{options['engine']['model']}{_width(options['widen'])} in {options['engine']['dtype']} on "
        f"{environment['hardware']}, {environment['threads']} threads; {len(prompt_tokens)} prompts of "
        f"{min(prompt_tokens)} to {max(prompt_tokens)} tokens, batch {options['batch']}, {options['repeats']} repeats"
    )
    speed = _table("strategy", "tokens/s", "min to max", "vs ar", "vs hf", "all/s", "vs ar", "vs hf", "identical")
    work = _table("strategy", "acceptance", "tokens a round", "predicted", "measured", "draft", "verify", "search")
    for row in result["results"]:
        speed.add_row(
            row["strategy"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['spread']['min']:.1f} to {row['spread']['max']:.1f}",
            *(_times(row[key]) for key in ("speedup_vs_ar", "speedup_vs_hf")),
            f"{row['end_to_end_tokens_per_s']:.1f}",
            *(_times(row[key]) for key in ("end_to_end_speedup_vs_ar", "end_to_end_speedup_vs_hf")),
            f"{row['identical']} of {row['total']}",
        )
        work.add_row(
            row["strategy"],
            _percent(row["acceptance_rate"]),
            *(_plain(row[key]) for key in ("mean_accepted_length", "predicted_tpt", "measured_tpt")),
            *(_percent(row[key]) for key in ("draft_share", "verify_share", "optimise_share")),
        )
    note = "tokens/s: decoding; all/s: with prompts; predicted, measured: of one sequence; shares of the engine's time"
    return Group(heading, speed, work, note)


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    return table


def _width(factor: int) -> str:
    return f" made {factor} times as wide" if factor > 1 else ""


def save_bench(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
