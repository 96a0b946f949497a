"""What doctor says of a machine, its GPUs, a model's files and a cluster."""

import json
import shutil
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rayspec.cli import app
from rayspec.config import EngineConfig
from rayspec.model import weights
from rayspec.model.sources import check_name
from rayspec.ops.commands import examine
from rayspec.ops.doctor import cluster, machine
from rayspec.ops.doctor.cluster import (
    Node,
    NodeFacts,
    check_agreement,
    check_counted_gpus,
    check_reach,
    cluster_findings,
    describe_node,
)
from rayspec.ops.doctor.machine import (
    Finding,
    check_gpus,
    check_memory,
    check_model,
    check_open_files,
    check_packages,
    check_ray_folder,
    check_shared_memory,
)
from rayspec.types import ConfigError
from tests.families import checkpoint

GIB = 2**30


def test_this_machine_can_run_its_own_tests() -> None:
    found = examine(quick=True)[:6]
    assert {finding.status for finding in found} <= {"ok", "warning"}
    assert [finding.name for finding in found] == [
        *("packages", "CPU", "memory", "shared memory", "Ray's folder", "open files")
    ]
    assert all(finding.remedy for finding in found if finding.status == "warning")


def test_one_core_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, words in ((1, ", 1 core, "), (2, ", 2 cores, ")):
        monkeypatch.setattr(machine, "num_cores", lambda number=number: number)
        assert words in machine.check_cpu().found


@pytest.mark.parametrize(
    ("finding", "status", "says"),
    [
        (check_memory(3 * GIB), "ok", "3.0 GiB"),
        (check_memory(GIB), "warning", "1.0 GiB"),
        (check_shared_memory(10 * GIB, 30 * GIB), "ok", "10.0 GiB"),
        (check_shared_memory(64 * 2**20, 30 * GIB), "warning", "wants 9.0"),
        (check_shared_memory(16 * GIB, 128 * GIB), "ok", "16.0 GiB"),
        (check_shared_memory(3 * GIB, 128 * GIB), "warning", "wants 9.3"),
        (check_ray_folder("/tmp", used=0.5), "ok", "50%"),
        (check_ray_folder("/tmp", used=0.92), "warning", "92%"),
        (check_ray_folder("/tmp", used=0.96), "problem", "96%"),
        (check_ray_folder("/tmp", used=0.1, writable=False), "problem", "cannot be written"),
        (check_ray_folder("/home/" + "x" * 60, used=0.1), "problem", "66 characters"),
        (check_open_files(256), "problem", "256"),
        (check_open_files(4096), "warning", "4096"),
        (check_open_files(65536), "ok", "65536"),
        (check_open_files(-1), "ok", "no limit"),
    ],
)
def test_what_is_found_is_judged(finding: Finding, status: str, says: str) -> None:
    assert finding.status == status
    assert says in finding.found + finding.remedy
    assert bool(finding.remedy) == (status in ("warning", "problem"))


def test_packages_are_held_against_what_is_required() -> None:
    assert check_packages(["numpy>=1", "nowhere>=1; extra == 'dev'"]).status == "ok"
    lacking = check_packages(["numpy>=1000", "no-such-package-here", "pydantic>=2"])
    assert lacking.status == "problem"
    assert "numpy is" in lacking.found
    assert "not >=1000" in lacking.found
    assert "no-such-package-here is missing" in lacking.found
    assert "pydantic" not in lacking.found


def test_a_machine_without_shared_memory_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rayspec.ops.doctor.machine._SHARED", str(tmp_path / "shm"))
    assert check_shared_memory().found.startswith(f"{tmp_path / 'shm'} has 0.0 GiB, and Ray's object store wants")


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    found, above = (check_ray_folder(str(folder)).found for folder in (tmp_path / "a" / "b", tmp_path))
    assert found.split("disk is")[1][:3] == above.split("disk is")[1][:3]


