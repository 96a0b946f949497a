"""Parts of a running endpoint are killed or frozen under load: what clients get, and how it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import rayspec
from rayspec.service.bench.serve import ServeBenchOptions, differing, run_load
from rayspec.service.bench.serve_client import Answer, Ask
from rayspec.service.bench.serve_mix import Mix
from tests.freezing import freeze
from tests.service.serve.endpoint_process import ENGINE, TWO_STAGES, EndpointProcess, serving, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.exhaustive, pytest.mark.timeout(600)]

# Codes of the errors that a client may get for what has happened to the server.
CLEAN = {"engine_dead", "stage_lost", "timeout"}
BACK_S = 90.0  # on a machine that does other things too


@pytest.fixture(scope="module")
def environment(ray_environment: None) -> Mapping[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def llm() -> Iterator[rayspec.LLM]:
    with rayspec.LLM("demo", **ENGINE) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def staged(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """With a model in two shards."""
    folder, engine = tmp_path_factory.mktemp("staged"), {**ENGINE, "parallel": dict(TWO_STAGES)}
    with serving(folder, environment, engine) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def simple(environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    """With a model in its replica's own process."""
    brief = {"graceful_shutdown_timeout_s": 10.0}  # what a frozen replica is given before it is killed
    with serving(tmp_path_factory.mktemp("simple"), environment, deployment=brief) as endpoint:
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
    wait_until(endpoint.is_idle, 10)


class TestShards:
    def test_killed_requests_go_on_as_if_nothing_had_happened(self, staged: EndpointProcess, llm: rayspec.LLM) -> None:
        replicas = staged.pids("ray::ServeReplica:rayspec:Model")
        struck: list[float] = []

        def strike() -> None:
            killed = staged.pids("ray::Shard")[0]
            os.kill(killed, signal.SIGKILL)
            start_s = time.monotonic()
            wait_until(lambda: staged.health() == 503, 15)
            wait_until(lambda: staged.health() == 200, BACK_S)
            struck.append(time.monotonic() - start_s)
            assert killed not in staged.pids("ray::Shard")

        answers = under_load(staged, strike)
        print(f"healthy again after {struck[0]:.1f} s")
        assert endings(answers) == {"finished": 16}, [one.error for one in answers]
        assert_right_or_clean(answers, llm)
        wait_until(staged.is_idle, 10)
        assert staged.pids("ray::ServeReplica:rayspec:Model") == replicas  # Serve did not give it up meanwhile

    def test_frozen_health_turns_bad_and_the_shard_is_replaced(self, staged: EndpointProcess, llm: rayspec.LLM) -> None:
        frozen: list[int] = []

        def strike() -> None:
            frozen.append(staged.pids("ray::Shard")[0])
            freeze(frozen[0])
            wait_until(lambda: staged.health() == 503, 15)
            wait_until(lambda: staged.health() == 200, BACK_S)

        answers = under_load(staged, strike)
        assert_right_or_clean(answers, llm)
        assert frozen[0] not in staged.pids("ray::Shard")
        assert_serves(staged, llm)


class TestReplicas:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_another_is_started(self, simple: EndpointProcess, llm: rayspec.LLM, number: signal.Signals) -> None:
        (replica,) = simple.pids("ray::ServeReplica:rayspec:Model")

        def strike() -> None:
            os.kill(replica, number)
            wait_until(lambda: simple.health() == 503, 15)

        answers = under_load(simple, strike)
        assert endings(answers).get("finished", 0) < 16
        assert_right_or_clean(answers, llm)
        wait_until(lambda: simple.health() == 200, BACK_S)
        wait_until(lambda: replica not in simple.pids("ray::ServeReplica:rayspec:Model"), 30)
        assert_serves(simple, llm)

    @pytest.mark.parametrize("title", ["ray::ServeReplica:rayspec:Ingress", "ray::ProxyActor"])
    def test_what_speaks_http_comes_back_and_the_model_lets_go(
        self, simple: EndpointProcess, llm: rayspec.LLM, title: str
    ) -> None:
        (pid,) = simple.pids(title)
        answers = under_load(simple, lambda: os.kill(pid, signal.SIGKILL))
        assert differing(llm, answers) == []
        assert all(one.status in {None, 200, 500, 503} for one in answers)
        wait_until(lambda: simple.health() == 200, BACK_S)
        wait_until(simple.is_idle, 15)
        assert_serves(simple, llm)
