"""Records the metrics of an engine and its requests, with vLLM's names where the meaning is the same."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from rayspec.choices import SKIP
from rayspec.decode.stages import StageUse
from rayspec.llm import Observe
from rayspec.serve.scrape import METRICS
from rayspec.types import EngineLoad, EngineStats, RayspecError, RequestOutput

_NUMBERS = re.compile(r"\b(\d+(\.\d+)?|inf)x?\b")
_MAX_GATE_REASONS = 16

Record = Callable[[str, float, str], None]
"""Receives the name of a metric, without its prefix, a value, and the label that only this metric has, if any."""


def ray_recorder(*, model: str, replica: str) -> Record:
    """Return a function that passes values on to Ray, whose agents export them seconds later, see MetricSpec. model:
    name under which the model is served."""
    kinds: Any = {"counter": (Counter, "inc"), "gauge": (Gauge, "set"), "histogram": (Histogram, "observe")}
    recorders: dict[str, tuple[Callable[..., None], str]] = {}
    for spec in METRICS:
        kind, method = kinds[spec.kind]
        bounds = {"boundaries": list(map(float, spec.buckets.split()))} if spec.kind == "histogram" else {}
        instrument = kind(spec.name, f"{spec.meaning} [{spec.unit}]", tag_keys=spec.labels, **bounds)
        instrument.set_default_tags({"model": model, "replica": replica})
        recorders[spec.name] = getattr(instrument, method), spec.label

    def record(name: str, value: float, label: str) -> None:
        put, label_name = recorders["rayspec_" + name]
        put(value, tags={label_name: label} if label_name else {})

    return record


class RequestObserver:
    """Records the metrics of one request. Pass every output to `observe`: a single one, or all outputs of a stream."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._piece_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._has_first_token = self._finished = False

    def observe(self, output: RequestOutput) -> None:
        now, metrics = self._clock(), output.metrics
        for one in output.outputs:
            if one.token_ids and one.index in self._piece_s:
                self._record("inter_token_latency_seconds", now - self._piece_s[one.index], "")
            if one.token_ids:
                self._piece_s[one.index] = now
            self._num_tokens[one.index] = self._num_tokens.get(one.index, 0) + len(one.token_ids)
            if one.finish_reason is not None:
                self._reasons[one.index] = one.finish_reason
        if metrics.first_token_s is not None and not self._has_first_token:
            self._has_first_token = True
            self._record("time_to_first_token_seconds", metrics.first_token_s - metrics.arrival_s, "")
        if not output.finished:
            return
        reason = self._reasons.get(min(self._reasons, default=0), "abort")
        self.end(reason, output.error)
        if output.error is not None or reason == "abort":
            return
        self._record("request_prompt_tokens", len(output.prompt_token_ids), "")
        self._record("request_generation_tokens", sum(self._num_tokens.values()), "")
        if metrics.finished_s is not None:
            self._record("e2e_request_latency_seconds", metrics.finished_s - metrics.arrival_s, "")
            longest = max(self._num_tokens.values(), default=0)
            if metrics.first_token_s is not None and longest > 1:
                each_s = (metrics.finished_s - metrics.first_token_s) / (longest - 1)
                self._record("request_time_per_output_token_seconds", each_s, "")

    def end(self, reason: str, error: BaseException | None) -> None:
        if self._finished:
            return
        self._finished = True
        if not isinstance(error, Exception):
            self._record("request_success", 1, reason)
        else:
            kind = error.kind if isinstance(error, RayspecError) else RayspecError.kind
            self._record("request_errors", 1, kind)


