"""Metrics: what is recorded of stats and requests, and what Ray's agents export of a real engine."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rayspec import SamplingParams
from rayspec.choices import FULL, SKIP, Choices, choices_of
from rayspec.command.settings import make_settings
from rayspec.command.terminal import load_llm
from rayspec.decode.stages import StageUse
from rayspec.llm import AsyncEngine
from rayspec.serve.metrics import EngineMetrics, ray_recorder
from rayspec.serve.scrape import METRICS, UNREACHABLE_NODES, scrape
from rayspec.types import (
    CompletionOutput,
    EngineLoad,
    EngineStats,
    FinishReason,
    Plan,
    PlanRecord,
    PromptTooLongError,
    RayspecError,
    RequestMetrics,
    RequestOutput,
)

PLAN = Plan(choices=choices_of([True, False, True, True]), num_draft_tokens=4, source="test")
IDLE = EngineLoad(num_running=0, num_waiting=0, kv_used_tokens=0, kv_total_tokens=64)
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
KINDS = {spec.name.removeprefix("rayspec_"): spec.kind for spec in METRICS}


@dataclass(slots=True)
class Recording:
    """Keeps counters' sums, gauges' last values and histograms' observations, by name without the prefix."""

    counters: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    gauges: dict[tuple[str, str], float] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def record(self, short: str, value: float, label: str) -> None:
        match KINDS[short]:
            case "counter":
                assert value > 0, "Ray refuses to increase a counter by nothing"
                self.counters[short, label] += value
            case "gauge":
                self.gauges[short, label] = value
            case "histogram":
                self.histograms[short].append(value)


def completion(num_tokens: int, reason: FinishReason | None = None, index: int = 0) -> CompletionOutput:
    return CompletionOutput(index=index, text="", token_ids=[7] * num_tokens, finish_reason=reason)


def output(
    *outputs: CompletionOutput, finished: bool = True, error: RayspecError | None = None, **times: float
) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=list(outputs),
        finished=finished,
        error=error,
        metrics=RequestMetrics(**({"arrival_s": 10.0} | times)),
    )


def record_of(choices: Choices, *, num_tokens: int, sequence_s: float) -> PlanRecord:
    return PlanRecord(
        elapsed_s=1.0,
        context=100,
        batch=1,
        plan=Plan(choices=choices, num_draft_tokens=5, source="knapspec"),
        reason="first",
        estimated_acceptance=0.75,
        predicted_tpt=40.0,
        plain_tpt=25.0,
        optimise_s=0.1,
        num_tokens=num_tokens,
        sequence_s=sequence_s,
    )


START = {"first_token_s": 10.5}
TIMES = {"first_token_s": 10.5, "finished_s": 12.5}
FIRST = {"time_to_first_token_seconds": [0.5]}
LENGTH = {("request_success", "length"): 1}


def whole(num_tokens: int) -> dict[str, list[float]]:
    """What the histograms have of a request that took 2.5 s, 2 of them after the first token."""
    lengths = {"request_prompt_tokens": [3.0], "request_generation_tokens": [num_tokens]}
    return FIRST | lengths | {"e2e_request_latency_seconds": [2.5]}


