"""All metrics of the endpoint as data: kind, name, unit and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]

COMMON_LABELS = ("model", "replica")
UNREACHABLE_NODES = "rayspec_scrape_unreachable_nodes"  # added by `scrape.py`, not recorded by an engine

# vLLM's boundaries, so that its dashboards and alerts work here too; for tokens, also smaller boundaries.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_NUM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. label: name of its label in addition to COMMON_LABELS, if any. boundaries: upper bounds of a
    histogram's buckets, in the metric's unit."""

    kind: Kind
    name: str
    unit: str
    meaning: str
    label: str = ""
    boundaries: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS, self.label) if self.label else COMMON_LABELS

    @property
    def exported_name(self) -> str:
        """Name under which Ray's agents export the metric."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


_counter, _gauge, _histogram = (partial(MetricSpec, kind) for kind in get_args(Kind))

METRICS = (
    # The load at this moment.
    _gauge("rayspec_num_requests_running", "sequences", "Sequences being computed."),
    _gauge("rayspec_num_requests_waiting", "sequences", "Sequences that wait for room."),
    _gauge("rayspec_kv_cache_usage_perc", "share", "KV cache in use; 1 means all of it."),
    # Totals since the engine's start.
    _counter("rayspec_prompt_tokens", "tokens", "Prompt tokens of the requests taken."),
    _counter(
        "rayspec_prefix_cache_queries",
        "tokens",
        "Tokens of prompts, and of sequences computed again, that were looked for.",
    ),
    _counter("rayspec_prefix_cache_hits", "tokens", "Of these, the tokens that were found in the KV cache."),
    _counter("rayspec_generation_tokens", "tokens", "Tokens generated."),
    _counter(
        "rayspec_num_preemptions",
        "sequences",
        "Sequences that lost their place in the KV cache and are computed again.",
    ),
    _counter(
        "rayspec_replays", "times", "How often the model's processes were brought back and all sequences replayed."
    ),
    _counter(
        "rayspec_engine_time_seconds",
        "seconds",
        "Time of the engine by phase: prefill, draft, verify, optimise (plan search) and total. In a "
        "pipeline, drafts and verifies that overlap add up.",
        label="phase",
    ),
    # Speculation.
    _counter("rayspec_spec_decode_num_drafts", "rounds", "Rounds that verified a draft."),
    _counter("rayspec_spec_decode_num_draft_tokens", "tokens", "Tokens drafted."),
    _counter("rayspec_spec_decode_num_accepted_tokens", "tokens", "Draft tokens accepted."),
    _counter(
        "rayspec_spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        "Draft tokens accepted, by their position in the draft; 0 is the first.",
        label="position",
    ),
    _counter(
        "rayspec_spec_decode_num_accepted_tokens_by_source",
        "tokens",
        "Draft tokens accepted, by where they come from: own text, corpus, recycled, form or model.",
        label="source",
    ),
    _counter("rayspec_num_plain_rounds", "rounds", "Rounds of a sequence without a draft."),
    # Requests, recorded when they end.
    _counter(
        "rayspec_request_success",
        "requests",
        "Requests that ended without an error: stop, length, or abort (the client left).",
        label="finished_reason",
    ),
    _counter("rayspec_request_errors", "requests", "Requests that ended with an error, by its kind.", label="kind"),
    _histogram(
        "rayspec_time_to_first_token_seconds",
        "seconds",
        "From the arrival of a request at the engine to its first token.",
        boundaries=_FIRST_TOKEN_S,
    ),
    _histogram(
        "rayspec_inter_token_latency_seconds",
        "seconds",
        "Between two chunks of a streamed text, as they were sent; a chunk may hold several rounds.",
        boundaries=_TOKEN_S,
    ),
    _histogram(
        "rayspec_request_time_per_output_token_seconds",
        "seconds",
        "From the first token to the end, a token of the longest text of the request.",
        boundaries=_TOKEN_S,
    ),
    _histogram(
        "rayspec_e2e_request_latency_seconds",
        "seconds",
        "From the arrival of a request at the engine to its end.",
        boundaries=_REQUEST_S,
    ),
    _histogram("rayspec_request_prompt_tokens", "tokens", "Prompt tokens of a request.", boundaries=_NUM_TOKENS),
    _histogram(
        "rayspec_request_generation_tokens",
        "tokens",
        "Tokens generated for a request, all its texts together.",
        boundaries=_NUM_TOKENS,
    ),
    # The current plan and its gate. Nothing is exported where the strategy makes no plans.
    _gauge("rayspec_plan_num_draft_tokens", "tokens", "Most tokens of a draft; 0: the plan is not to draft."),
    _gauge(
        "rayspec_plan_skipped_share", "share", "Sublayers of a kind (attention, mlp) that drafts skip.", label="kind"
    ),
    _gauge(
        "rayspec_plan_estimated_acceptance_rate",
        "share",
        "Draft tokens that were expected to be accepted when the plan was chosen.",
    ),
    _gauge(
        "rayspec_plan_predicted_tokens_per_second",
        "tokens per second",
        "Predicted speed of one sequence with the plan.",
    ),
    _gauge(
        "rayspec_plan_plain_tokens_per_second",
        "tokens per second",
        "Speed of one sequence that was predicted without a draft.",
    ),
    _gauge(
        "rayspec_plan_measured_tokens_per_second",
        "tokens per second",
        "Speed of one sequence under the plan so far; 0 until it has been used.",
    ),
    _gauge("rayspec_gate_open", "0 or 1", "1 while drafting is on, 0 while it is off; no value without a gate."),
    _gauge(
        "rayspec_gate_info",
        "0 or 1",
        "1 for why drafting is on or off now, numbers left out; 0 for earlier reasons.",
        label="reason",
    ),
    _gauge(
        "rayspec_stage_idle_share", "share", "Time in which a pipeline stage had nothing to do, lately.", label="stage"
    ),
)