@pytest.mark.parametrize(("gain", "dtype"), [(0.7, torch.bfloat16), (3.3, torch.float32)])
def test_the_dtype_is_the_one_that_auto_takes(gain: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the measurement that decides, whatever instructions the processor has."""
    monkeypatch.setattr(weights, "gain_of_float32", lambda _: gain)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16)
    assert weights.in_fast_dtype(model, EngineConfig(model="m", device="cpu")).dtype == dtype
    (found,) = [finding.found for finding in examine() if finding.name == "dtype on the CPU"]
    assert f"float32 is {gain} times as fast" in found
    assert ("takes float32" in found) == (dtype == torch.float32)
    assert not any("dtype" in finding.name for finding in examine(quick=True)), "it measures nothing"


TOLD: dict[str, Any] = {"names": ["H100"] * 2, "torch": "2.13.0", "cuda": "12.8", "has_nccl": True}
ONE, TWO = "echo 'NVIDIA H100 80GB HBM3, 570.86.15'", "echo 'H100, 570.1'; echo 'H100, 570.1'"
MISMATCH = "echo 'driver/library version mismatch' >&2; exit 9"


def with_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """What the driver's own tool would say."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver here")
def test_without_a_driver_there_is_no_gpu() -> None:
    finding, num_usable = check_gpus()
    assert (finding.status, finding.found, num_usable) == ("skipped", "no GPU", 0)


@pytest.mark.parametrize(
    ("script", "vendor", "status", "says"),
    [
        ("exit 0", "0x10de", "skipped", "no GPU"),
        (MISMATCH, "0x10de", "problem", "driver/library version mismatch"),
        (MISMATCH, "0x1d0f", "skipped", "no GPU"),  # the head of a cluster, with the image of the workers
        (ONE, "0x10de", "problem", "1 x NVIDIA H100 80GB HBM3, driver 570.86.15"),
    ],
)
def test_torch_is_asked_for_what_the_driver_has(
    script: str, vendor: str, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:00:04.0").mkdir()
    (tmp_path / "0000:00:04.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(machine, "_PCI", str(tmp_path))
    with_driver(tmp_path, monkeypatch, script)
    finding, num_usable = check_gpus()
    assert (finding.status, num_usable) == (status, 0)
    assert says in finding.found


@pytest.mark.parametrize(
    ("told", "status", "says", "num_usable"),
    [
        ({}, "ok", "2 x H100, driver 570.1, torch 2.13.0 for CUDA 12.8", 2),
        ({"names": []}, "problem", "none of them", 0),
        ({"names": [], "cuda": None}, "problem", "build for the CPU", 0),
        ({"names": ["H100"]}, "warning", "sees 1 of them", 1),
        ({"has_nccl": False}, "problem", "without NCCL", 2),
    ],
)
def test_what_torch_says_is_judged(
    told: dict[str, Any], status: str, says: str, num_usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(tmp_path, monkeypatch, TWO)
    monkeypatch.setattr(machine, "ask_torch", lambda *, hidden_too: TOLD | told)
    finding, found = check_gpus()
    assert (finding.status, found) == (status, num_usable)
    assert says in finding.found
    assert bool(finding.remedy) == (status != "ok")


ON_AMD = {"names": ["AMD Instinct MI300X"] * 8, "torch": "2.13.0", "cuda": None, "rocm": "7.2", "has_nccl": True}


@pytest.mark.parametrize(
    ("told", "status", "says", "num_usable"),
    [
        ({}, "ok", "8 x AMD Instinct MI300X, torch 2.13.0 for ROCm 7.2", 8),
        ({"names": []}, "warning", "torch 2.13.0 can use no GPU", 0),
        ({"names": [], "rocm": None, "cuda": "12.8"}, "warning", "install torch's build for ROCm", 0),
        ({"has_nccl": False}, "problem", "without RCCL", 8),
    ],
)
def test_gpus_of_amd_are_those_that_torch_can_use(
    told: dict[str, Any], status: str, says: str, num_usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_AMD", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(machine, "ask_torch", lambda *, hidden_too: ON_AMD | told)
    finding, found = check_gpus()
    assert (finding.status, found) == (status, num_usable)
    assert says in finding.found + finding.remedy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    return path


def refused(folder: Path) -> Finding:
    """Return the finding of a model that cannot be loaded."""
    finding, place = check_model(str(folder))
    assert (finding.status, place) == ("problem", None)
    assert "fetch the model again" in finding.remedy
    return finding


def test_a_file_that_was_cut_short_is_found(folder: Path) -> None:
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    assert "model.safetensors cannot be read" in refused(folder).found


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", (2**40).to_bytes(8, "little")])
def test_what_is_no_file_of_weights_is_found(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refused(folder)
    gguf = folder / "model.gguf"
    gguf.write_bytes(content)
    assert "is no GGUF file" in refused(gguf).found
    gguf.write_bytes(b"GGUF")
    assert check_model(str(gguf))[1] == str(gguf)
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    assert check_model(str(folder))[1] == str(folder)
    (folder / "other.gguf").write_bytes(b"GGUF")
    assert "several GGUF files (model.gguf, other.gguf)" in check_model(str(folder))[0].found


def test_every_file_of_an_index_must_be_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(4)}, folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert refused(folder).found.endswith(": model-00002-of-00002.safetensors is missing")
    save_file({"b": torch.zeros(4)}, folder / "model-00002-of-00002.safetensors")
    assert check_model(str(folder))[1] == str(folder)
    (folder / "model.safetensors.index.json").write_text("[")
    assert "index.json cannot be read" in refused(folder).found
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**names, "a": 3}}))
    assert "index.json names '3', which is no file of the model's folder" in refused(folder).found


def test_config_weights_and_tokenizer_are_missed(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    finding, place = check_model(str(folder))
    assert (finding.status, place) == ("warning", str(folder))
    assert "no tokenizer" in finding.found
    for content in ("{", '{"a": ' + "[" * 100_000):
        (folder / "config.json").write_text(content)
        assert "config.json cannot be read" in refused(folder).found
    for path in folder.iterdir():
        path.unlink()
    assert "no config.json; no weights" in refused(folder).found


def test_a_hub_id_that_is_not_in_the_cache_can_still_be_fetched() -> None:
    finding, place = check_model("nobody/no-such-model")
    assert (finding.status, place) == ("warning", None)
    assert "hf download nobody/no-such-model" in finding.remedy
    finding, place = check_model("nobody/no-such-model:Q4.gguf")
    assert (finding.status, place) == ("warning", None)
    assert "hf download nobody/no-such-model Q4.gguf" in finding.remedy


def test_a_name_is_refused_as_at_load(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello.")
    for name in ("/no/such/folder", "what is this?", str(tmp_path / "a.txt"), "deno"):
        with pytest.raises(ConfigError) as refusal:
            check_name(name)
        finding, place = check_model(name)
        assert (finding.status, finding.found, place) == ("problem", str(refusal.value), None)


def test_the_base_model_of_an_adapter_is_looked_at(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    assert check_model(str(tmp_path))[1] == str(folder)
    for base, said in ((None, "names no base model"), ("/no/where", "names '/no/where' as its base, which is")):
        config.write_text(json.dumps({"base_model_name_or_path": base}))
        finding, place = check_model(str(tmp_path))
        assert (finding.status, place) == ("problem", None)
        assert said in finding.found


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
    assert finding.found.startswith(f"{scheme}127.0.0.1:{port}: [Errno 111] Connection refused")


def test_an_address_that_cannot_be_read_is_a_problem_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    (finding,) = cluster_findings("host:port", None)
    assert finding.status == "problem"


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


def test_quick_does_not_go_with_a_cluster() -> None:
    result = CliRunner().invoke(app, ["doctor", "--quick", "--address", "auto"])
    assert result.exit_code != 0
    with pytest.raises(ConfigError, match="option 'address' is 'auto', and 'quick' checks this machine only"):
        examine(address="auto", quick=True)


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


@pytest.mark.parametrize(("num_free", "status"), [(0, "skipped"), (1, "skipped"), (2, "ok")])
def test_gpus_in_use_are_no_problem_of_the_network(num_free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers without a GPU do not answer; those that have one join each other."""
    answers = iter([[TimeoutError("late")] * (3 - num_free) + ["place"] * num_free, [None] * num_free])
    monkeypatch.setattr(cluster, "ray", MagicMock())
    monkeypatch.setattr(cluster, "_answers", lambda _: next(answers))
    found = check_reach([Node(node_id=28 * name, name=name, num_gpus=8) for name in ("0a", "0b", "0c")], "nccl")
    assert (found.status, str(num_free) in found.found) == (status, True)


THREE_NODES = """
import json
from dataclasses import asdict
from ray.cluster_utils import Cluster
from rayspec.ops.doctor.cluster import cluster_findings

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=1, include_dashboard=False)
print(json.dumps([asdict(finding) for finding in cluster_findings(cluster.address, "demo")]))
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_nodes_of_a_real_cluster_are_looked_at(ray_environment: None) -> None:
    """In a process of its own, which starts a cluster of three nodes and attaches to it."""
    command = [sys.executable, "-c", THREE_NODES]
    done = subprocess.run(command, check=True, timeout=550, capture_output=True, text=True)
    report = next(line for line in done.stdout.splitlines() if line.startswith("["))
    statuses = {each["name"]: each["status"] for each in json.loads(report)}
    assert statuses["cluster"] == "ok"
    assert statuses["model on all nodes"] == "ok"
    assert statuses["nodes reach one another"] == "ok"
    assert statuses["NCCL between nodes"] == "skipped"
    assert {"ray on all nodes", "torch on all nodes", "rayspec on all nodes"} <= set(statuses)
    assert "problem" not in statuses.values()
    assert sum(name.endswith("model files") for name in statuses) == 3
