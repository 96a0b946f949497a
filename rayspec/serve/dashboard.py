"""The Grafana dashboard, as data: `python -m rayspec.serve.dashboard k8s/grafana/rayspec.json` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rayspec.serve.metric_table import METRICS

PanelKind = Literal["timeseries", "state-timeline"]

_WIDTH, _PANEL_HEIGHT = 24, 8
_SCHEMA_VERSION = 39  # Grafana 10; later versions read it and bring it up to date
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_FILTER = 'model=~"$model", replica=~"$replica"'
_CHOSEN = f"{{{_FILTER}}}"
_EXPORTED = {spec.name.removeprefix("rayspec_"): spec.exported_name for spec in METRICS}
_TOKENS_PER_S = "suffix: tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression and the name of its curves."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """unit: by Grafana's names of units. maximum: of the axis, where there is a natural one."""

    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = "timeseries"
    width: int = 8
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def _now(name: str) -> str:
    return f"{_EXPORTED[name]}{_CHOSEN}"


def _rate(name: str) -> str:
    return f"rate({_EXPORTED[name]}{_CHOSEN}[$__rate_interval])"


def _sum(expr: str, *labels: str) -> str:
    """Over everything but the model and `labels`."""
    return f"sum by ({', '.join(('model', *labels))}) ({expr})"


def _share(part: str, whole: str) -> str:
    return f"{_sum(_rate(part))} / {_sum(_rate(whole))}"


def _percentiles(name: str) -> tuple[Query, ...]:
    buckets = f"sum by (model, le) (rate({_EXPORTED[name]}_bucket{_CHOSEN}[$__rate_interval]))"
    return tuple(
        Query(expr=f"histogram_quantile({quantile}, {buckets})", legend=f"{{{{model}}}} p{quantile * 100:.0f}")
        for quantile in (0.5, 0.9, 0.99)
    )


def _one(expr: str, legend: str = "{{model}}") -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


