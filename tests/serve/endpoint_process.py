"""`rayspec serve` as a process of its own, for tests that load it, kill parts of it, and end it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import yaml
from starlette.types import ASGIApp

from rayspec.serve.front import http_server
from tests.waiting import wait_until

ENGINE: Mapping[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "kv_cache_tokens": 16384}
PAGE = "https://page.example"
"""An origin whose pages may use it, where a test says so."""
TWO_STAGES: Mapping[str, Any] = {"stages": 2, "heartbeat_timeout_s": 2.0, "cpus_per_shard": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProcess:
    """url: where it listens. All its processes are of one session, that of `process`. errors: what they log."""

    url: str
    errors: Path
    process: subprocess.Popen[str]

    def status(self, model: str = "demo") -> list[dict[str, Any]]:
        """Of each replica of the model that answers."""
        models = httpx2.get(f"{self.url}/status", timeout=30).json()["models"]
        return [one for one in models if one["model"] == model]

    def num_generated(self, model: str = "demo") -> int:
        """Tokens, by all replicas that answer."""
        return sum(one["num_generated_tokens"] for one in self.status(model))

    def health(self) -> int:
        """The status of /health; 0 when there is no answer."""
        try:
            return httpx2.get(f"{self.url}/health", timeout=30).status_code
        except httpx2.TransportError:
            return 0

    def is_idle(self, model: str = "demo") -> bool:
        replicas = self.status(model)
        used = ("num_running", "num_waiting", "kv_used_tokens")
        return bool(replicas) and all(one[name] == 0 for one in replicas for name in used)

    def pids(self, title: str) -> list[int]:
        """Of its processes whose command line begins so, as "ray::Shard"."""
        return [pid for pid in session_pids(self.process.pid) if command_line(pid).startswith(title)]


@contextmanager
def serving(
    folder: Path, environment: Mapping[str, str], engine: Mapping[str, Any] = ENGINE, **options: Any
) -> Iterator[EndpointProcess]:
    """An endpoint with the demo model, by a file in `folder`. options: more of ServeOptions; `deployment` is the
    model's `deployment_config`."""
    deployment = options.pop("deployment", {})
    models = options.pop("llm_configs", None)
    model = {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": dict(engine)}
    file = folder / "app.yaml"
    content = {"llm_configs": models or [model | {"deployment_config": deployment}], "engine_timeout_s": 3.0} | options
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    command = [sys.executable, "-m", "rayspec", "serve", str(file), "--port", "0"]
    with (folder / "stderr").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment), start_new_session=True
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), (folder / "stderr").read_text(encoding="utf-8")
            yield EndpointProcess(url=url, process=process, errors=folder / "stderr")
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Whatever state it is in."""
    process.terminate()
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    for pid in session_pids(process.pid):
        os.kill(pid, signal.SIGKILL)


def session_pids(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = entry.joinpath("stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        except OSError:
            continue
        if entry.name.isdecimal() and fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


def connected(url: str, timeout_s: float = 20.0) -> socket.socket:
    address = httpx2.URL(url)
    return socket.create_connection((address.host, address.port or 0), timeout=timeout_s)


def head_of(path: str, num_bytes: int, key: str = "none") -> bytes:
    """Of a request with a JSON body of so many bytes."""
    lines = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"authorization: Bearer {key}",
        "content-type: application/json",
    )
    return "\r\n".join((*lines, f"content-length: {num_bytes}", "", "")).encode()


def client_of(endpoint: EndpointProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=key, max_retries=0, timeout=60)


def line_of(custom_id: str, *, url: str = "/v1/completions", **body: Any) -> bytes:
    """A line of a batch file."""
    default = {"model": "demo", "prompt": f"The agency {custom_id}", "max_tokens": 4, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": default | body}).encode() + b"\n"


def begun(client: openai.OpenAI, lines: list[bytes], *, window: str = "24h", **options: Any) -> Any:
    file = client.files.create(file=("requests.jsonl", b"".join(lines)), purpose="batch")
    create: Any = client.batches.create
    return create(input_file_id=file.id, endpoint="/v1/completions", completion_window=window, **options)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    final = {"completed", "failed", "cancelled", "expired"}
    wait_until(lambda: client.batches.retrieve(batch.id).status in final, 120)
    return client.batches.retrieve(batch.id)


@contextmanager
def served(app: ASGIApp, *, header_timeout_s: float = 5.0, write_timeout_s: float = 5.0) -> Iterator[tuple[str, int]]:
    """The address at which the front serves an application."""
    limits = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    with socket.create_server(("127.0.0.1", 0)) as listener, http_server(app, listener, **limits):
        yield listener.getsockname()
