"""The Grafana dashboard: it can be laid out, and asks only for what is exported."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from rayspec.serve.scrape import METRICS, UNREACHABLE_NODES

PATH = Path(__file__).parents[2] / "k8s" / "grafana" / "rayspec.json"
BOARD: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}") for panel in GRAPHS for target in panel["targets"]
]
SERVE = {"ray_serve_num_http_error_requests_total": {"error_code"}}


def exported() -> dict[str, set[str]]:
    """The series of our metrics, and their labels."""
    series = dict(SERVE)
    for spec in METRICS:
        labels = set(spec.labels)
        if spec.kind == "histogram":
            series[f"{spec.exported_name}_bucket"] = labels | {"le"}
        else:
            series[spec.exported_name] = labels
    return series


def nodes(expr: Any) -> Iterator[Any]:
    """A parsed expression and all parts of it."""
    yield expr
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (part := getattr(expr, name, None)) is not None:
            yield from nodes(part)
    for argument in getattr(expr, "args", None) or ():
        yield from nodes(argument)


def parsed(expr: str) -> list[Any]:
    return list(nodes(promql_parser.parse(expr.replace("$__rate_interval", "5m"))))


def selectors(expr: str) -> list[Any]:
    return [node for node in parsed(expr) if isinstance(node, promql_parser.VectorSelector)]


def require_sound(expr: str, named: set[str]) -> None:
    """It asks only for series and labels that are exported, and rates counters only. named: labels of its texts."""
    series, asked = exported() | {UNREACHABLE_NODES: set()}, selectors(expr)
    assert asked
    for selector in asked:
        assert selector.name in series
        assert {matcher.name for matcher in selector.matchers.matchers} <= series[selector.name]
    used = {label for one in parsed(expr) for label in getattr(getattr(one, "modifier", None), "labels", None) or ()}
    assert used | named <= set.union(*(series[selector.name] for selector in asked))
    rated = {node.vector_selector.name for node in parsed(expr) if isinstance(node, promql_parser.MatrixSelector)}
    assert rated == {selector.name for selector in asked if selector.name.endswith(("_total", "_bucket"))}


@pytest.mark.parametrize("target", QUERIES)
def test_a_query_is_sound(target: dict[str, Any]) -> None:
    require_sound(target["expr"], set(re.findall(r"{{(\w+)}}", target["legendFormat"])))


def test_every_metric_is_shown() -> None:
    shown = {selector.name for panel in GRAPHS for target in panel["targets"] for selector in selectors(target["expr"])}
    assert shown == exported().keys()
