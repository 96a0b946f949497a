"""The service's configuration of `cpu-demo`, run as its manifest would have a cluster run it.

Ray runs here as the manifest describes it, token and all; KubeRay's part is played as KubeRay plays it, by Serve's REST
API.
"""

import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import openai
import pytest
import yaml

import rayspec
from rayspec import demo
from rayspec.config import SamplingParams
from rayspec.serve.run import Address
from tests.ops.k8s.test_overlays import built
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
OVERLAYS = ROOT / "k8s" / "overlays" / "cpu-demo"
PATIENCE_S = 240.0
MAX_TOKENS = 48
NUM_CLIENTS = 6
NUM_REPLICAS = 3  # of two CPUs each: they do not fit into one worker of six with what passes requests on to them

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]


@dataclass(slots=True)
class RunningCluster:
    """url: of the dashboard. workers: node ids."""

    token: str
    process: subprocess.Popen[str]
    url: str = ""
    workers: list[str] = field(default_factory=list)

    def tell(self, command: str) -> None:
        """And wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout is not None
        line = next(line for line in iter(self.process.stdout.readline, "") if line.startswith("{"))
        state = json.loads(line)
        self.url, self.workers = state["url"], state["workers"]

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Ray's REST API. The agent that some of it needs comes up some seconds after the dashboard."""
        headers = {"Authorization": f"Bearer {self.token}"}
        deadline = time.monotonic() + PATIENCE_S / 4
        while True:
            answer = httpx2.request(method, self.url + path, json=body, headers=headers, timeout=30)
            if answer.status_code < 500 or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        answer.raise_for_status()
        return answer.json() if answer.content else None


@contextmanager
def running(spec: dict[str, Any]) -> Iterator[RunningCluster]:
    """A cluster by the spec of a RayCluster."""
    token = secrets.token_hex(16)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.local_cluster"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PATH": path,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",  # of 30
        },
    )
    cluster = RunningCluster(token, process)
    try:
        cluster.tell(json.dumps(spec))
        yield cluster
    finally:
        process.communicate(timeout=90)


def resource(overlay: str, kind: str) -> dict[str, Any]:
    """The spec of the overlay's one resource of this kind."""
    [found] = [one for one in built(OVERLAYS / overlay) if one["kind"] == kind]
    spec: dict[str, Any] = found["spec"]
    return spec


class Service:
    """The service's configuration on a cluster. It may be given another number of replicas, as people do."""

    def __init__(self, cluster: RunningCluster, config: dict[str, Any]) -> None:
        with Address(port=0).bound() as listener:
            address = Address(port=listener.getsockname()[1])
        config["http_options"] |= {"host": address.host, "port": address.port}  # of this machine
        self.url = f"http://{address.host}:{address.port}"
        self.cluster = cluster
        self._config = config

    def deploy(self, num_replicas: int) -> None:
        """And wait until there are so many."""
        [model] = self._config["applications"][0]["args"]["llm_configs"]
        model["deployment_config"]["num_replicas"] = num_replicas
        self.cluster.api("PUT", "/api/serve/applications/", self._config)
        wait_until(lambda: self._runs(num_replicas), PATIENCE_S)

    def nodes_of_replicas(self, deployment: str = "") -> list[str]:
        """Of replicas that have not ended."""
        return [replica.get("node_id", "") for one in self._deployments(deployment) for replica in one["replicas"]]

    def nodes_of_proxies(self) -> list[str]:
        return [proxy["node_id"] for proxy in self._details()["proxies"].values()]

    def num_listening(self) -> int:
        """Sockets that listen at the service's port: one of each proxy whose process has not ended."""
        own = f":{httpx2.URL(self.url).port:04X}"
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(one[1].endswith(own) and one[3] == "0A" for one in sockets)

    def _runs(self, num_replicas: int) -> bool:
        application = self._details()["applications"]["rayspec"]
        assert application["status"] not in {"DEPLOY_FAILED", "UNHEALTHY"}, application["message"]
        states = [replica["state"] for one in self._deployments("demo") for replica in one["replicas"]]
        return application["status"] == "RUNNING" and states == ["RUNNING"] * num_replicas

    def _deployments(self, name: str) -> list[dict[str, Any]]:
        deployments = self._details()["applications"]["rayspec"]["deployments"]
        return [one for key, one in deployments.items() if name in key]

    def _details(self) -> Any:
        return self.cluster.api("GET", "/api/serve/applications/")


class Load:
    """Clients that ask one thing after another until told to stop. They do not ask twice."""

    def __init__(self, url: str, prompts: list[str]) -> None:
        self.answers: list[tuple[str, str]] = []  # prompt, text
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._prompts = prompts
        self._stop = Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._running = [self._pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]

    def wait_for_more(self, num_answers: int) -> None:
        before = len(self.answers)

        def came() -> bool:
            return len(self.answers) >= before + num_answers or any(one.done() for one in self._running)

        wait_until(came, PATIENCE_S)

    def stop(self) -> None:
        """Raises what a client has met."""
        self._stop.set()
        self._pool.shutdown()
        for one in self._running:
            one.result()

    def _ask(self, first: int) -> None:
        for number in itertools.count(first):
            if self._stop.is_set():
                return
            prompt = self._prompts[number % len(self._prompts)]
            answer = self._client.completions.create(
                model="demo", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0
            )
            self.answers.append((prompt, answer.choices[0].text))


def test_the_service_and_a_worker_that_comes_and_goes_under_load(ray_environment: None) -> None:
    """Its configuration, but for the address; then replicas on a second worker, and back to one of each, the other
    drained as docs/operations.md has it."""
    spec = resource("service", "RayService")
    config = yaml.safe_load(spec["serveConfigV2"])
    engine = config["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
    prompts = [sample.text[:600] for sample in demo.sample_documents(6, num_sentences=4)]
    with rayspec.LLM("demo", **engine) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
        expected = {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
    with running(spec["rayClusterConfig"]) as cluster:
        service = Service(cluster, config)
        service.deploy(1)
        load = Load(service.url, prompts)
        load.wait_for_more(2 * NUM_CLIENTS)

        cluster.tell("add")
        service.deploy(NUM_REPLICAS)
        assert set(cluster.workers) == set(service.nodes_of_replicas("demo"))
        load.wait_for_more(4 * NUM_CLIENTS)

        service.deploy(1)
        [leaving] = set(cluster.workers) - set(service.nodes_of_replicas("demo"))
        cluster.tell(f"drain {leaving}")
        wait_until(lambda: leaving not in service.nodes_of_replicas(), PATIENCE_S)
        # A load balancer sends nothing to a proxy that drains. Here all proxies share a port, so the clients pause.
        load.stop()
        wait_until(lambda: leaving not in service.nodes_of_proxies(), PATIENCE_S)
        cluster.tell(f"remove {leaving}")
        wait_until(lambda: service.num_listening() == len(service.nodes_of_proxies()), PATIENCE_S)
        later = Load(service.url, prompts)
        later.wait_for_more(2 * NUM_CLIENTS)
        later.stop()
    answers = load.answers + later.answers
    assert len(cluster.workers) == 1
    assert len(answers) >= 8 * NUM_CLIENTS
    assert [text for prompt, text in answers] == [expected[prompt] for prompt, _ in answers]
