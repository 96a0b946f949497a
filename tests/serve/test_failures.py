"""Parts of a running endpoint are killed or frozen under load: what clients get, and how it comes back."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

import rayspec
from benchmarks.serve import ServeBenchOptions, differing, run_load
from benchmarks.serve_client import Answer, Ask
from benchmarks.serve_mix import Mix
from tests.serve.endpoint_process import ENGINE, TWO_STAGES, EndpointProcess, serving
from tests.waiting import freeze, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# Codes of the errors that a client may get for what has happened to the server.
REPLICA = "ray::ServeReplica:rayspec:Model"
CLEAN = {"engine_dead", "starting", "stage_lost", "timeout"}
BACK_S = 90.0  # on a machine that does other things too
BAD_S = 8.0  # until /health says so


@pytest.fixture(scope="module")
def environment(ray_environment: None) -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def staged(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """With a model in two shards."""
    folder, engine = tmp_path_factory.mktemp("staged"), {**ENGINE, "parallel": dict(TWO_STAGES)}
    with serving(folder, environment, engine) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def simple(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """With a model in its replica's own process."""
    with serving(tmp_path_factory.mktemp("simple"), environment) as endpoint:
        yield endpoint


def asks(num_requests: int, max_tokens: int = 200) -> list[Ask]:
    """Long enough to be under way when something happens."""
    mix = Mix(model="demo", num_requests=num_requests, max_tokens=max_tokens, cut_share=0.0, stop_share=0.0)
    made = mix.asks()
    return [Ask(path=one.path, body={**one.body, "ignore_eos": True, "max_tokens": max_tokens}) for one in made]


def under_load(endpoint: EndpointProcess, strike: Callable[[], None], num_requests: int = 16) -> list[Answer]:
    """What became of requests in whose midst `strike` was called."""
    options = ServeBenchOptions(
        url=endpoint.url,
        api_key=None,
        mix=Mix(model="demo", num_requests=num_requests, max_tokens=1),
        concurrency=num_requests,
    )
    before = endpoint.num_generated()
    with ThreadPoolExecutor(1) as pool:
        answers: Future[list[Answer]] = pool.submit(lambda: asyncio.run(run_load(options, asks(num_requests))))
        wait_until(lambda: not endpoint.is_idle() and endpoint.num_generated() > before + 50, 60)
        strike()
        return answers.result(180)


def endings(answers: list[Answer]) -> dict[str, int]:
    return {ending: sum(one.ending == ending for one in answers) for ending in {one.ending for one in answers}}


def assert_right_or_clean(answers: list[Answer], llm: rayspec.LLM) -> None:
    """Every request has its text, or one error to be tried again after; streams lose nothing."""
    assert differing(llm, answers) == []
    assert set(endings(answers)) <= {"finished", "refused", "failed"}, [one.error for one in answers]
    assert {one.error for one in answers if one.error is not None} <= CLEAN
    assert all(one.status in {200, 503, 504} for one in answers)


def assert_serves(endpoint: EndpointProcess, llm: rayspec.LLM) -> None:
    answers = under_load(endpoint, lambda: None, num_requests=4)
    assert endings(answers) == {"finished": 4}
    assert differing(llm, answers) == []
    wait_until(endpoint.is_idle)


@pytest.mark.exhaustive
class TestShards:
    def test_killed_requests_go_on_as_if_nothing_had_happened(self, staged: EndpointProcess, llm: rayspec.LLM) -> None:
        replicas = staged.pids(REPLICA)
        struck: list[float] = []

        def strike() -> None:
            killed = staged.pids("ray::Shard")[0]
            os.kill(killed, signal.SIGKILL)
            start_s = time.monotonic()
            wait_until(lambda: staged.health() == 503)
            wait_until(lambda: staged.health() == 200, BACK_S)
            struck.append(time.monotonic() - start_s)
            assert killed not in staged.pids("ray::Shard")

        answers = under_load(staged, strike)
        print(f"healthy again after {struck[0]:.1f} s")
        assert endings(answers) == {"finished": 16}, [one.error for one in answers]
        assert_right_or_clean(answers, llm)
        wait_until(staged.is_idle)
        assert staged.pids(REPLICA) == replicas  # Serve did not give it up meanwhile


