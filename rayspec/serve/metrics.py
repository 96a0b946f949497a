"""Metrics of an engine and its requests, with vLLM's names where the meaning is the same."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ray.util.metrics import Counter, Gauge, Histogram
from typing_extensions import Self

from rayspec.choices import SKIP, Choice
from rayspec.decode.stages import StageUse
from rayspec.serve.metric_table import METRICS, MetricSpec
from rayspec.types import EngineLoad, EngineStats, RayspecError, RequestOutput

_NUMBERS = re.compile(r"\b(\d+(\.\d+)?|inf)x?\b")
_MAX_GATE_REASONS = 16


class Recorder(Protocol):
    """Receives values of metrics. label: value of the label that only this metric has, if any."""

    def record(self, name: str, value: float, label: str = "") -> None: ...


class RayRecorder:
    """Passes values on to Ray, whose agents export them seconds later as `MetricSpec.exported_name`."""

    def __init__(self, *, model: str, replica: str) -> None:
        tags = {"model": model, "replica": replica}
        self._specs = {spec.name: spec for spec in METRICS}
        self._instruments = {spec.name: _instrument(spec, tags) for spec in METRICS}

    def record(self, name: str, value: float, label: str = "") -> None:
        spec, instrument = self._specs[name], self._instruments[name]
        tags = {spec.label: label} if spec.label else {}
        match instrument:
            case Counter():
                instrument.inc(value, tags=tags)
            case Gauge():
                instrument.set(value, tags=tags)
            case Histogram():
                instrument.observe(value, tags=tags)


class RequestObserver:
    """Records the metrics of one request. Pass every output to `observe`: a single one, or all outputs of a stream.

    A context manager, so that it also counts a request whose caller leaves or whose engine dies.
    """

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._piece_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._has_first_token = False
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._finished:
            return
        self._finished = True
        if isinstance(error, Exception):
            self._fail(error)
        else:
            self._recorder.record("rayspec_request_success", 1, "abort")

    def observe(self, output: RequestOutput) -> None:
        """Record the next output of the request."""
        self._observe_pieces(output)
        self._observe_first_token(output)
        if output.finished:
            self._finished = True
            self._observe_end(output)

    def _observe_pieces(self, output: RequestOutput) -> None:
        now = self._clock()
        for one in output.outputs:
            if one.token_ids and one.index in self._piece_s:
                self._recorder.record("rayspec_inter_token_latency_seconds", now - self._piece_s[one.index])
            if one.token_ids:
                self._piece_s[one.index] = now
            self._num_tokens[one.index] = self._num_tokens.get(one.index, 0) + len(one.token_ids)
            if one.finish_reason is not None:
                self._reasons[one.index] = one.finish_reason

    def _observe_first_token(self, output: RequestOutput) -> None:
        first_token_s = output.metrics.first_token_s
        if first_token_s is not None and not self._has_first_token:
            self._has_first_token = True
            waited_s = first_token_s - output.metrics.arrival_s
            self._recorder.record("rayspec_time_to_first_token_seconds", waited_s)

    def _observe_end(self, output: RequestOutput) -> None:
        if output.error is not None:
            self._fail(output.error)
            return
        reason = self._reasons.get(min(self._reasons, default=0), "abort")
        self._recorder.record("rayspec_request_success", 1, reason)
        if reason == "abort":
            return
        metrics = output.metrics
        self._recorder.record("rayspec_request_prompt_tokens", len(output.prompt_token_ids))
        self._recorder.record("rayspec_request_generation_tokens", sum(self._num_tokens.values()))
        if metrics.finished_s is not None:
            self._recorder.record("rayspec_e2e_request_latency_seconds", metrics.finished_s - metrics.arrival_s)
        longest = max(self._num_tokens.values(), default=0)
        if metrics.finished_s is not None and metrics.first_token_s is not None and longest > 1:
            each_s = (metrics.finished_s - metrics.first_token_s) / (longest - 1)
            self._recorder.record("rayspec_request_time_per_output_token_seconds", each_s)

    def _fail(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, RayspecError) else RayspecError.kind
        self._recorder.record("rayspec_request_errors", 1, kind)


class EngineMetrics:
    """The metrics of one engine. Not thread-safe: use an object only in the process and thread that created it."""

    def __init__(self, recorder: Recorder, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._recorder = recorder
        self._clock = clock
        self._counted: dict[tuple[str, str], float] = {}
        self._gate = _GateReasons()

    @classmethod
    def to_ray(cls, *, model: str, replica: str) -> EngineMetrics:
        """Return metrics that are recorded in Ray. model: name under which the model is served."""
        return cls(RayRecorder(model=model, replica=replica))

    def request(self) -> RequestObserver:
        """Return an observer. Enter its context when the request is passed to the engine."""
        return RequestObserver(self._recorder, self._clock)

    def update(self, stats: EngineStats, load: EngineLoad, stages: Sequence[StageUse] = ()) -> None:
        """Increase counters by the progress since the last call, and set gauges. Call it every few seconds.

        stages: use of a pipeline's stages since the last query. The engine may change `stats` during the call.
        """
        for reading in counts(stats):
            if (increase := self._increase(reading)) > 0:
                self._recorder.record(reading.name, increase, reading.label)
        for reading in (*loads(load), *plans(stats), *self._gate.readings(stats.gate_reason)):
            self._recorder.record(reading.name, reading.value, reading.label)
        for stage in stages:
            self._recorder.record("rayspec_stage_idle_share", stage.idle_share, stage.name)

    def _increase(self, reading: Reading) -> float:
        """Return the increase since the last call. As in Prometheus, a value that decreases has restarted at 0."""
        before = self._counted.get((reading.name, reading.label), 0.0)
        self._counted[reading.name, reading.label] = reading.value
        return reading.value - before if reading.value >= before else reading.value


class Watched(Protocol):
    """The part of an engine that its metrics read; AsyncEngine implements it."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load(self) -> EngineLoad: ...

    def stage_use(self) -> Sequence[StageUse]: ...