ROWS = (
    Row(
        title="Throughput",
        panels=(
            Panel(
                title="Generated tokens",
                meaning="Tokens a second that all requests were given.",
                unit=_TOKENS_PER_S,
                queries=_one(_sum(_rate("generation_tokens"))),
            ),
            Panel(
                title="Prompt tokens",
                meaning="Prompt tokens a second of the requests taken.",
                unit=_TOKENS_PER_S,
                queries=_one(_sum(_rate("prompt_tokens"))),
            ),
            Panel(
                title="Requests that ended",
                meaning="Without an error, by reason: stop, length, or abort (the client left).",
                unit="reqps",
                queries=_one(_sum(_rate("request_success"), "finished_reason"), "{{model}} {{finished_reason}}"),
            ),
        ),
    ),
    Row(
        title="Latency",
        panels=(
            Panel(
                title="Time to first token",
                meaning="From arrival at the engine. Percentiles are as exact as the buckets are narrow.",
                unit="s",
                queries=_percentiles("time_to_first_token_seconds"),
                width=6,
            ),
            Panel(
                title="Between pieces of a stream",
                meaning="Streamed requests only; a piece holds all tokens of a round.",
                unit="s",
                queries=_percentiles("inter_token_latency_seconds"),
                width=6,
            ),
            Panel(
                title="Time per output token",
                meaning="Mean of a request after its first token.",
                unit="s",
                queries=_percentiles("request_time_per_output_token_seconds"),
                width=6,
            ),
            Panel(
                title="Whole request",
                meaning="From arrival at the engine to the last token.",
                unit="s",
                queries=_percentiles("e2e_request_latency_seconds"),
                width=6,
            ),
        ),
    ),
    Row(
        title="Speculation",
        panels=(
            Panel(
                title="Draft tokens accepted",
                meaning="Share of the draft tokens that became text.",
                unit="percentunit",
                queries=(
                    Query(
                        expr=_share("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
                        legend="{{model}}",
                    ),
                    Query(
                        expr=f"avg by (model) ({_now('plan_estimated_acceptance_rate')})",
                        legend="{{model}} expected by the plan",
                    ),
                ),
                maximum=1,
                width=6,
            ),
            Panel(
                title="Tokens a drafted round",
                meaning="Mean acceptance length: the accepted tokens and the one that verify gives.",
                unit="suffix: tokens",
                queries=_one(f"1 + {_share('spec_decode_num_accepted_tokens', 'spec_decode_num_drafts')}"),
                width=6,
            ),
            Panel(
                title="Accepted by position",
                meaning="Share of the drafts whose token at a position was accepted; position 0 is the first.",
                unit="percentunit",
                queries=_one(
                    f"{_sum(_rate('spec_decode_num_accepted_tokens_per_pos'), 'position')}"
                    f" / on (model) group_left () {_sum(_rate('spec_decode_num_drafts'))}",
                    "{{model}} {{position}}",
                ),
                maximum=1,
                width=6,
            ),
            Panel(
                title="Rounds",
                meaning="Rounds a second of single sequences, with a draft and without.",
                unit="suffix: rounds/s",
                queries=(
                    Query(expr=_sum(_rate("spec_decode_num_drafts")), legend="{{model}} drafted"),
                    Query(expr=_sum(_rate("num_plain_rounds")), legend="{{model}} plain"),
                ),
                width=6,
            ),
        ),
    ),
    Row(
        title="Plan and gate",
        panels=(
            Panel(
                title="Gate",
                meaning="Whether drafting is what pays, by replica.",
                unit="bool_on_off",
                queries=_one(_now("gate_open"), "{{model}} {{replica}}"),
                kind="state-timeline",
                width=12,
            ),
            Panel(
                title="What the gate says",
                meaning="Numbers are left out; the endpoint's /status has them.",
                unit="bool_yes_no",
                queries=_one(f"{_now('gate_info')} == 1", "{{model}} {{replica}}: {{reason}}"),
                kind="state-timeline",
                width=12,
            ),
            Panel(
                title="Longest draft",
                meaning="Of the plan in force; 0: the plan is not to draft.",
                unit="suffix: tokens",
                queries=_one(_now("plan_num_draft_tokens"), "{{model}} {{replica}}"),
            ),
            Panel(
                title="Sublayers that drafts skip",
                meaning="Of the plan in force, by kind.",
                unit="percentunit",
                queries=_one(_now("plan_skipped_share"), "{{model}} {{replica}} {{kind}}"),
                maximum=1,
            ),
            Panel(
                title="Speed of one sequence",
                meaning="What the plan promised, what it makes (0 until it has been used), and what no draft would.",
                unit=_TOKENS_PER_S,
                queries=(
                    Query(expr=_now("plan_predicted_tokens_per_second"), legend="{{model}} {{replica}} predicted"),
                    Query(expr=_now("plan_measured_tokens_per_second"), legend="{{model}} {{replica}} measured"),
                    Query(expr=_now("plan_plain_tokens_per_second"), legend="{{model}} {{replica}} without a draft"),
                ),
            ),
        ),
    ),
    Row(
        title="Engine",
        panels=(
            Panel(
                title="Queue",
                meaning="Sequences that are computed, and that wait for room.",
                unit="suffix: sequences",
                queries=(
                    Query(expr=_sum(_now("num_requests_running")), legend="{{model}} running"),
                    Query(expr=_sum(_now("num_requests_waiting")), legend="{{model}} waiting"),
                ),
            ),
            Panel(
                title="KV cache in use",
                meaning="Of the arena, by replica.",
                unit="percentunit",
                queries=_one(_now("kv_cache_usage_perc"), "{{model}} {{replica}}"),
                maximum=1,
            ),
            Panel(
                title="Preemptions and replays",
                meaning="Sequences computed again for want of room; times that lost processes were brought back.",
                unit="cps",
                queries=(
                    Query(expr=_sum(_rate("num_preemptions")), legend="{{model}} preemptions"),
                    Query(expr=_sum(_rate("replays")), legend="{{model}} replays"),
                ),
            ),
            Panel(
                title="Where the time goes",
                meaning="Share of the engine's time; phases of work under way at the same time add up to more than 1. "
                "Plan search is `optimise`.",
                unit="percentunit",
                queries=_one(
                    f"{_sum(_rate('engine_time_seconds'), 'phase')} / on (model) group_left () sum by (model) "
                    f'(rate({_EXPORTED["engine_time_seconds"]}{{{_FILTER}, phase="total"}}[$__rate_interval]))',
                    "{{model}} {{phase}}",
                ),
                width=12,
            ),
            Panel(
                title="Idle stages",
                meaning="Time in which a pipeline stage had nothing to do.",
                unit="percentunit",
                queries=_one(_now("stage_idle_share"), "{{model}} {{replica}} {{stage}}"),
                maximum=1,
                width=12,
            ),
        ),
    ),
    Row(
        title="Errors and requests",
        panels=(
            Panel(
                title="Requests that failed",
                meaning="By kind of error.",
                unit="reqps",
                queries=_one(_sum(_rate("request_errors"), "kind"), "{{model}} {{kind}}"),
                width=6,
            ),
            Panel(
                title="HTTP errors",
                meaning="All that Serve answered with an error, those that never came to an engine too; all models.",
                unit="reqps",
                queries=_one(
                    "sum by (error_code) (rate(ray_serve_num_http_error_requests_total[$__rate_interval]))",
                    "{{error_code}}",
                ),
                width=6,
            ),
            Panel(
                title="Prompt length",
                meaning="Tokens of a request's prompt.",
                unit="suffix: tokens",
                queries=_percentiles("request_prompt_tokens"),
                width=6,
            ),
            Panel(
                title="Output length",
                meaning="Tokens generated for a request.",
                unit="suffix: tokens",
                queries=_percentiles("request_generation_tokens"),
                width=6,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """As Grafana imports it. It asks for the data source and names no other object of a particular Grafana."""
    return {
        "title": "rayspec",
        "description": "Throughput, latency, speculation, plans and errors of a rayspec endpoint.",
        "tags": ["rayspec", "ray", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def _variables() -> list[dict[str, Any]]:
    running = _EXPORTED["num_requests_running"]
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _label_variable("model", f"label_values({running}, model)"),
        _label_variable("replica", f'label_values({running}{{model=~"$model"}}, replica)'),
    ]


def _label_variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, each one's panels from left to right in as many lines as they need."""
    ids, top = count(1), 0
    for row in ROWS:
        place = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        yield {"id": next(ids), "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        top, left = top + 1, 0
        for panel in row.panels:
            if left + panel.width > _WIDTH:
                top, left = top + _PANEL_HEIGHT, 0
            place = {"x": left, "y": top, "w": panel.width, "h": _PANEL_HEIGHT}
            yield {"id": next(ids), "gridPos": place, **_panel(panel)}
            left += panel.width
        top += _PANEL_HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for number, query in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Writes the dashboard to the path that is the only argument."""
    (path,) = sys.argv[1:]
    Path(path).write_text(as_json(), encoding="utf-8")


def as_json() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    main()