class EngineMetrics:
    """The metrics of one engine. Not thread-safe: use an object only in the process and thread that created it."""

    def __init__(self, record: Record, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._record, self._clock = record, clock
        self._totals: dict[tuple[str, str], float] = {}
        self._gate_reasons: dict[str, float] = {}  # each label, and whether it holds now

    @contextmanager
    def request(self) -> Iterator[Observe]:
        """Yield what observes each output of a request. A request that does not end counts when the block ends."""
        observer, error = RequestObserver(self._record, self._clock), None
        try:
            yield observer.observe
        except BaseException as raised:
            error = raised
            raise
        finally:
            observer.end("abort", error)

    def update(self, stats: EngineStats, load: EngineLoad, stages: Sequence[StageUse] = ()) -> None:
        """Increase counters by the progress since the last call, and set gauges. stages: use of a pipeline's stages
        since the last query. The engine may change `stats` during the call."""
        for name, total, label in _totals(stats):
            # As in Prometheus, a total that decreases has restarted at 0.
            before = self._totals.get((name, label), 0.0)
            increase = total - before if total >= before else total
            self._totals[name, label] = total
            if increase > 0:
                self._record(name, increase, label)
        for name, value, label in (*_gauges(stats, load), *self._gate(stats.gate_reason)):
            self._record(name, value, label)
        for stage in stages:
            self._record("stage_idle_share", stage.idle_share, stage.name)

    def _gate(self, reason: str) -> Iterator[tuple[str, float, str]]:
        """Yield what the gate says. Its reasons become labels without numbers, and there are few different labels."""
        if not reason:
            return
        if switch := re.match(r"(self-)?drafting is (on|off)", reason):
            yield "gate_open", float(switch[2] == "on"), ""
        label = _NUMBERS.sub("#", reason)
        if label not in self._gate_reasons and len(self._gate_reasons) >= _MAX_GATE_REASONS:
            label = "other"
        for before, holds in self._gate_reasons.items():
            if holds and before != label:
                self._gate_reasons[before] = 0.0
                yield "gate_info", 0.0, before
        self._gate_reasons[label] = 1.0
        yield "gate_info", 1.0, label


def _totals(stats: EngineStats) -> Iterator[tuple[str, float, str]]:
    yield "prompt_tokens", stats.num_prompt_tokens, ""
    yield "prefix_cache_queries", stats.num_prefilled_tokens + stats.num_cached_tokens, ""
    yield "prefix_cache_hits", stats.num_cached_tokens, ""
    yield "generation_tokens", stats.num_generated_tokens, ""
    yield "num_preemptions", stats.num_preemptions, ""
    yield "replays", stats.num_replays, ""
    yield "spec_decode_num_draft_tokens", stats.num_draft_tokens, ""
    yield "spec_decode_num_accepted_tokens", stats.num_accepted_tokens, ""
    yield "num_plain_rounds", stats.num_plain_rounds, ""
    lengths = dict(stats.accepted_lengths)  # a copy, because the engine changes it meanwhile
    yield "spec_decode_num_drafts", sum(lengths.values()), ""
    for position in range(max(lengths, default=0)):
        accepted = sum(count for length, count in lengths.items() if length > position)
        yield "spec_decode_num_accepted_tokens_per_pos", accepted, str(position)
    for source, count in dict(stats.accepted_by_source).items():
        yield "spec_decode_num_accepted_tokens_by_source", count, source
    for phase in ("prefill", "draft", "verify", "optimise", "total"):
        yield "engine_time_seconds", getattr(stats, f"{phase}_s"), phase


def _gauges(stats: EngineStats, load: EngineLoad) -> Iterator[tuple[str, float, str]]:
    """Yield the current load and, if there is one, the current plan."""
    yield "num_requests_running", load.num_running, ""
    yield "num_requests_waiting", load.num_waiting, ""
    yield "kv_cache_usage_perc", load.kv_used_tokens / load.kv_total_tokens if load.kv_total_tokens else 0.0, ""
    if stats.plans:
        record = stats.plans[-1]
        yield "plan_num_draft_tokens", record.plan.num_draft_tokens, ""
        for first, kind in enumerate(("attention", "mlp")):
            choices = record.plan.choices[first::2]
            yield "plan_skipped_share", choices.count(SKIP) / len(choices) if choices else 0.0, kind
        yield "plan_estimated_acceptance_rate", record.estimated_acceptance, ""
        yield "plan_predicted_tokens_per_second", record.predicted_tpt, ""
        yield "plan_plain_tokens_per_second", record.plain_tpt, ""
        yield "plan_measured_tokens_per_second", record.measured_tpt or 0.0, ""
