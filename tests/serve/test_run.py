"""`rayspec serve` as a process: where it listens, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from rayspec.cli import app
from rayspec.serve.run import Address
from rayspec.types import ConfigError
from tests.serve.endpoint_process import session_pids
from tests.waiting import wait_until

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "2048", "--port", "0")
SERVE = (sys.executable, "-m", "rayspec", "serve")


def test_a_port_that_is_busy_before_or_meanwhile_is_named() -> None:
    assert Address(host="::1", port=80).url == "http://[::1]:80"
    with Address(port=0).bound() as first:
        address = Address(port=first.getsockname()[1])
        with address.bound() as second:
            address.listen(first)
            with pytest.raises(ConfigError, match=f"'port' is {address.port}, which is in use"):
                address.listen(second)
        result = CliRunner().invoke(app, ["serve", "--model", "demo", "--port", str(address.port)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: option 'port'")
    for host in ("192.0.2.77", "", " ", "\udcff", f"{'a' * 64}.b"):  # an empty host would be all addresses
        with pytest.raises(ConfigError, match=re.escape(repr(host))), Address(host=host).bound():
            pass


def test_a_folder_of_batches_that_is_none_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "batches"):
        result = CliRunner().invoke(app, ["serve", "demo", "--port", "0", "--batches", str(place)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: option 'batches' is '{place}', which cannot be used")


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        ('{"max_ongoing_request": 3}', "did you mean 'max_"),
        ('{"autoscaling_config": {"max_replica": 3}}', "did you mean 'max_"),
        ('{"user_config": {"threshold": 1}}', "unknown option 'user_config'"),
    ],
)
def test_an_unknown_option_of_a_deployment_is_told_before_ray_starts(
    deployment: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayspec.serve.run.ray_session", None)
    models = f'[{{"model_loading_config": {{"model_id": "demo"}}, "deployment_config": {deployment}}}]'
    (tmp_path / "serve.yaml").write_text(f'{{"llm_configs": {models}}}', encoding="utf-8")
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "serve.yaml"), "--port", "0"])
    assert result.exit_code == 2
    assert re.match("error: unknown option '.*in 'deployment_config", result.stderr)
    assert words in result.stderr


def test_a_missing_adapter_is_an_error_before_the_endpoint_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, ["serve", "demo", "--port", "0", "--lora-modules", "a=/no/where"])
    assert result.exit_code == 1
    assert "the adapter '/no/where' has no readable adapter_config.json" in result.stderr


def test_the_folder_of_an_adapter_may_be_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/base"}')
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(tmp_path)])
    assert "names '/no/base' as its base" in result.stderr, "the base model is looked for"


def test_a_missing_model_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(tmp_path / "absent")])
    assert (result.exit_code, result.stderr.startswith("error: ")) == (2, True), result.output
    assert "absent" in result.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", "smollm2"])
    assert (result.exit_code, "rayspec fetch smollm2" in result.stderr) == (2, True), result.output


@pytest.fixture
def environment(ray_environment: None, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAYSPEC_API_KEYS": "from-environment"}


@pytest.fixture
def process(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [*SERVE, "--model", "demo", "--served-model-name", "mine", *FLAGS]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    yield started
    started.kill()
    started.communicate()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ray
def test_the_reason_why_a_model_cannot_be_loaded_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    command = [*SERVE, "demo", *FLAGS, "--lora-modules", f"a={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert ended.returncode == 1
    reason = f"the adapter '{tmp_path}' has peft_type None, not LORA"
    assert f"error: the endpoint could not be started: {reason}" in ended.stderr, ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ray
def test_told_to_end_it_finishes_what_it_has_begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
    body = {"model": "mine", "prompt": "The", "max_tokens": 500, "ignore_eos": True, "temperature": 0.0, "stream": True}
    lines: list[str] = []
    with httpx2.Client(base_url=url, headers={"authorization": "Bearer from-environment"}, timeout=60) as http:

        def read() -> None:
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines.extend(filter(None, response.iter_lines()))

        reader = threading.Thread(target=read)
        reader.start()
        while http.get("/status").json()["models"][0]["num_running"] == 0:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        late = http.post("/v1/completions", json=body)
        while late.status_code == 200:
            late = http.post("/v1/completions", json=body | {"max_tokens": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert http.get("/health").status_code == 503
        reader.join(60)
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert process.wait(60) == 0
    wait_until(lambda: not session_pids(process.pid))
    assert "Traceback" not in process.communicate()[1]
