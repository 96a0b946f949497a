"""The launcher files: Ray takes them, they are safe by default, and what they run is there and pinned."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import hash_runtime_conf, prepare_config, validate_config

from tests.cluster.commands import RAY, parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster"
NAMES = ("on-prem", "aws", "gcp", "azure")
CLOUDS = NAMES[1:]
_PROVIDERS = {"local": "local", "aws": "aws", "gcp": "gcp", "azure": "_azure"}
COMMANDS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip


def load(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """With Ray's defaults. Raises what Ray raises."""
    complete: dict[str, Any] = prepare_config(config)
    validate_config(complete)
    return complete


def problems(config: dict[str, Any]) -> list[str]:
    """Empty where Ray would take all of it. Ray's schema takes any provider's keys; its providers ask for them by
    name."""
    try:
        prepared(config)
    except (jsonschema.ValidationError, ValueError, RuntimeError, TypeError) as error:
        return [str(error).splitlines()[0]]
    folder = Path(ray.autoscaler.__file__).parent
    sources = [folder / "ray-schema.json", *(folder / "_private" / _PROVIDERS[config["provider"]["type"]]).glob("*.py")]
    known = "".join(path.read_text(encoding="utf-8") for path in sources)
    return [f"provider.{key} is not known" for key in config["provider"] if f'"{key}"' not in known]


def commands(config: dict[str, Any]) -> list[str]:
    return [command for name in COMMANDS for command in config.get(name, [])]


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[\w.]+", str(one.specifier)) for one in found), path
    return {one.name: str(one.specifier).removeprefix("==") for one in found}


@pytest.mark.parametrize("name", NAMES)
def test_ray_takes_it(name: str) -> None:
    assert problems(load(name)) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("on-prem", {"max_worker": 2}),
        ("on-prem", {"auth": {"ssh_user": "ubuntu", "ssh_key": "~/.ssh/id"}}),
        ("aws", {"head_node_type": "heads"}),
        ("azure", {"provider": {"type": "azure", "location": "x", "resource_group": "y", "use_external_ip": True}}),
    ],
)
def test_a_planted_fault_is_found(name: str, changes: dict[str, Any]) -> None:
    assert problems(load(name) | changes) != []


@pytest.mark.parametrize("name", CLOUDS)
def test_numbers_of_workers_are_limited_and_spot_is_an_option(name: str) -> None:
    config = load(name)
    types = config["available_node_types"]
    assert types["head"]["max_workers"] == 0
    assert sum(one["max_workers"] for one in types.values()) == config["max_workers"] == 2
    assert all(one["min_workers"] == 0 for one in types.values())
    assert types["h100-spot"]["resources"] == types["h100"]["resources"]
    assert "spot" in str(types["h100-spot"]["node_config"]).lower()
    assert "spot" not in str(types["h100"]["node_config"]).lower()
    assert types["h100"]["resources"].get("GPU", 8) == 8


def test_workers_have_no_public_address() -> None:
    aws, gcp, azure = (load(name) for name in CLOUDS)
    for name in ("h100", "h100-spot"):
        node = aws["available_node_types"][name]["node_config"]
        (interface,) = node["NetworkInterfaces"]
        assert interface["AssociatePublicIpAddress"] is False
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert all(device["Ebs"]["Encrypted"] for device in node["BlockDeviceMappings"])
        (interface,) = gcp["available_node_types"][name]["node_config"]["networkInterfaces"]
        assert "accessConfigs" not in interface
    assert azure["provider"]["use_internal_ips"]
    assert azure["provider"]["use_external_head_ip"]


