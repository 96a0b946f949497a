"""The alerts: what the operator takes, and of metrics that are exported."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.k8s.schemas import problems
from tests.serve.test_dashboard import require_sound

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "k8s" / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = MANIFEST["spec"]["groups"][0]["rules"]


def test_the_operator_takes_it() -> None:
    assert problems(MANIFEST) == []
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10


@pytest.mark.parametrize(("old", "new"), [("expr", "expression"), ("labels", "label"), ("alert", "record")])
def test_a_planted_typo_is_found(old: str, new: str) -> None:
    planted = copy.deepcopy(MANIFEST)
    rule = planted["spec"]["groups"][0]["rules"][0]
    rule[new] = rule.pop(old)
    assert problems(planted)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_sound_and_says_how_grave_it_is_and_what_it_is_about(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    summary = rule["annotations"]["summary"]
    assert summary.endswith(".")
    named = set(re.findall(r"\$labels\.(\w+)", summary))
    require_sound(rule["expr"], named)
    kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
    assert not kept or named <= {label.strip() for labels in kept for label in labels.split(",")}