async def keep_updated(metrics: EngineMetrics, engine: Watched, *, every_s: float = 2.0) -> None:
    """Update the metrics repeatedly until cancelled, and once more at the end."""
    try:
        while True:
            metrics.update(engine.stats, engine.load, engine.stage_use())
            await asyncio.sleep(every_s)
    finally:
        metrics.update(engine.stats, engine.load, engine.stage_use())


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a metric; for a counter, its total since the engine was created."""

    name: str
    value: float
    label: str = ""


def counts(stats: EngineStats) -> Iterator[Reading]:
    """Yield the totals of an engine since its creation."""
    yield Reading("rayspec_prompt_tokens", stats.num_prompt_tokens)
    yield Reading("rayspec_prefix_cache_queries", stats.num_prefilled_tokens + stats.num_cached_tokens)
    yield Reading("rayspec_prefix_cache_hits", stats.num_cached_tokens)
    yield Reading("rayspec_generation_tokens", stats.num_generated_tokens)
    yield Reading("rayspec_num_preemptions", stats.num_preemptions)
    yield Reading("rayspec_replays", stats.num_replays)
    yield Reading("rayspec_spec_decode_num_draft_tokens", stats.num_draft_tokens)
    yield Reading("rayspec_spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
    yield Reading("rayspec_num_plain_rounds", stats.num_plain_rounds)
    lengths = dict(stats.accepted_lengths)  # a copy, because the engine changes it meanwhile
    yield Reading("rayspec_spec_decode_num_drafts", sum(lengths.values()))
    for position in range(max(lengths, default=0)):
        accepted = sum(count for length, count in lengths.items() if length > position)
        yield Reading("rayspec_spec_decode_num_accepted_tokens_per_pos", accepted, str(position))
    phases = {
        "prefill": stats.prefill_s,
        "draft": stats.draft_s,
        "verify": stats.verify_s,
        "optimise": stats.optimise_s,
        "total": stats.total_s,
    }
    for phase, seconds in phases.items():
        yield Reading("rayspec_engine_time_seconds", seconds, phase)


def loads(load: EngineLoad) -> Iterator[Reading]:
    """Yield the current load of an engine."""
    yield Reading("rayspec_num_requests_running", load.num_running)
    yield Reading("rayspec_num_requests_waiting", load.num_waiting)
    usage = load.kv_used_tokens / load.kv_total_tokens if load.kv_total_tokens else 0.0
    yield Reading("rayspec_kv_cache_usage_perc", usage)


def plans(stats: EngineStats) -> Iterator[Reading]:
    """Yield the values of the current plan; nothing where there is no plan."""
    if stats.plans:
        record = stats.plans[-1]
        choices = record.plan.choices
        yield Reading("rayspec_plan_num_draft_tokens", record.plan.num_draft_tokens)
        yield Reading("rayspec_plan_skipped_share", _skipped_share(choices[::2]), "attention")
        yield Reading("rayspec_plan_skipped_share", _skipped_share(choices[1::2]), "mlp")
        yield Reading("rayspec_plan_estimated_acceptance_rate", record.estimated_acceptance)
        yield Reading("rayspec_plan_predicted_tokens_per_second", record.predicted_tpt)
        yield Reading("rayspec_plan_plain_tokens_per_second", record.plain_tpt)
        yield Reading("rayspec_plan_measured_tokens_per_second", record.measured_tpt or 0.0)


class _GateReasons:
    """Turns the gate's reasons into labels without numbers, and limits the number of different labels."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._now: str | None = None

    def readings(self, reason: str) -> Iterator[Reading]:
        if not reason:
            return
        if switch := re.match(r"(self-)?drafting is (on|off)", reason):
            yield Reading("rayspec_gate_open", float(switch[2] == "on"))
        label, before = self._label(reason), self._now
        self._now = label
        if before not in {None, label}:
            yield Reading("rayspec_gate_info", 0.0, before or "")
        yield Reading("rayspec_gate_info", 1.0, label)

    def _label(self, reason: str) -> str:
        label = _NUMBERS.sub("#", reason)
        if label not in self._seen and len(self._seen) >= _MAX_GATE_REASONS:
            return "other"
        self._seen.add(label)
        return label


def _skipped_share(choices: Sequence[Choice]) -> float:
    return choices.count(SKIP) / len(choices) if choices else 0.0


def _instrument(spec: MetricSpec, tags: dict[str, str]) -> Counter | Gauge | Histogram:
    instrument: Counter | Gauge | Histogram
    description = f"{spec.meaning} [{spec.unit}]"
    match spec.kind:
        case "counter":
            instrument = Counter(spec.name, description, tag_keys=spec.labels)
        case "gauge":
            instrument = Gauge(spec.name, description, tag_keys=spec.labels)
        case "histogram":
            instrument = Histogram(spec.name, description, boundaries=list(spec.boundaries), tag_keys=spec.labels)
    instrument.set_default_tags(tags)
    return instrument