def post(endpoint: EndpointProcess, max_tokens: int = 2, model: str = "demo") -> httpx2.Response:
    body = {"model": model, "prompt": "The", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx2.post(f"{endpoint.url}/v1/completions", json=body, timeout=300)


@contextmanager
def busy_loop() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def until_served(endpoint: EndpointProcess) -> float:
    """Seconds. Whatever comes meanwhile is OpenAI's error and says when to come again."""
    start_s = time.monotonic()
    while (response := post(endpoint)).status_code != 200:
        assert (response.status_code, int(response.headers["retry-after"]) > 0) == (503, True), response.text
        assert response.json()["error"]["type"] == "server_error"
        assert time.monotonic() - start_s < BACK_S
        time.sleep(0.1)
    return time.monotonic() - start_s


class TestReplicas:
    @pytest.mark.exhaustive
    def test_a_killed_one_is_replaced(self, demo_endpoint: EndpointProcess) -> None:
        assert post(demo_endpoint).status_code == 200
        logged = demo_endpoint.errors.read_text(encoding="utf-8")
        (replica,) = demo_endpoint.pids(REPLICA)
        os.kill(replica, signal.SIGKILL)
        wait_until(lambda: demo_endpoint.health() == 503, 4 * BAD_S)
        assert post(demo_endpoint, model="tools").status_code == 200, "other models go on"
        took_s = -time.monotonic()
        assert post(demo_endpoint).status_code == 200, "it waits"
        took_s += time.monotonic()
        print(f"served again after {took_s:.1f} s, load {os.getloadavg()[0]:.1f}")
        assert demo_endpoint.health() == 200
        new = demo_endpoint.errors.read_text(encoding="utf-8").removeprefix(logged).splitlines()
        assert len(new) <= 5, new

    @pytest.mark.exhaustive
    def test_a_frozen_one_is_replaced(self, simple: EndpointProcess) -> None:
        assert post(simple).status_code == 200
        (replica,) = simple.pids(REPLICA)
        start_s = time.monotonic()
        freeze(replica)
        bad_s = wait_until(lambda: simple.health() == 503)
        until_served(simple)
        took_s = time.monotonic() - start_s
        print(f"bad after {bad_s:.1f} s, served again after {took_s:.1f} s, load {os.getloadavg()[0]:.1f}")
        assert bad_s < BAD_S
        assert took_s < 20.0 * patience()
        wait_until(lambda: replica not in simple.pids(REPLICA))

    @pytest.mark.exhaustive
    def test_a_busy_machine_kills_nobody(self, simple: EndpointProcess) -> None:
        until_served(simple)  # a replica may just have been replaced
        replicas = simple.pids(REPLICA)
        before = len(simple.errors.read_text(encoding="utf-8"))
        with ExitStack() as stack:
            for _ in range(2 * (os.cpu_count() or 1)):
                stack.enter_context(busy_loop())
            for number in range(20):
                took_s = -time.monotonic()
                assert post(simple, 200).status_code == 200
                took_s += time.monotonic()
                print(f"request {number}: {took_s:.1f} s, load {os.getloadavg()[0]:.1f}")
        assert simple.pids(REPLICA) == replicas
        assert "is killed" not in simple.errors.read_text(encoding="utf-8")[before:]

    @pytest.mark.exhaustive
    def test_the_controller_is_not_missed(self, simple: EndpointProcess, llm: rayspec.LLM) -> None:
        answers = under_load(simple, lambda: os.kill(simple.pids("ray::ServeController")[0], signal.SIGKILL))
        assert endings(answers) == {"finished": 16}
        assert_right_or_clean(answers, llm)
        os.kill(simple.pids(REPLICA)[0], signal.SIGKILL)  # its successor replaces replicas, too
        wait_until(lambda: simple.health() == 503)
        until_served(simple)
        assert_serves(simple, llm)


def patience() -> float:
    """What a busy machine needs more of than an idle one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
