import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayspec.cli import app
from rayspec.ops.doctor.cluster import (
    Node,
    NodeFacts,
    check_agreement,
    check_counted_gpus,
    cluster_findings,
    describe_node,
)
from tests.families import checkpoint

FACTS = NodeFacts(versions={"python": "3.11.7", "ray": "2.60.0"}, num_usable_gpus=2, fingerprint="abc")
NODE = Node(node_id="1", name="a", num_gpus=2)


def test_nodes_must_have_the_same_versions() -> None:
    other = replace(FACTS, versions={"python": "3.11.7", "ray": "2.59.0"})
    python, ray = check_agreement({"a": FACTS, "b": other, "c": FACTS})
    assert (python.status, ray.status) == ("ok", "problem")
    assert ray.found == "2.59.0 on b; 2.60.0 on a, c"


@pytest.mark.parametrize(
    ("counted", "usable", "status"), [(2, 2, "ok"), (0, 0, "skipped"), (4, 2, "problem"), (1, 2, "warning")]
)
def test_ray_must_count_the_gpus_that_can_be_used(counted: int, usable: int, status: str) -> None:
    finding = check_counted_gpus(replace(NODE, num_gpus=counted), usable)
    assert finding.status == status
    assert status in {"ok", "skipped"} or "--num-gpus 2" in finding.remedy


@pytest.mark.parametrize(
    ("prints", "status", "found"),
    [
        (("abc", "abc"), "ok", "abc"),
        (("abc", ""), "problem", "none on b; abc on a"),
        (("", ""), "skipped", "no node has its files"),
    ],
)
def test_nodes_must_have_the_same_weights(prints: tuple[str, ...], status: str, found: str) -> None:
    facts = {node: replace(FACTS, fingerprint=mark) for node, mark in zip("ab", prints, strict=False)}
    *_, finding = check_agreement(facts, with_model=True)
    assert (finding.name, finding.status, finding.found) == ("model on all nodes", status, found)


@pytest.mark.parametrize("scheme", ["ray://", ""])
def test_a_cluster_that_is_not_there_is_a_problem_and_no_traceback(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (finding,) = cluster_findings(f"{scheme}127.0.0.1:{port}", None)
    assert finding.status == "problem"
    assert f"nothing answers at {scheme}127.0.0.1:{port}" in finding.found


def test_a_node_tells_of_itself(tmp_path: Path) -> None:
    facts = describe_node(checkpoint("llama"))
    assert len(facts.fingerprint) == 16
    assert facts.versions["python"].startswith("3.")
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("llama"), broken)
    (broken / "model.safetensors").unlink()
    assert describe_node(str(broken)).fingerprint == ""
    assert describe_node(None).fingerprint == ""


def test_the_command_is_quick_and_says_what_it_found(tmp_path: Path) -> None:
    arguments = ["doctor", "--quick", "--model", "demo", "--json", str(tmp_path / "found.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["ok"] is True
    assert {"packages", "GPUs", "model files"} <= {each["name"] for each in saved["findings"]}
    assert "cluster" not in {each["name"] for each in saved["findings"]}


def test_quick_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from rayspec.ops.commands import examine; examine(model='demo', quick=True); "
        "sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_fails_where_there_is_a_problem(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    result = CliRunner().invoke(app, ["doctor", "--quick", "--model", str(tmp_path), "--json", str(found)])
    assert result.exit_code == 1
    assert "no config.json" in found.read_text(encoding="utf-8")


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_nodes_of_a_real_cluster_are_looked_at(ray_environment: None, tmp_path: Path) -> None:
    """In a process of its own, which starts a cluster of three nodes and attaches to it."""
    script, report = Path(__file__).parent / "three_nodes.py", tmp_path / "report.json"
    subprocess.run([sys.executable, script, report], check=True, timeout=550)
    statuses = {each["name"]: each["status"] for each in json.loads(report.read_text())}
    assert statuses["cluster"] == "ok"
    assert statuses["model on all nodes"] == "ok"
    assert statuses["nodes reach one another"] == "ok"
    assert statuses["NCCL between nodes"] == "skipped"
    assert {"ray on all nodes", "torch on all nodes", "rayspec on all nodes"} <= set(statuses)
    assert "problem" not in statuses.values()
    assert sum(name.endswith("model files") for name in statuses) == 3
