"""Every metric of the endpoint, as data: what it is called, what it counts and in what unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

COMMON_LABELS = ("model", "replica")
UNREACHABLE_NODES = "rayspec_scrape_unreachable_nodes"  # made where the metrics are gathered, not in an engine

# vLLM's boundaries, so that its dashboards and alerts can be carried over; for tokens also some below them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric. label: what tells its series apart besides COMMON_LABELS, if anything. boundaries: upper ends of a
    histogram's buckets, in the metric's unit."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    label: str = ""
    boundaries: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS, self.label) if self.label else COMMON_LABELS

    @property
    def exported_name(self) -> str:
        """As Ray's agents export it."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


METRICS = (
    # The load at this moment.
    MetricSpec(
        name="rayspec_num_requests_running",
        kind="gauge",
        unit="sequences",
        meaning="Sequences being computed.",
    ),
    MetricSpec(
        name="rayspec_num_requests_waiting", kind="gauge", unit="sequences", meaning="Sequences that wait for room."
    ),
    MetricSpec(
        name="rayspec_kv_cache_usage_perc", kind="gauge", unit="share", meaning="KV arena in use; 1 means all of it."
    ),
    # What the engine has done.
    MetricSpec(
        name="rayspec_prompt_tokens", kind="counter", unit="tokens", meaning="Prompt tokens of the requests taken."
    ),
    MetricSpec(name="rayspec_generation_tokens", kind="counter", unit="tokens", meaning="Tokens generated."),
    MetricSpec(
        name="rayspec_num_preemptions",
        kind="counter",
        unit="sequences",
        meaning="Sequences that lost their place in the KV arena and are computed again.",
    ),
    MetricSpec(
        name="rayspec_replays",
        kind="counter",
        unit="times",
        meaning="How often the model's processes were brought back and all sequences replayed.",
    ),
    MetricSpec(
        name="rayspec_engine_time_seconds",
        kind="counter",
        unit="seconds",
        label="phase",
        meaning="Time of the engine by phase: prefill, draft, verify, optimise (plan search) and total. In a "
        "pipeline, drafts and verifies that overlap add up.",
    ),
    # Speculation.
    MetricSpec(
        name="rayspec_spec_decode_num_drafts", kind="counter", unit="rounds", meaning="Rounds that verified a draft."
    ),
    MetricSpec(name="rayspec_spec_decode_num_draft_tokens", kind="counter", unit="tokens", meaning="Tokens drafted."),
    MetricSpec(
        name="rayspec_spec_decode_num_accepted_tokens", kind="counter", unit="tokens", meaning="Draft tokens accepted."
    ),
    MetricSpec(
        name="rayspec_spec_decode_num_accepted_tokens_per_pos",
        kind="counter",
        unit="tokens",
        label="position",
        meaning="Draft tokens accepted, by their position in the draft; 0 is the first.",
    ),
    MetricSpec(
        name="rayspec_num_plain_rounds", kind="counter", unit="rounds", meaning="Rounds of a sequence without a draft."
    ),
    # Requests, when they end.
    MetricSpec(
        name="rayspec_request_success",
        kind="counter",
        unit="requests",
        label="finished_reason",
        meaning="Requests that ended without an error: stop, length, or abort (the client left).",
    ),
    MetricSpec(
        name="rayspec_request_errors",
        kind="counter",
        unit="requests",
        label="kind",
        meaning="Requests that ended with an error, by its kind.",
    ),
    MetricSpec(
        name="rayspec_time_to_first_token_seconds",
        kind="histogram",
        unit="seconds",
        boundaries=_FIRST_TOKEN_S,
        meaning="From the arrival of a request at the engine to its first token.",
    ),
    MetricSpec(
        name="rayspec_inter_token_latency_seconds",
        kind="histogram",
        unit="seconds",
        boundaries=_TOKEN_S,
        meaning="Between two pieces of a streamed text, as they were taken; a piece holds all tokens of a round.",
    ),
    MetricSpec(
        name="rayspec_request_time_per_output_token_seconds",
        kind="histogram",
        unit="seconds",
        boundaries=_TOKEN_S,
        meaning="From the first token to the end, a token of the longest text of the request.",
    ),
    MetricSpec(
        name="rayspec_e2e_request_latency_seconds",
        kind="histogram",
        unit="seconds",
        boundaries=_REQUEST_S,
        meaning="From the arrival of a request at the engine to its end.",
    ),
    MetricSpec(
        name="rayspec_request_prompt_tokens",
        kind="histogram",
        unit="tokens",
        boundaries=_NUM_TOKENS,
        meaning="Prompt tokens of a request.",
    ),
    MetricSpec(
        name="rayspec_request_generation_tokens",
        kind="histogram",
        unit="tokens",
        boundaries=_NUM_TOKENS,
        meaning="Tokens generated for a request, all its texts together.",
    ),
    # The plan in force and its gate. Nothing is exported where the strategy makes no plans.
    MetricSpec(
        name="rayspec_plan_num_draft_tokens",
        kind="gauge",
        unit="tokens",
        meaning="Most tokens of a draft; 0: the plan is not to draft.",
    ),
    MetricSpec(
        name="rayspec_plan_skipped_share",
        kind="gauge",
        unit="share",
        label="kind",
        meaning="Sublayers of a kind (attention, mlp) that drafts skip.",
    ),
    MetricSpec(
        name="rayspec_plan_estimated_acceptance_rate",
        kind="gauge",
        unit="share",
        meaning="Draft tokens that were expected to be accepted when the plan was chosen.",
    ),
    MetricSpec(
        name="rayspec_plan_predicted_tokens_per_second",
        kind="gauge",
        unit="tokens per second",
        meaning="Speed of one sequence that the plan promised.",
    ),
    MetricSpec(
        name="rayspec_plan_plain_tokens_per_second",
        kind="gauge",
        unit="tokens per second",
        meaning="Speed of one sequence that was predicted without a draft.",
    ),
    MetricSpec(
        name="rayspec_plan_measured_tokens_per_second",
        kind="gauge",
        unit="tokens per second",
        meaning="Speed of one sequence under the plan so far; 0 until it has been used.",
    ),
    MetricSpec(
        name="rayspec_gate_open",
        kind="gauge",
        unit="0 or 1",
        meaning="1 while drafting is what pays; nothing where the strategy has no gate.",
    ),
    MetricSpec(
        name="rayspec_gate_info",
        kind="gauge",
        unit="0 or 1",
        label="reason",
        meaning="1 for what the gate says now, numbers left out; 0 for what it said before.",
    ),
    MetricSpec(
        name="rayspec_stage_idle_share",
        kind="gauge",
        unit="share",
        label="stage",
        meaning="Time in which a pipeline stage had nothing to do, lately.",
    ),
)