PER_TOKEN = "request_time_per_output_token_seconds"
Pieces = list[tuple[float, RequestOutput]]
REQUESTS: dict[str, tuple[Pieces, dict[tuple[str, str], float], dict[str, list[float]]]] = {
    "whole": ([(0, output(completion(5, "length"), **TIMES))], LENGTH, whole(5) | {PER_TOKEN: [0.5]}),
    "streamed": (
        [
            (20.0, output(completion(1), finished=False, **START)),
            (20.5, output(completion(2), finished=False, **START)),
            (20.75, output(completion(0), finished=False, **START)),  # text that was held back
            (21.5, output(completion(2, "length"), **TIMES)),
        ],
        LENGTH,
        whole(5) | {PER_TOKEN: [0.5], "inter_token_latency_seconds": [0.5, 1.0]},
    ),
    "refused": ([(0, output(error=PromptTooLongError("long")))], {("request_errors", "prompt_too_long"): 1}, {}),
    "failed": (
        [(0, output(completion(2, "error"), error=RayspecError("broken"), **TIMES))],
        {("request_errors", "internal"): 1},
        FIRST,
    ),
    "aborted": ([(0, output(completion(2, "abort"), **TIMES))], {("request_success", "abort"): 1}, FIRST),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_recorded(name: str) -> None:
    pieces, counters, histograms = REQUESTS[name]
    recording, times = Recording(), iter([now for now, _ in pieces])
    with EngineMetrics(recording.record, clock=lambda: next(times)).request() as observe:
        for _, piece in pieces:
            observe(piece)
    assert (recording.counters, recording.histograms) == (counters, histograms)


@pytest.mark.parametrize(
    ("leaving", "counted"),
    [(asyncio.CancelledError(), ("request_success", "abort")), (KeyError("bug"), ("request_errors", "internal"))],
)
def test_a_request_that_is_left_is_counted(leaving: BaseException, counted: tuple[str, str]) -> None:
    recording = Recording()
    with pytest.raises(type(leaving)), EngineMetrics(recording.record).request() as observe:
        observe(output(completion(1), finished=False, **START))
        raise leaving
    assert recording.counters == {counted: 1}


def test_counters_grow_by_what_was_done_since() -> None:
    recording, stats = Recording(), EngineStats()
    metrics = EngineMetrics(recording.record)
    metrics.update(stats, IDLE)
    assert not recording.counters
    stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_preemptions, stats.num_replays = 100, 30, 2, 1
    stats.total_s, stats.optimise_s = 4.0, 0.5
    metrics.update(stats, IDLE)
    metrics.update(stats, IDLE)
    for total in (45, 20):  # an engine that is made anew begins at 0
        stats.num_generated_tokens = total
        metrics.update(stats, IDLE)
    assert recording.counters == {
        ("prompt_tokens", ""): 100,
        ("generation_tokens", ""): 65,
        ("num_preemptions", ""): 2,
        ("replays", ""): 1,
        ("engine_time_seconds", "total"): 4.0,
        ("engine_time_seconds", "optimise"): 0.5,
    }


def test_load_plan_and_stages_are_gauges() -> None:
    recording = Recording()
    stats = EngineStats(plans=[record_of((FULL, SKIP) * 4, num_tokens=0, sequence_s=0.0)])
    stats.plans.append(record_of((SKIP, FULL, FULL, FULL, FULL, SKIP, SKIP, SKIP), num_tokens=30, sequence_s=2.0))
    load = EngineLoad(num_running=3, num_waiting=4, kv_used_tokens=16, kv_total_tokens=64)
    stages = [StageUse(name="stage-0", busy_s=1.0, elapsed_s=4.0, num_passes=9)]
    EngineMetrics(recording.record).update(stats, load, stages)
    assert recording.gauges == {
        ("num_requests_running", ""): 3,
        ("num_requests_waiting", ""): 4,
        ("kv_cache_usage_perc", ""): 0.25,
        ("plan_num_draft_tokens", ""): 5,
        ("plan_skipped_share", "attention"): 0.5,
        ("plan_skipped_share", "mlp"): 0.5,
        ("plan_estimated_acceptance_rate", ""): 0.75,
        ("plan_predicted_tokens_per_second", ""): 40.0,
        ("plan_plain_tokens_per_second", ""): 25.0,
        ("plan_measured_tokens_per_second", ""): 15.0,
        ("stage_idle_share", "stage-0"): 0.75,
    }


def test_what_a_strategy_says_of_drafting_becomes_few_labels() -> None:
    recording = Recording()
    metrics = EngineMetrics(recording.record)

    def labels(*reasons: str) -> dict[str, float]:
        for reason in reasons:
            metrics.update(EngineStats(gate_reason=reason), IDLE)
        return {label: value for (name, label), value in recording.gauges.items() if name == "gate_info"}

    on = [f"self-drafting is on ({number}.5x by plan {'ab'[number % 2]})" for number in range(8)]
    assert labels(*on) == {"self-drafting is on (# by plan a)": 0, "self-drafting is on (# by plan b)": 1}
    assert recording.gauges["gate_open", ""] == 1
    found = labels(*[f"drafting is off ({'x' * number})" for number in range(60)])
    assert (len(found), found["other"], sum(found.values())) == (17, 1, 1)
    assert recording.gauges["gate_open", ""] == 0


def test_the_document_has_every_metric() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `ray_rayspec_")]
    assert rows == [
        f"| `{spec.exported_name}` | {spec.kind} | {spec.unit} | {label} | {spec.meaning} |"
        for spec in METRICS
        for label in [f"`{spec.label}`" if spec.label else ""]
    ]


async def served(metrics: EngineMetrics) -> tuple[EngineStats, dict[str, Metric]]:
    """What an engine did for a request and a stream, and what was exported once the last update is in it."""
    common = {"model": "demo", "dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 512}
    speculation = {"strategy": "static", "skip": [2, 5], "max_draft_tokens": 3}
    metered = AsyncEngine(load_llm(make_settings(flags=common | speculation).engine), metrics.request)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    try:
        prompt = metered.tokenizer("The report of the year says")["input_ids"]
        await metered.run(prompt, params)
        assert [piece async for piece in metered.stream(prompt, params)]
        assert (await metered.run([3] * 600, params)).error is not None
    finally:
        metered.llm.shutdown()
        metrics.update(metered.client.stats, metered.client.load, metered.client.stage_use())
    deadline = time.monotonic() + 30
    while True:
        families = {family.name: family for family in text_string_to_metric_families(await scrape())}
        times = families.get("ray_rayspec_engine_time_seconds")
        if times and metered.client.stats.total_s in [pytest.approx(sample.value) for sample in times.samples]:
            return metered.client.stats, families
        assert time.monotonic() < deadline, f"there are {sorted(families)}"
        await asyncio.sleep(0.25)


@pytest.mark.ray
def test_what_is_exported_is_what_the_engine_did_as_the_table_says(ray_cluster: None) -> None:
    model = 'the "demo"\\'
    stats, families = asyncio.run(served(EngineMetrics(ray_recorder(model=model, replica="r1"))))
    values: dict[str, list[float]] = defaultdict(list)
    for sample in (one for family in families.values() for one in family.samples):
        if sample.labels.get("model") == model:
            values[sample.name.removeprefix("ray_rayspec_")].append(sample.value)
    assert values["generation_tokens_total"] == [stats.num_generated_tokens] == [2 * 24]
    assert values["prompt_tokens_total"] == [stats.num_prompt_tokens]
    assert values["spec_decode_num_draft_tokens_total"] == [stats.num_draft_tokens]
    assert values["spec_decode_num_drafts_total"] == [stats.num_rounds - stats.num_plain_rounds]
    assert sum(values["spec_decode_num_accepted_tokens_per_pos_total"]) == stats.num_accepted_tokens > 0
    assert values["spec_decode_num_accepted_tokens_by_source_total"] == [stats.accepted_by_source["model"]]
    assert values["request_errors_total"] == [1]
    specs = {spec.exported_name.removesuffix("_total"): spec for spec in METRICS}
    for name, family in families.items():
        if name.startswith("ray_rayspec_"):
            spec = specs[name]
            assert (family.type, family.documentation) == (spec.kind, f"{spec.meaning} [{spec.unit}]")
            assert all(set(spec.labels) <= sample.labels.keys() for sample in family.samples)
    assert families[UNREACHABLE_NODES].samples[0].value == 0
