"""The alerts: what the operator takes, and of metrics that are exported."""

import copy
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from rayspec.serve.scrape import UNREACHABLE_NODES
from tests.ops.k8s.schemas import problems
from tests.serve.test_dashboard import exported, labels_in, parsed, selectors

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = MANIFEST["spec"]["groups"][0]["rules"]


def series() -> dict[str, set[str]]:
    return exported() | {UNREACHABLE_NODES: set()}


def of_each(name: str) -> Any:
    return pytest.mark.parametrize(name, RULES, ids=lambda rule: rule["alert"])


def test_the_operator_takes_it() -> None:
    assert problems(MANIFEST) == []
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10


@pytest.mark.parametrize(("old", "new"), [("expr", "expression"), ("labels", "label"), ("alert", "record")])
def test_a_planted_typo_is_found(old: str, new: str) -> None:
    planted = copy.deepcopy(MANIFEST)
    rule = planted["spec"]["groups"][0]["rules"][0]
    rule[new] = rule.pop(old)
    assert problems(planted)


@of_each("rule")
def test_it_asks_only_for_what_is_exported(rule: dict[str, Any]) -> None:
    asked = selectors(rule["expr"])
    assert asked
    assert {selector.name for selector in asked} <= series().keys()
    for selector in asked:
        assert {matcher.name for matcher in selector.matchers.matchers} <= series()[selector.name]
    assert labels_in(rule["expr"]) <= set.union(*(series()[selector.name] for selector in asked))


@of_each("rule")
def test_counters_are_rated_and_gauges_are_not(rule: dict[str, Any]) -> None:
    growing = {name for name in series() if name.endswith(("_total", "_bucket"))}
    rated = {
        node.vector_selector.name for node in parsed(rule["expr"]) if isinstance(node, promql_parser.MatrixSelector)
    }
    assert rated == {selector.name for selector in selectors(rule["expr"])} & growing


@of_each("rule")
def test_it_says_how_grave_it_is_and_what_it_is_about(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    summary = rule["annotations"]["summary"]
    assert summary.endswith(".")
    named = set(re.findall(r"\$labels\.(\w+)", summary))
    assert named <= set.union(*(series()[selector.name] for selector in selectors(rule["expr"])))
    kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
    assert not kept or named <= {label.strip() for labels in kept for label in labels.split(",")}