@pytest.mark.parametrize("name", NAMES)
def test_ray_starts_with_a_token_and_its_dashboard_on_loopback(name: str) -> None:
    config = load(name)
    stop, head = (ray_arguments(command) for command in config["head_start_ray_commands"])
    assert stop == ["stop"]
    asked = parse(RAY, head).params
    assert (asked["dashboard_host"], asked["num_cpus"], asked["num_gpus"]) == ("127.0.0.1", 0, 0)
    assert asked["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
    stop, worker = (ray_arguments(command) for command in config["worker_start_ray_commands"])
    assert stop == ["stop"]
    assert parse(RAY, worker).params["address"] == "$RAY_HEAD_IP:6379"
    assert f"{asked['port']}" == "6379"
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def ray_arguments(command: str) -> list[str]:
    """Of the call of ray in it, which must have our environment."""
    assert command.startswith(". ~/rayspec/cluster/environment.sh && ")
    words = shlex.split(command)
    return words[words.index("ray") + 1 :]


def test_the_environment_asks_for_the_token_and_frees_the_threads() -> None:
    script = '. "$1"; env; command -v ray'
    done = subprocess.run(
        ["bash", "-c", script, "-", FOLDER / "environment.sh"],
        env={"HOME": "/home/somebody", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["PATH"].startswith("/home/somebody/rayspec/.venv/bin:")
    assert "OMP_NUM_THREADS" not in found
    assert found["HF_HOME"].startswith("/shared/")


@pytest.mark.parametrize("name", NAMES)
def test_ray_exec_finds_the_environment_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "rayspec").mkdir()
    (tmp_path / "rayspec" / "cluster").symlink_to(FOLDER)
    (command,) = (one for one in load(name)["setup_commands"] if ".bashrc" in one)
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        subprocess.run(["bash", "-c", command], env=environment, check=True)
    assert len((tmp_path / ".bashrc").read_text(encoding="utf-8").splitlines()) == 1
    shown = subprocess.run(
        ["bash", "-c", "source ~/.bashrc; echo $PATH $RAY_AUTH_MODE"], env=environment, capture_output=True, check=True
    )
    assert shown.stdout.decode().split() == [f"{tmp_path}/rayspec/.venv/bin:/usr/bin:/bin", "token"]


def test_a_script_is_one() -> None:
    for script in FOLDER.glob("*.sh"):
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        assert "set -euo pipefail" in script.read_text(encoding="utf-8") or script.name == "environment.sh"


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_shell_and_name_files_that_are_mounted(name: str) -> None:
    config = load(name)
    found = commands(config)
    assert len(found) >= 7
    for command in found:
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command
    named = {path for command in found for path in re.findall(r"~/rayspec/([\w./-]+)", command)}
    assert named
    for path in named:
        mount = config["file_mounts"][f"~/rayspec/{Path(path).parts[0]}"]
        assert (ROOT / mount / Path(*Path(path).parts[1:])).is_file(), path
    for cloud in re.findall(r"install\.sh (\w+)", "\n".join(found)):
        assert (FOLDER / f"requirements-{cloud}.txt").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_its_mounts_are_enough_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = load(name)["file_mounts"]
    copied = {word for line in dockerfile("COPY") for word in line.split()[:-1] if not word.startswith("--")}
    needed = {path.removeprefix("./") for path in copied} - {"/opt/venv", "k8s/docker/entrypoint.sh"}
    assert {"rayspec", "pyproject.toml"} < needed <= set(mounts.values())
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    small = {there: here for there, here in mounts.items() if here not in {"rayspec", "jobs"}}
    assert hash_runtime_conf(small, [], {"name": name}, generate_file_mounts_contents_hash=True)[1]
    assert all(Path(here).expanduser().exists() for here in mounts.values())


def dockerfile(instruction: str) -> Iterator[str]:
    for line in (ROOT / "k8s" / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{instruction} "):
            yield line.removeprefix(f"{instruction} ")


def test_nothing_is_installed_but_by_the_script() -> None:
    assert [command for name in NAMES for command in commands(prepared(load(name))) if "pip" in command] == []
    config = load("aws")
    del config["head_setup_commands"]  # without our empty lists Ray's defaults install something
    assert [command for command in commands(prepared(config)) if "pip" in command] != []


def test_the_versions_are_those_of_the_package() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert pinned is not None
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    script = (FOLDER / "install.sh").read_text(encoding="utf-8")
    python = re.search(r"RAYSPEC_PYTHON:-([\d.]+)\}", script)
    assert python is not None
    assert pinned[1] == metadata.version("ray")
    assert f"Ray {pinned[1]}," in readme
    assert f"Python {python[1].rpartition('.')[0]}," in readme
    assert all(image.startswith(f"python:{python[1]}-") for image in dockerfile("FROM"))
    assert "--constraint constraints.txt" in script
    assert re.search(r"^uv_version=[\d.]+$", script, re.MULTILINE)


def test_a_clouds_packages_are_pinned_and_do_not_touch_ours() -> None:
    ours = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    for cloud in CLOUDS:
        assert pins(FOLDER / f"requirements-{cloud}.txt").keys().isdisjoint(ours)
    path = Path(ray.autoscaler.__file__).parent / "azure" / "defaults.yaml"
    (command,) = yaml.safe_load(path.read_text(encoding="utf-8"))["head_setup_commands"]
    asked = {one.name: str(one.specifier) for one in map(Requirement, command.split()[3:])}
    assert {name: f"=={version}" for name, version in pins(FOLDER / "requirements-azure.txt").items()} == asked
